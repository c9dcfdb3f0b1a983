"""aiotensor's publisher over `unix://`: one copy in shared memory for all subscribers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from aiotensor.broadcast import Publisher, Subscriber
from bench.contenders.base import Layout


class PublisherPort:
    overlaps = True

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def send(self, tensor: torch.Tensor) -> None:
        await self._publisher.publish(tensor)

    async def allocate(self, size: int) -> torch.Tensor:
        return await self._publisher.allocate((size,), torch.uint8)

    async def receive(self) -> torch.Tensor:
        raise TypeError("a publisher only sends")


class SubscriberPort:
    overlaps = False

    def __init__(self, subscriber: Subscriber[torch.Tensor]) -> None:
        self._subscriber = subscriber

    async def send(self, tensor: torch.Tensor) -> None:
        raise TypeError("a subscriber only receives")

    async def receive(self) -> torch.Tensor:
        return (await self._subscriber.receive()).message


@dataclass(frozen=True)
class PublisherSide:
    address: str
    subscribers: int
    depth: int

    @asynccontextmanager
    async def open(self) -> AsyncIterator[PublisherPort]:
        async with Publisher(self.address, max_behind=self.depth) as publisher:
            await publisher.wait_for_subscribers(self.subscribers)
            yield PublisherPort(publisher)


@dataclass(frozen=True)
class SubscriberSide:
    address: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SubscriberPort]:
        async with Subscriber(self.address, torch.Tensor) as subscriber:
            yield SubscriberPort(subscriber)


def connect(layout: Layout) -> tuple[list[SubscriberSide], PublisherSide]:
    address = f"unix://{layout.folder}/publications.sock"
    subscribers = [SubscriberSide(address) for _ in range(layout.peers)]
    return subscribers, PublisherSide(address, layout.peers, layout.depth)
