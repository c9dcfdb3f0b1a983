"""A bare `torch.multiprocessing.Queue` each way, used as its documentation shows it: blocking calls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue

import torch
import torch.multiprocessing

from bench.contenders.base import Layout

__all__ = ["QueueSide", "connect", "connect_by"]


class QueuePort:
    overlaps = False

    def __init__(self, side: "QueueSide") -> None:
        self._outgoing = side.outgoing
        self._incoming = side.incoming

    async def send(self, tensor: torch.Tensor) -> None:
        # The queue's feeder thread moves the tensor's storage into shared memory after this returns.
        if self._outgoing is None:
            raise TypeError("this side only receives")
        self._outgoing.put(tensor)

    async def receive(self) -> torch.Tensor:
        if self._incoming is None:
            raise TypeError("this side only sends")
        return self._incoming.get()


@dataclass(frozen=True)
class QueueSide:
    outgoing: "Queue[torch.Tensor] | None"
    incoming: "Queue[torch.Tensor] | None"
    strategy: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[QueuePort]:
        torch.multiprocessing.set_sharing_strategy(self.strategy)  # type: ignore[no-untyped-call]
        yield QueuePort(self)


def connect(layout: Layout) -> tuple[list[QueueSide], QueueSide]:
    return connect_by("file_descriptor", layout)


def connect_by(strategy: str, layout: Layout) -> tuple[list[QueueSide], QueueSide]:
    """Connect with one of torch's ways to share memory."""
    context = torch.multiprocessing.get_context("spawn")
    there = context.Queue(layout.depth * layout.peers)
    back = context.Queue(layout.depth) if layout.both_ways else None
    senders = [QueueSide(there, back, strategy) for _ in range(layout.peers)]
    return senders, QueueSide(back, there, strategy)
