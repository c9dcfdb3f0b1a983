"""Subscribers that connect late receive the history, and then everything else."""

import asyncio
import errno
import os

import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.receiving import mappings
from tests.broadcast.audiences import Broadcasts, idle, received, turns
from verification.patterns import BIG, pattern
from verification.waiting import until


async def test_a_late_subscriber_begins_with_the_next_publication(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(1) as (publisher, [early]):
        for number in range(3):
            await publisher.publish(number)
        async with broadcasts.subscriber(publisher) as late:
            await publisher.publish(3)
            publication = await late.receive()
            assert (publication.number, publication.message, publication.missed) == (3, 3, 0)
        assert await received(early, 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("published", [0, 1, 2, 3, 10])
async def test_a_late_subscriber_receives_the_history(broadcasts: Broadcasts, published: int) -> None:
    async with broadcasts.open(0, history=3) as (publisher, _):
        for number in range(published):
            await publisher.publish(pattern(number, (3, BIG)[number % 2]))
        assert publisher.statistics().history == min(published, 3)
        async with broadcasts.subscriber(publisher) as late:
            await publisher.publish(pattern(published, BIG))
            for number in range(max(0, published - 3), published + 1):
                publication = await late.receive()
                assert (publication.number, publication.missed) == (number, 0)
                size = BIG if number == published else (3, BIG)[number % 2]
                assert torch.equal(publication.message, pattern(number, size))


async def test_the_history_outlasts_the_subscribers(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(1, history=1) as (publisher, [first]):
        await publisher.publish(pattern(7, BIG))
        assert torch.equal((await first.receive()).message, pattern(7, BIG))
        await first.aclose()
        await until(lambda: not publisher.statistics().subscribers)
        async with broadcasts.subscriber(publisher) as second:
            assert torch.equal((await second.receive()).message, pattern(7, BIG))


async def test_the_history_is_evicted_when_memory_is_needed(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(0, history=4, arena_bytes=2 << 20) as (publisher, _):
        for number in range(10):
            await publisher.publish(pattern(number, 100_000))  # 800 kB, so that two fit
        assert publisher.statistics().history == 2
        tensor = await publisher.allocate((2 << 20,), torch.uint8)
        assert publisher.statistics().history == 0
        del tensor
        await idle(publisher)


async def test_the_history_keeps_no_memory_that_a_call_waits_for(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(0, history=4, arena_bytes=2 << 20) as (publisher, _):
        first = await publisher.allocate((2 << 20,), torch.uint8)
        waiting = asyncio.create_task(publisher.allocate((2 << 20,), torch.uint8))
        await until(lambda: publisher.statistics().waiting == 1)
        await publisher.publish(first)
        assert publisher.statistics().history == 0
        await publisher.publish("without memory")
        assert publisher.statistics().history == 1
        del first
        await waiting
        del waiting
        await idle(publisher)


async def test_a_closed_publisher_keeps_no_history(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(1, history=2) as (publisher, _):
        for number in range(3):
            await publisher.publish(pattern(number, BIG))
        await publisher.aclose()
        assert publisher.statistics().history == 0


async def test_a_subscriber_that_connects_again_receives_nothing_twice(address: str) -> None:
    async with (
        Publisher(address, history=4, max_behind=5, slow="disconnect") as publisher,
        Subscriber(address) as subscriber,
    ):
        await publisher.wait_for_subscribers(1)
        for number in range(5):
            await publisher.publish(number)
        await publisher.publish(5)  # which disconnects it
        assert await received(subscriber, 5) == [0, 1, 2, 3, 4]
        with pytest.raises(PeerLostError, match="publications behind"):
            await subscriber.receive()
        publication = await subscriber.receive()
        assert (publication.message, publication.missed) == (5, 0)


async def test_publications_before_the_first_arrival_after_a_reconnect_are_missed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async with Publisher(address) as publisher, Subscriber(address, torch.Tensor) as subscriber:
        await publisher.wait_for_subscribers(1)
        with monkeypatch.context() as patch:
            patch.setattr(mappings, "open_segment", refuse)
            await publisher.publish(pattern(0, BIG))
            with pytest.raises(PeerLostError, match="cannot be mapped"):
                await subscriber.receive()
            await publisher.publish(pattern(1, BIG))
        receiving = asyncio.create_task(subscriber.receive())
        await publisher.wait_for_subscribers(1)
        await publisher.publish(pattern(2, BIG))
        publication = await receiving
        assert (publication.number, publication.missed, subscriber.missed) == (2, 2, 2)


async def test_history_and_new_publications_arrive_in_order_while_subscribers_come_and_go(
    broadcasts: Broadcasts,
) -> None:
    async with broadcasts.open(0, history=3, max_behind=4) as (publisher, _):

        async def visit() -> None:
            async with Subscriber[object](broadcasts.endpoint) as subscriber:
                expected = None
                for _ in range(6):
                    publication = await subscriber.receive()
                    assert expected in (None, publication.number)
                    assert publication.missed == 0
                    expected = publication.number + 1

        visits = [asyncio.create_task(visit()) for _ in range(6)]
        while not all(visit.done() for visit in visits):
            await publisher.publish(pattern(publisher.statistics().published, BIG))
            await turns(2)
        for one in visits:
            await one
        await until(lambda: not publisher.statistics().subscribers)
