"""Broadcast, as a type checker sees it: checked by mypy, never run."""

from typing import Any, assert_type

import msgspec
import torch

from aiotensor import TensorQueue, blocking
from aiotensor.broadcast import (
    Publication,
    Published,
    Publisher,
    PublisherStatistics,
    SlowPolicy,
    Subscriber,
    SubscriberLag,
    SubscriberStatistics,
)


class Batch(msgspec.Struct):
    """A message."""

    pixels: torch.Tensor


async def publish(address: str, slow: SlowPolicy) -> None:
    async with Publisher(
        address,
        arena_bytes=1 << 30,
        max_behind=8,
        slow=slow,
        max_held_bytes=None,
        history=0,
        max_subscribers=None,
        keep_warm_s=None,
        long_wait_s=None,
        max_wait_s=None,
    ) as publisher:
        assert_type(publisher, Publisher)
        assert_type(publisher.id, str)
        assert_type(await publisher.wait_for_subscribers(4), None)
        pixels = await publisher.allocate((2, 3), torch.uint8)
        assert_type(pixels, torch.Tensor)
        sent = await publisher.publish(Batch(pixels=pixels))
        assert_type(sent, Published)
        assert_type((sent.number, sent.delivered, sent.dropped), tuple[int, int, int])
        assert_type(publisher.publish_nowait(None), Published)
        assert_type(await publisher.drain(), None)
        assert_type(publisher.statistics(), PublisherStatistics)
        assert_type(publisher.statistics().lags, tuple[SubscriberLag, ...])
    Publisher(TensorQueue(), slow="sometimes")  # type: ignore[arg-type]
    Publisher(address, 1 << 30)  # type: ignore[call-arg]


async def subscribe(address: str) -> None:
    async with Subscriber(address, Batch, max_mapped_bytes=None, max_wait_s=1.0) as subscriber:
        assert_type(subscriber, Subscriber[Batch])
        async for publication in subscriber:
            assert_type(publication, Publication[Batch])
            assert_type(publication.message, Batch)
            assert_type((publication.number, publication.missed), tuple[int, int])
        assert_type(await subscriber.receive(), Publication[Batch])
        assert_type(subscriber.receive_nowait(), Publication[Batch])
        assert_type(subscriber.number, int | None)
        assert_type(subscriber.missed, int)
        assert_type(subscriber.statistics(), SubscriberStatistics)
    assert_type(Subscriber(TensorQueue()), Subscriber[Any])
    assert_type(Subscriber(address, torch.Tensor), Subscriber[torch.Tensor])
    Subscriber(address, max_wait_s="long")  # type: ignore[call-overload]


def block(address: str) -> None:
    with (
        blocking.Publisher(address, slow="drop") as publisher,
        blocking.Subscriber(address, Batch) as subscriber,
    ):
        publisher.wait_for_subscribers(1, timeout=1)
        pixels = publisher.allocate((2, 3), torch.uint8, timeout=None)
        assert_type(publisher.publish(Batch(pixels), timeout=1), Published)
        assert_type(publisher.publish_nowait(Batch(pixels)), Published)
        assert_type(publisher.drain(timeout=1), None)
        assert_type(publisher.statistics(), PublisherStatistics)
        assert_type(subscriber.receive(timeout=1), Publication[Batch])
        assert_type(subscriber.receive_nowait(), Publication[Batch])
        for publication in subscriber:
            assert_type(publication, Publication[Batch])
        assert_type(subscriber.statistics(), SubscriberStatistics)
    assert_type(blocking.Subscriber(address), blocking.Subscriber[Any])
