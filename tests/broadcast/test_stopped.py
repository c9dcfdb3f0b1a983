"""Subscribers and publishers whose processes are stopped, and continued or killed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
import torch

from aiotensor import WouldBlockError
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.protocol.network import WINDOW_BYTES
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast import workers
from tests.broadcast.audiences import audience, idle
from verification.patterns import BIG, pattern
from verification.processes.peers import Peer, peers
from verification.promptly import promptly
from verification.waiting import until

_MORE_THAN_FITS = 300  # publications of 8 KB each: the connection holds fewer


class Clogged(NamedTuple):
    """A publisher here; the process `slow` is stopped, and its connection is full; `other` has taken all."""

    publisher: Publisher
    slow: Peer
    other: Peer
    published: int


@asynccontextmanager
async def clogged(endpoint: Endpoint, **limits: Any) -> AsyncIterator[Clogged]:
    """Stop one of two subscribers, and publish more than its connection holds; the other one takes it."""
    async with audience(endpoint, 2, **limits) as (publisher, [stopped, other]):
        await stopped.stop()
        try:
            for number in range(_MORE_THAN_FITS):
                await publisher.publish(pattern(number, 1000))
                if (number + 1) % 50 == 0:
                    await other.call(workers.receive, 50)
            yield Clogged(publisher, stopped, other, _MORE_THAN_FITS)
        finally:
            stopped.go_on()


@pytest.mark.promise(34)
async def test_a_stopped_subscriber_delays_no_other_and_loses_nothing(endpoint: Endpoint) -> None:
    async with clogged(endpoint, max_behind=1000) as (publisher, slow, other, count):
        with promptly():
            await publisher.publish(pattern(count, BIG))
            assert await other.call(workers.receive, 1) == [count]
        assert publisher.statistics().behind == count + 1
        draining = [asyncio.create_task(publisher.drain()) for _ in range(2)]
        await asyncio.sleep(0)
        draining[0].cancel()
        await asyncio.wait(draining[:1])
        assert draining[0].cancelled()
        assert not draining[1].done()
        slow.go_on()
        assert await slow.call(workers.receive, count + 1) == list(range(count + 1))
        await draining[1]


@pytest.mark.promise(34)
async def test_a_stopped_subscriber_misses_what_a_publisher_drops(endpoint: Endpoint) -> None:
    is_local = not str(endpoint).startswith("tcp://")
    limits = {"max_behind": 3, "slow": "drop", "arena_bytes": 16 << 20}
    async with audience(endpoint, 2, **limits) as (publisher, [stopped, other]):
        await stopped.stop()
        for number in range(50):
            with promptly():
                await publisher.publish(pattern(number, BIG))
            assert await other.call(workers.receive, 1) == [number]
        assert publisher.statistics().lags[0].behind == 3
        # The stopped subscriber has three withdrawn and three pending publications; the other frees its own.
        # On another machine, other publications of the window may be under way, and one more in part.
        most = 6 * (BIG * 8 + 4096)
        if not is_local:
            most += WINDOW_BYTES + BIG * 8
        await until(lambda: publisher.statistics().bytes_in_use <= most)
        stopped.go_on()
        received: list[int] = []
        while received[-1:] != [49]:
            received += await stopped.call(workers.receive, 1)
        # From another machine, the first ones may arrive, and be taken, before their withdrawals.
        assert received[-3:] == [47, 48, 49] == (received if is_local else received[-3:])
        assert await stopped.call(workers.missed) == 50 - len(received)
        assert publisher.statistics().dropped == 50 - len(received)
        await idle(publisher)


async def test_a_publisher_does_not_wait_long_for_a_stopped_subscriber_when_it_closes(
    endpoint: Endpoint,
) -> None:
    async with audience(endpoint, 1, max_behind=1000, max_wait_s=0.5) as (publisher, [stopped]):
        await stopped.stop()
        for _ in range(900):
            await publisher.publish(b"0" * 15_000)  # more than the socket accepts
        with promptly(3):
            await publisher.aclose()
        stopped.go_on()


async def test_subscribers_of_a_stopped_publisher_wait_and_then_miss_nothing(endpoint: Endpoint) -> None:
    async with (
        peers(endpoint, 1) as [publisher],
        Subscriber(endpoint, torch.Tensor, max_wait_s=0.1) as impatient,
        Subscriber(endpoint, torch.Tensor) as patient,
    ):
        await publisher.call(workers.start, 2)
        await publisher.call(workers.publish, 2, BIG)
        for subscriber in (impatient, patient):
            await until(lambda subscriber=subscriber: subscriber.statistics().unclaimed == 2)  # type: ignore[misc]
        await publisher.stop()
        for subscriber in (impatient, patient):
            for number in range(2):  # these arrived before
                assert torch.equal((await subscriber.receive()).message, pattern(number, BIG))
        waiting = asyncio.create_task(patient.receive())
        with pytest.raises(WouldBlockError, match="is connected, but has published nothing since") as caught:
            await impatient.receive()
        assert type(caught.value) is WouldBlockError
        assert not waiting.done()
        publishing = publisher.start(workers.publish, 2, BIG)
        publisher.go_on()
        assert await publishing == 3
        await until(lambda: impatient.statistics().unclaimed == 2)
        publications = [await waiting, await impatient.receive()]
        publications += [await patient.receive(), await impatient.receive()]
        assert [(one.number, one.missed) for one in publications] == [(2, 0), (2, 0), (3, 0), (3, 0)]
        assert all(torch.equal(one.message, pattern(one.number, BIG)) for one in publications)
        del publications
        await publisher.finish()
