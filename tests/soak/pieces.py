"""What a soak sends: pieces of one file that every process has mapped, and notes of which piece is where.

The file holds random bytes, so a piece that arrives from another place, or with a byte of another, is not
equal to the one that was noted. Mapped, it counts neither as a process's own memory nor as shared memory.
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
from aiotensor.tensors.inline import MAX_INLINE_BYTES

__all__ = ["Note", "Piece", "Road", "Store", "fill", "prepare"]

KIB, MIB = 1 << 10, 1 << 20
LARGEST = 32 * MIB
_STORE_BYTES = 48 * MIB
_MOST_STRIDED = 8 * MIB  # what has to be gathered takes several times as long
_ALIGNMENT = 16
_DTYPES = (torch.uint8, torch.float16, torch.bfloat16, torch.int32, torch.complex64, torch.float64)

# How likely each range of sizes is, in bytes; within a range, small ones are likelier.
_SIZES = (
    (40, _ALIGNMENT, MAX_INLINE_BYTES),
    (35, 64 * KIB, MIB),
    (20, MIB, 8 * MIB),
    (5, 8 * MIB, LARGEST),
)

Road = Literal["by handle", "late", "by arrival", "copied", "impatient", "unwanted", "taken back"]


class Piece(NamedTuple):
    """Which bytes of the file a tensor has: so many from `start`, each `step` after the one before."""

    start: int
    nbytes: int
    step: int = 1


class Note(msgspec.Struct, frozen=True):
    """What the engine is told of a message, over a road of its own.

    Attributes:
        handles: of all tensors of the message.
        pieces: which bytes each has.
        road: how the engine is to take them.
        keep: whether it keeps them for a while.
    """

    handles: tuple[TensorHandle, ...]
    pieces: tuple[Piece, ...]
    road: Road
    keep: bool


def fill(path: Path, seed: int) -> None:
    """Write the file."""
    path.write_bytes(Random(seed).randbytes(_STORE_BYTES))


def prepare(threads: int) -> None:
    """Make this process ready to be measured.

    All threads for what is no work of the library start now: a pool that fills slowly looks like a leak. What
    is here by now is never taken for garbage, so that the collection before each count takes little time.
    """
    gc.freeze()
    pool = ThreadPoolExecutor(threads)
    everybody = Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(everybody.wait)
    everybody.wait()
    asyncio.get_running_loop().set_default_executor(pool)


def draw_bytes(random: Random, largest: int) -> int:
    """Draw the size of a tensor."""
    weights, lows, highs = zip(*_SIZES, strict=True)
    [index] = random.choices(range(len(weights)), weights)
    low, high = min(lows[index], largest), min(highs[index], largest)
    return round(math.exp(random.uniform(math.log(low), math.log(high))))


class Store:
    """The file, mapped here.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._bytes = torch.from_file(str(path), shared=False, size=_STORE_BYTES, dtype=torch.uint8)

    def draw(self, random: Random, largest: int) -> tuple[Piece, torch.Tensor]:
        """Draw a piece, and a tensor of it: of any dtype, or one whose bytes are not beside each other."""
        nbytes = draw_bytes(random, largest)
        if nbytes <= _MOST_STRIDED and random.random() < 0.1:
            piece = self._place(random, nbytes, 2)
            return piece, self.bytes_of(piece)
        dtype = random.choice(_DTYPES)
        piece = self._place(random, nbytes // _ALIGNMENT * _ALIGNMENT, 1)
        tensor = self.bytes_of(piece).view(dtype)
        return piece, tensor.view(2, -1) if random.random() < 0.5 else tensor

    def bytes_of(self, piece: Piece) -> torch.Tensor:
        """Return the bytes of a piece, which are not to be written to."""
        return self._bytes[piece.start : piece.start + piece.nbytes * piece.step : piece.step]

    def has(self, piece: Piece, tensor: torch.Tensor) -> bool:
        """Say whether a tensor has the bytes of a piece."""
        return torch.equal(tensor.reshape(-1).view(torch.uint8), self.bytes_of(piece))

    @staticmethod
    def _place(random: Random, nbytes: int, step: int) -> Piece:
        last = (_STORE_BYTES - nbytes * step) // _ALIGNMENT
        return Piece(random.randint(0, last) * _ALIGNMENT, nbytes, step)
