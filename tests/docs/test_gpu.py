"""The programs of the page on GPUs run, on a GPU if there is one, and on the CPU otherwise."""

import asyncio

import msgspec
import pytest
import torch

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from tests.channel.parties import place
from tests.docs.pages import LIMIT_S, ROOT, Folder, blocks, folder
from verification.waiting import until

pytestmark = pytest.mark.timeout(LIMIT_S)

PAGE = "docs/gpu.md"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(word: str) -> str:
    """Run the one program of the page that contains a word, and return its output."""
    [program] = [text for text in blocks("python", PAGE) if word in text and "asyncio.run" in text]
    with folder(Folder) as made:
        made.save("program.py", program)
        return made.run("program.py")


def test_the_engine_of_the_page_copies_the_received_frames_to_its_device() -> None:
    assert run("gpu-simple") == f"mean 7.0 on {DEVICE}\n"


def test_the_result_of_a_model_arrives_from_its_device() -> None:
    assert [run("gpu-results")] == blocks("text", PAGE)


def test_the_page_shows_the_classes_of_the_example() -> None:
    [classes] = [text for text in blocks("python", PAGE) if "class Uploader" in text]
    assert classes in (ROOT / "examples" / "gpu_engine.py").read_text()


def test_the_comparison_of_copies_runs_or_says_that_there_is_no_gpu() -> None:
    with folder(Folder) as made:
        printed = made.run(str(ROOT / "examples" / "gpu_copies.py"))
    assert ("returned after" in printed) == torch.cuda.is_available()
    assert printed.startswith(("150 MiB to ", "there is no GPU"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU on this machine")
def test_uploads_of_different_sizes_arrive_on_the_gpu_in_order() -> None:
    import gpu_engine  # the GPU is needed to create its events

    uploader = gpu_engine.Uploader(torch.device("cuda:0"))
    for number in range(50):
        source = torch.full((1 + number % 7, 1 << 20), number, dtype=torch.uint8)
        on_gpu = uploader.upload(source)
        source.fill_(255)  # as a sender does with the memory of a tensor that was freed
        assert bool((on_gpu == number).all())


class Video(msgspec.Struct):
    frames: torch.Tensor


@pytest.mark.usefixtures("nothing_left_behind")
async def test_a_tensor_that_is_removed_from_its_message_frees_its_memory_before_the_answer() -> None:
    with place() as here:
        async with (
            TensorReceiver(here.tensors) as receiver,
            MessageServer(here.messages, Video, receiver=receiver) as server,
            TensorSender(here.tensors) as sender,
            MessageClient(here.messages, sender=sender, reply_type=int) as client,
        ):
            asked = asyncio.create_task(client.request(Video(torch.zeros(1 << 20))))
            request = await anext(server)
            assert sender.statistics().bytes_in_use > 0
            request.message.frames = torch.empty(0)
            await until(lambda: sender.statistics().bytes_in_use == 0)
            assert not asked.done()
            await request.reply(1)
            assert await asked == 1
