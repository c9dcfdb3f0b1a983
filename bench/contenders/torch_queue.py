"""A bare `torch.multiprocessing.Queue` each way, used as its documentation shows it: blocking calls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch
import torch.multiprocessing

from bench.contenders.base import Layout, Port, Sides


@asynccontextmanager
async def opened(outgoing: Any, incoming: Any) -> AsyncIterator[Port]:
    async def send(tensor: torch.Tensor) -> None:
        # The queue's feeder thread moves the tensor's storage into shared memory after this returns.
        outgoing.put(tensor)

    async def receive() -> torch.Tensor:
        tensor: torch.Tensor = incoming.get()
        return tensor

    yield Port(send, receive)


def connect(layout: Layout) -> Sides[Port]:
    context = torch.multiprocessing.get_context("spawn")
    there = context.Queue(layout.depth * layout.peers)
    back = context.Queue(layout.depth) if layout.both_ways else None
    return [partial(opened, there, back)] * layout.peers, partial(opened, back, there)
