"""A publisher and its subscribers, in one process or in several."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import torch

from aiotensor.broadcast import Publication, Publisher, Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast import workers
from verification.processes.peers import Peer, peers
from verification.waiting import until


class Batch(msgspec.Struct):
    name: str
    pixels: torch.Tensor


class Broadcast(NamedTuple):
    publisher: Publisher
    subscribers: list[Subscriber[Any]]


class Broadcasts:
    """Make publishers with subscribers at one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    @asynccontextmanager
    async def open(self, count: int = 2, type: Any = Any, **limits: Any) -> AsyncIterator[Broadcast]:  # noqa: A002
        """Open a publisher, and wait until `count` subscribers are connected."""
        async with AsyncExitStack() as stack:
            publisher = await stack.enter_async_context(Publisher(self.endpoint, **limits))
            subscribers = []
            for _ in range(count):
                subscribers.append(await stack.enter_async_context(Subscriber(self.endpoint, type)))
            if count:
                await _joined(publisher, count)
            yield Broadcast(publisher, subscribers)

    @asynccontextmanager
    async def subscriber(self, publisher: Publisher, type: Any = Any) -> AsyncIterator[Subscriber[Any]]:  # noqa: A002
        """Open one more subscriber, and wait until it is connected."""
        connected = publisher.statistics().subscribers
        async with Subscriber(self.endpoint, type) as subscriber:
            await _joined(publisher, connected + 1)
            yield subscriber


@asynccontextmanager
async def audience(
    endpoint: Endpoint, count: int, **limits: Any
) -> AsyncIterator[tuple[Publisher, list[Peer]]]:
    """Open a publisher, and subscribers in other processes."""
    async with peers(endpoint, count) as children, Publisher(endpoint, **limits) as publisher:
        for child in children:
            await child.call(workers.subscribe)
        await _joined(publisher, count)
        yield publisher, children


async def _joined(publisher: Publisher, count: int) -> None:
    """Wait until subscribers are connected, also beyond `max_wait_s`."""
    await until(lambda: publisher.statistics().subscribers >= count)


def remove_socket(endpoint: Endpoint) -> None:
    """Remove the socket of a killed publisher, which the next publisher would replace."""
    if isinstance(endpoint, str) and endpoint.startswith("unix://"):
        os.unlink(endpoint.removeprefix("unix://"))


async def received(subscriber: Subscriber[Any], count: int) -> list[Any]:
    """Receive some publications, and return their messages."""
    return [(await subscriber.receive()).message for _ in range(count)]


async def taken(subscriber: Subscriber[Any]) -> list[Publication[Any]]:
    """Receive the publications that have arrived, without waiting for more."""
    publications = []
    while subscriber.statistics().unclaimed:
        publications.append(await subscriber.receive())
    return publications


async def idle(publisher: Publisher) -> None:
    """Wait until no memory of a publisher is in use."""
    await until(lambda: not publisher.statistics().bytes_in_use)


async def turns(count: int = 20) -> None:
    """Run the loop for some iterations."""
    for _ in range(count):
        await asyncio.sleep(0)
