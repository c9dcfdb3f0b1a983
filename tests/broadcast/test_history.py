"""Subscribers that connect late receive the history, and then everything else."""

import asyncio
import errno
import os

import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.memory import mappings
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast.audiences import Broadcasts, idle
from verification.fuzz.listening import waiting_at
from verification.patterns import BIG, pattern
from verification.waiting import until

once = pytest.mark.parametrize("endpoint", ["unix"], indirect=True)  # the link makes no difference


@pytest.mark.parametrize("published", [0, 2, 10])
async def test_a_late_subscriber_receives_the_history_and_then_everything(
    broadcasts: Broadcasts, published: int
) -> None:
    async with broadcasts.open(0, history=3) as (publisher, _):
        for number in range(published):
            await publisher.publish(pattern(number, (3, BIG)[number % 2]))
        assert publisher.statistics().history == min(published, 3)
        for late in range(2):  # the history outlasts the first subscriber
            async with broadcasts.subscriber(publisher) as subscriber:
                await publisher.publish(pattern(published + late, BIG))
                for number in range(max(0, published + late - 3), published + late + 1):
                    publication = await subscriber.receive()
                    assert (publication.number, publication.missed) == (number, 0)
                    size = BIG if number >= published else (3, BIG)[number % 2]
                    assert torch.equal(publication.message, pattern(number, size))
                    del publication
            await until(lambda: not publisher.statistics().subscribers)
        await publisher.aclose()
        assert publisher.statistics().history == 0


@once
async def test_the_history_is_evicted_when_memory_is_needed(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(0, history=4, arena_bytes=2 << 20) as (publisher, _):
        for number in range(10):
            await publisher.publish(pattern(number, 100_000))  # 800 kB, so that two fit
        assert publisher.statistics().history == 2
        tensor = await publisher.allocate((2 << 20,), torch.uint8)
        assert publisher.statistics().history == 0
        del tensor
        await idle(publisher)


@once
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


async def test_publications_before_the_first_arrival_after_a_reconnect_are_missed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

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


@pytest.mark.promise(40)
@once
async def test_publications_that_a_busy_subscriber_cannot_keep_are_missed(endpoint: Endpoint) -> None:
    """A subscriber keeps the publications of the last two connections."""
    async with Subscriber(endpoint) as subscriber:
        for count in (5, 1, 1):
            async with Publisher(endpoint) as publisher:
                await publisher.wait_for_subscribers(1)
                for number in range(count):
                    await publisher.publish(number)
            await until(lambda: not subscriber.statistics().publishers)
        publication = await subscriber.receive()
        assert (publication.message, publication.missed) == (0, 5)
        with pytest.raises(PeerLostError):
            await subscriber.receive()
        publication = await subscriber.receive()
        assert (publication.message, publication.missed) == (0, 0)
        assert subscriber.missed == subscriber.statistics().missed == 5


async def test_a_process_that_admits_no_subscriber_evicts_no_publications(address: str) -> None:
    async with Subscriber(address) as subscriber:
        async with Publisher(address) as publisher:
            await publisher.wait_for_subscribers(1)
            await publisher.publish(b"kept")
        await until(lambda: not subscriber.statistics().publishers)
        with waiting_at(address) as listener:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            connection.close()
        async with Publisher(address) as publisher:
            await publisher.wait_for_subscribers(1)
            publication = await subscriber.receive()
        assert (publication.message, publication.missed) == (b"kept", 0)
