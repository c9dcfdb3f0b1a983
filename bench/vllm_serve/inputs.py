"""Make videos, and a small Qwen2-VL with random weights, in the current folder: no download is needed.

Runs in the environment of vLLM. The configuration is in the folder `model` beside this file.
"""

import shutil
from pathlib import Path

import cv2
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

MODEL, VIDEOS = Path("model"), Path("videos")
SIZES = ((16, 224), (32, 336), (32, 448), (48, 504))  # frames, and pixels of an edge: 2 to 37 MB of uint8
COUNT = 60

SPECIAL = (  # the configuration contains their ids, which follow those of 256 bytes
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}{% if part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>
{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def write_tokenizer() -> None:
    """Write a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    bytewise.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        additional_special_tokens=list(SPECIAL[1:]),
        model_max_length=32768,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(MODEL)


def write_weights() -> None:
    """Write random weights, the same each time."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(MODEL)).float()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
        elif "norm" in name:
            parameter.data.fill_(1)
        else:
            parameter.data.normal_(std=0.2)
    model.save_pretrained(MODEL)


def write_videos() -> None:
    """Write videos of several sizes, each different from all others."""
    VIDEOS.mkdir(exist_ok=True)
    for number in range(COUNT):
        frames, edge = SIZES[number % len(SIZES)]
        path = str(VIDEOS / f"{number}.mp4")
        writer = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"mp4v"), 2, (edge, edge))
        y, x = np.mgrid[0:edge, 0:edge]
        for time in range(frames):
            channels = [x + 7 * time + 11 * number, y * 2 + 5 * number, x * y // 64 + 9 * time]
            frame = np.stack(channels, -1).astype(np.uint8)
            center = (31 * time + 17 * number) % edge, (13 * time + 29 * number) % edge
            writer.write(cv2.circle(frame, center, 30, (255, 255, 255), -1))
        writer.release()


if __name__ == "__main__":
    shutil.copytree(Path(__file__).parent / "model", MODEL, dirs_exist_ok=True)
    write_tokenizer()
    write_weights()
    write_videos()
