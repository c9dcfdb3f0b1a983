"""aiotensor's publisher over `unix://`: one copy in shared memory for all subscribers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import torch

from aiotensor.broadcast import Publisher, Subscriber
from bench.contenders.base import Layout, Port, Sides


@asynccontextmanager
async def publishing(address: str, layout: Layout) -> AsyncIterator[Port]:
    async with Publisher(address, max_behind=layout.depth) as publisher:
        await publisher.wait_for_subscribers(layout.peers)
        yield Port(
            publisher.publish,
            allocate=lambda size: publisher.allocate((size,), torch.uint8),
            overlaps=True,
        )


@asynccontextmanager
async def subscribing(address: str) -> AsyncIterator[Port]:
    async with Subscriber(address, torch.Tensor) as subscriber:

        async def receive() -> torch.Tensor:
            return (await subscriber.receive()).message

        yield Port(receive=receive)


def connect(layout: Layout) -> Sides[Port]:
    address = f"unix://{layout.folder}/publications.sock"
    return [partial(subscribing, address)] * layout.peers, partial(publishing, address, layout)
