"""Producers and consumers in this process and in others."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple

import torch

from aiotensor.channel import MessageClient, MessageServer
from aiotensor.queues import MessageQueue, QueueConsumer, QueueProducer
from verification.patterns import BIG, pattern
from verification.processes.peers import Peer, State


class Ends(NamedTuple):
    """A queue with an open producer and an open consumer in this process."""

    queue: MessageQueue[Any]
    producer: QueueProducer
    consumer: QueueConsumer[Any]


@contextmanager
def queue_of(**options: Any) -> Iterator[MessageQueue[Any]]:
    """Create a queue that removes its folder at the end of the block."""
    with MessageQueue(**options) as queue:
        yield queue
    assert not os.path.exists(queue._settings.folder.path)


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Ends]:
    """Return a queue with an open producer and an open consumer."""
    with queue_of(**options) as queue:
        async with queue.consumer() as consumer, queue.producer() as producer:
            yield Ends(queue, producer, consumer)


def inner(ends: Ends) -> tuple[MessageClient[None], MessageServer[Any]]:
    """Return the client and the server that a producer and a consumer are made of."""
    server = ends.consumer._server
    assert server is not None
    return ends.producer._client, server


@asynccontextmanager
async def process() -> AsyncIterator[Peer]:
    """Start a process, and end it with the block."""
    child = Peer("unix:///unused")
    try:
        yield child
    finally:
        await child.close()


def message(number: int, count: int = BIG) -> dict[str, Any]:
    """Return a message with metadata and tensors."""
    return {"number": number, "tags": ["a", {"b": 1.5}], "frames": pattern(number, count)}


def check(got: Any) -> int:
    """Check a message, and return its number."""
    number = int(got["number"])
    assert got["tags"] == ["a", {"b": 1.5}]
    assert torch.equal(got["frames"], pattern(number, len(got["frames"])))
    return number


# In another process


async def open_producer(state: State, queue: MessageQueue[Any]) -> None:
    """Open a producer."""
    state.others["producer"] = await state.stack.enter_async_context(queue.producer())


async def open_consumer(state: State, queue: MessageQueue[Any]) -> None:
    """Open a consumer."""
    state.others["consumer"] = await state.stack.enter_async_context(queue.consumer())


async def put(state: State, numbers: list[int]) -> None:
    """Put messages with these numbers."""
    for number in numbers:
        await state.others["producer"].put(message(number))


async def get(state: State, count: int) -> list[int]:
    """Take so many messages, and return their numbers."""
    return [check(await state.others["consumer"].get()) for _ in range(count)]


async def take_all(state: State) -> list[int]:
    """Take messages until the end, and return their numbers."""
    return [check(got) async for got in state.others["consumer"]]


async def close(state: State) -> None:
    """Close the producer or the consumer."""
    await state.stack.aclose()
