"""A bare `torch.multiprocessing.Queue` each way, used as its documentation shows it: blocking calls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.queues import Queue

import torch
import torch.multiprocessing


class QueuePort:
    def __init__(self, side: "QueueSide") -> None:
        self._side = side

    async def send(self, tensor: torch.Tensor) -> None:
        # The queue's feeder thread moves the tensor's storage into shared memory after this returns.
        self._side.outgoing.put(tensor)

    async def receive(self) -> torch.Tensor:
        return self._side.incoming.get()


@dataclass(frozen=True)
class QueueSide:
    outgoing: "Queue[torch.Tensor]"
    incoming: "Queue[torch.Tensor]"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[QueuePort]:
        yield QueuePort(self)


def pair() -> tuple[QueueSide, QueueSide]:
    context = torch.multiprocessing.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    return QueueSide(there, back), QueueSide(back, there)
