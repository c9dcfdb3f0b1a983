"""A subscriber that does not read its connection has the effect of its policy, and affects no other."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from aiotensor import ClosedError, PeerLostError
from aiotensor.broadcast import Publisher
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast import workers
from tests.broadcast.audiences import audience
from verification.patterns import BIG, pattern
from verification.processes.peers import Peer
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


async def test_a_clogged_subscriber_delays_no_other_and_loses_nothing(endpoint: Endpoint) -> None:
    async with clogged(endpoint, max_behind=1000) as (publisher, slow, other, count):
        with promptly():
            await publisher.publish(pattern(count, BIG))
            assert await other.call(workers.receive, 1) == [count]
        assert publisher.statistics().behind == count + 1
        slow.go_on()
        assert await slow.call(workers.receive, count + 1) == list(range(count + 1))
        await publisher.drain()


async def test_a_clogged_subscriber_misses_what_is_dropped(endpoint: Endpoint) -> None:
    async with clogged(endpoint, max_behind=100, slow="drop") as (publisher, slow, _, count):
        assert publisher.statistics().behind == 100
        receiving = slow.start(workers.receive_for_ever)
        slow.go_on()
        await publisher.drain()
        await publisher.aclose()
        assert await receiving == count  # received or missed
        dropped = await slow.call(workers.missed)
        # It may take publications that the connection held before it reads that they were dropped.
        assert 0 < dropped <= count - 100
        assert publisher.statistics().dropped == dropped


async def test_publishing_waits_for_a_clogged_subscriber_and_can_be_cancelled(endpoint: Endpoint) -> None:
    async with clogged(endpoint, max_behind=300) as (publisher, slow, other, count):
        waiting = [asyncio.create_task(publisher.publish(pattern(count, size))) for size in (3, BIG)]
        await until(lambda: publisher.statistics().waiting == 2)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert waiting[0].cancelled()
        assert publisher.statistics().published == count
        slow.go_on()
        assert await slow.call(workers.receive, count) == list(range(count))
        assert await waiting[1] == (count, 2, 0)
        for child in (slow, other):
            assert await child.call(workers.receive, 1) == [count]


async def test_draining_waits_until_a_clogged_subscriber_takes(endpoint: Endpoint) -> None:
    async with clogged(endpoint, max_behind=1000) as (publisher, slow, _, count):
        draining = [asyncio.create_task(publisher.drain()) for _ in range(2)]
        await asyncio.sleep(0)
        draining[0].cancel()
        await asyncio.wait(draining[:1])
        assert draining[0].cancelled()
        assert not draining[1].done()
        slow.go_on()
        assert await slow.call(workers.receive, count) == list(range(count))
        await draining[1]


async def test_a_clogged_subscriber_that_is_killed_ends_every_wait_within_a_second(
    endpoint: Endpoint,
) -> None:
    async with clogged(endpoint, max_behind=300) as (publisher, slow, other, count):
        publishing = [asyncio.create_task(publisher.publish(pattern(count + i, BIG))) for i in range(2)]
        draining = asyncio.create_task(publisher.drain())
        await until(lambda: publisher.statistics().waiting == 2)
        with promptly():
            slow.kill()
            assert [await one for one in publishing] == [(count, 1, 0), (count + 1, 1, 0)]
            await draining
        assert await other.call(workers.receive, 2) == [count, count + 1]


async def test_cancelling_aclose_closes_at_once_though_a_subscriber_does_not_read(endpoint: Endpoint) -> None:
    async with clogged(endpoint, max_behind=1000) as (publisher, slow, other, _):
        closing = asyncio.create_task(publisher.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(ClosedError):
            publisher.publish_nowait(b"")
        await other.call(workers.receive_for_ever)
        slow.go_on()
        with pytest.raises(PeerLostError):  # in place of the publications that its connection did not accept
            await slow.call(workers.receive_for_ever)


async def test_closing_ends_promptly_when_the_clogged_subscriber_is_killed(endpoint: Endpoint) -> None:
    async with clogged(endpoint, max_behind=1000) as (publisher, slow, other, _):
        closing = asyncio.create_task(publisher.aclose())
        await asyncio.sleep(0)
        assert not closing.done()
        with promptly():
            slow.kill()
            await closing
        await other.call(workers.receive_for_ever)
