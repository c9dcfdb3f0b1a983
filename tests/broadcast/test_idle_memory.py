"""Memory follows use after the publisher has ended: subscribers keep the pages of living tensors only."""

import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.broadcast import Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast import workers
from tests.broadcast.audiences import remove_socket
from verification.patterns import pattern
from verification.processes import watch
from verification.processes.peers import Peer, peers
from verification.waiting import until

MIB = 1 << 20
LARGE, SMALL = 48 * MIB // 8, 16 * 1024 // 8  # elements of int64
SIZES = (LARGE, SMALL)


@asynccontextmanager
async def published(endpoint: Endpoint, count: int) -> AsyncIterator[tuple[Peer, list[Subscriber[Any]]]]:
    """Open a publisher in another process, which publishes a large and a small tensor."""
    async with peers(endpoint, 1) as [publisher]:
        subscribers = [Subscriber[Any](endpoint) for _ in range(count)]
        for subscriber in subscribers:
            await subscriber.__aenter__()
        try:
            await publisher.call(workers.start, count)
            for size in SIZES:
                await publisher.call(workers.publish, 1, size)
            for subscriber in subscribers:
                await until(lambda subscriber=subscriber: subscriber.statistics().unclaimed == 2)  # type: ignore[misc]
            yield publisher, subscribers
        finally:
            for subscriber in subscribers:
                await subscriber.aclose()


async def end(publisher: Peer, how: str) -> None:
    if how == "close":
        await publisher.call(workers.close)
    publisher.kill()
    await publisher.ended()


async def take(subscriber: Subscriber[Any]) -> list[torch.Tensor]:
    """Receive both tensors."""
    return [(await subscriber.receive()).message for _ in SIZES]


async def shrinks_to(nbytes: int) -> None:
    await until(lambda: watch.memfd_bytes(os.getpid()) <= nbytes)


@pytest.mark.promise(30)
@pytest.mark.parametrize("how", ["close", "kill"])
async def test_small_tensors_keep_no_other_memory_of_an_ended_publisher(endpoint: Endpoint, how: str) -> None:
    async with published(endpoint, 3) as (publisher, subscribers):
        tensors = [await take(subscriber) for subscriber in subscribers]
        tensors[0][0].zero_()  # the memory of the copied pages returns, too
        tensors[0].pop(0)
        await end(publisher, how)
        for subscriber in subscribers:
            await until(lambda subscriber=subscriber: not subscriber.statistics().publishers)  # type: ignore[misc]
        for each in tensors[1:]:
            assert torch.equal(each[0], pattern(0, LARGE))
            each.pop(0)
        await shrinks_to(MIB)
        await until(lambda: watch.status(os.getpid(), "RssShmem") < 1024)
        assert all(torch.equal(kept, pattern(1, SMALL)) for [kept] in tensors)
        del each
        tensors.clear()
        await until(lambda: not watch.memfds(os.getpid()))
        await until(lambda: not watch.memfd_bytes(os.getpid()))
    if how == "kill":
        remove_socket(endpoint)


async def test_arrived_publications_survive_their_release_by_other_subscribers(
    endpoint: Endpoint,
) -> None:
    async with published(endpoint, 2) as (publisher, [early, late]):
        await end(publisher, "kill")
        small = (await take(early))[1]
        with pytest.raises(PeerLostError):
            await anext(early)
        await until(lambda: early.statistics().leases == 1)
        assert torch.equal((await take(late))[0], pattern(0, LARGE))
        with pytest.raises(PeerLostError):
            await anext(late)
        await shrinks_to(MIB)
        assert torch.equal(small, pattern(1, SMALL))
    remove_socket(endpoint)


@pytest.mark.parametrize("endpoint", ["unix"], indirect=True)
async def test_the_last_tensor_of_a_publisher_that_is_gone_closes_both_pipes_of_its_segment(
    endpoint: Endpoint,
) -> None:
    def pipes() -> int:
        return watch.targets(os.getpid()).count("pipe")

    async with published(endpoint, 1) as (publisher, [subscriber]):
        tensors = await take(subscriber)
        await end(publisher, "close")
        with pytest.raises(PeerLostError):
            await subscriber.receive()
        before = pipes()
        gc.collect()
        gc.disable()  # the descriptors return even so
        try:
            tensors.clear()
            await until(lambda: pipes() <= before - 2)
        finally:
            gc.enable()
