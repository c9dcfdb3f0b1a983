"""faster-fifo: a ring buffer in shared memory, through which arrays are pickled."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import faster_fifo
import torch

from bench.contenders.base import Layout

_FOR_EVER_S = 1e6  # its default gives up after ten seconds
_SMALLEST_RING = 1 << 20
_PICKLE = 1 << 10  # more bytes than pickle adds to an array


class RingPort:
    overlaps = False

    def __init__(self, outgoing: faster_fifo.Queue | None, incoming: faster_fifo.Queue | None) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, tensor: torch.Tensor) -> None:
        if self._outgoing is None:
            raise TypeError("this side only receives")
        # An array is pickled with its bytes; a tensor would be moved into torch's shared memory instead.
        self._outgoing.put(tensor.numpy(), timeout=_FOR_EVER_S)

    async def receive(self) -> torch.Tensor:
        if self._incoming is None:
            raise TypeError("this side only sends")
        return torch.from_numpy(self._incoming.get(timeout=_FOR_EVER_S))


@dataclass(frozen=True)
class RingSide:
    outgoing: faster_fifo.Queue | None
    incoming: faster_fifo.Queue | None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RingPort]:
        yield RingPort(self.outgoing, self.incoming)


def connect(layout: Layout) -> tuple[list[RingSide], RingSide]:
    there = _ring(layout.depth * layout.peers, layout.largest)
    back = _ring(layout.depth, layout.largest) if layout.both_ways else None
    return [RingSide(there, back) for _ in range(layout.peers)], RingSide(back, there)


def _ring(depth: int, largest: int) -> faster_fifo.Queue:
    # Space for all small tensors that may be in flight, but for only one of the largest at a time.
    room = max(_SMALLEST_RING, largest + _PICKLE, min(depth * (largest + _PICKLE), 64 << 20))
    return faster_fifo.Queue(max_size_bytes=room, maxsize=depth)
