"""The tensors of a soak: pieces of one file that every process has mapped, and notes that identify them.

The file contains random bytes, so a piece with a single byte from elsewhere differs from the noted one. Its
mapping counts neither as private memory of a process nor as shared memory.
"""

import asyncio
import gc
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Barrier
from typing import Literal, NamedTuple

import msgspec
import torch

from aiotensor import TensorHandle
from aiotensor.memory.inline import MAX_INLINE_BYTES

__all__ = ["Note", "Piece", "Road", "Store", "fill", "prepare"]

KIB, MIB = 1 << 10, 1 << 20
LARGEST = 32 * MIB
_STORE_BYTES = 48 * MIB
_MOST_STRIDED = 8 * MIB  # gathering takes several times as long as a plain copy
_ALIGNMENT = 16
_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.complex64, torch.float64)

# The weights of ranges of sizes, in bytes; within a range, small sizes are more likely.
_SIZES = (
    (40, _ALIGNMENT, MAX_INLINE_BYTES),
    (35, 64 * KIB, MIB),
    (20, MIB, 8 * MIB),
    (5, 8 * MIB, LARGEST),
)

Road = Literal["by handle", "late", "by arrival", "copied", "impatient", "unwanted", "taken back"]


class Piece(NamedTuple):
    """The bytes of a tensor in the file: `nbytes` bytes from `start`, at a distance of `step`."""

    start: int
    nbytes: int
    step: int = 1


class Note(msgspec.Struct, frozen=True):
    """The description of a message, which the engine gets over a separate socket.

    Attributes:
        handles: the handles of all tensors in the message.
        pieces: the bytes of each tensor.
        road: the way in which the engine takes them.
        keep: whether it keeps them for a while.
    """

    handles: tuple[TensorHandle, ...]
    pieces: tuple[Piece, ...]
    road: Road
    keep: bool


def fill(path: Path, seed: int) -> None:
    """Write the file with random bytes."""
    path.write_bytes(Random(seed).randbytes(_STORE_BYTES))


def prepare(threads: int) -> None:
    """Prepare this process for measurements.

    All threads outside the library start now, since a pool that grows slowly looks like a leak. Later garbage
    collections skip the existing objects, so that a collection before each count takes little time.
    """
    gc.freeze()
    pool = ThreadPoolExecutor(threads)
    all_started = Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(all_started.wait)
    all_started.wait()
    asyncio.get_running_loop().set_default_executor(pool)


def draw_bytes(random: Random, largest: int) -> int:
    """Draw the size of a tensor."""
    weights, lows, highs = zip(*_SIZES, strict=True)
    [index] = random.choices(range(len(weights)), weights)
    low, high = min(lows[index], largest), min(highs[index], largest)
    return round(math.exp(random.uniform(math.log(low), math.log(high))))


class Store:
    """The file, mapped into this process.

    Args:
        path: the path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = torch.from_file(str(path), shared=False, size=_STORE_BYTES, dtype=torch.uint8)

    def draw(self, random: Random, largest: int) -> tuple[Piece, torch.Tensor]:
        """Draw a piece, and return it with its tensor: of any dtype, or not contiguous."""
        nbytes = draw_bytes(random, largest)
        if nbytes <= _MOST_STRIDED and random.random() < 0.1:
            piece = self._place(random, nbytes, 2)
            return piece, self.bytes_of(piece)
        dtype = random.choice(_DTYPES)
        piece = self._place(random, nbytes // _ALIGNMENT * _ALIGNMENT, 1)
        tensor = self.bytes_of(piece).view(dtype)
        return piece, tensor.view(2, -1) if random.random() < 0.5 else tensor

    def bytes_of(self, piece: Piece) -> torch.Tensor:
        """Return the bytes of a piece, which must not be written to."""
        return self._bytes[piece.start : piece.start + piece.nbytes * piece.step : piece.step]

    def has(self, piece: Piece, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has the bytes of a piece."""
        return torch.equal(tensor.reshape(-1).view(torch.uint8), self.bytes_of(piece))

    @staticmethod
    def _place(random: Random, nbytes: int, step: int) -> Piece:
        last = (_STORE_BYTES - nbytes * step) // _ALIGNMENT
        return Piece(random.randint(0, last) * _ALIGNMENT, nbytes, step)
