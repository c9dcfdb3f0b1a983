"""Two copies of the tensor into warm memory, in one process: the minimal cost of copying there and back.

No data is passed on, and no process is woken. The C library copies; with several threads, each copies an
equal share.
"""

import ctypes
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from bench.contenders.base import Layout
from bench.workloads.stream import fresh

__all__ = ["CopySide", "connect_with"]

_SMALLEST_SHARE = 1 << 20  # below this, waking a thread takes longer than the copy


class CopyPort:
    overlaps = False

    def __init__(self, threads: int, largest: int, helpers: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._helpers = helpers
        self._there, self._back = fresh(largest, 2)
        self._size = 0

    async def send(self, tensor: torch.Tensor) -> None:
        self._size = len(tensor)
        self._copy(self._there, tensor)

    async def receive(self) -> torch.Tensor:
        self._copy(self._back, self._there)
        return self._back[: self._size]

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        shares = self._threads if self._size >= self._threads * _SMALLEST_SHARE else 1
        edges = [self._size * share // shares for share in range(shares + 1)]
        spans = [(target.data_ptr() + a, source.data_ptr() + a, b - a) for a, b in pairwise(edges)]
        others = [self._helpers.submit(ctypes.memmove, *span) for span in spans[1:]]
        ctypes.memmove(*spans[0])
        for other in others:
            other.result()


@dataclass(frozen=True)
class CopySide:
    threads: int
    largest: int

    @asynccontextmanager
    async def open(self) -> AsyncIterator[CopyPort]:
        with ThreadPoolExecutor(max(1, self.threads - 1)) as helpers:
            yield CopyPort(self.threads, self.largest, helpers)


def connect_with(threads: int, layout: Layout) -> tuple[list[CopySide], CopySide]:
    """Return a side that copies with this number of threads; the receiving side is never opened."""
    side = CopySide(threads, layout.largest)
    return [side], side
