"""A slow subscriber has the effect that the policy defines, and no other."""

import asyncio
import logging
import re
import resource
from typing import Any

import pytest
import torch

from aiotensor import PeerLostError, RefusedError, TooLargeError, WouldBlockError
from aiotensor.broadcast import Publisher, SlowPolicy, Subscriber
from aiotensor.memory.arena import whole_pages
from tests.broadcast.audiences import Broadcasts, idle, received, taken, turns
from tests.memory.segments import lowered
from verification.internals import (
    backlogs_of,
    pause_reading,
    read_next,
    shrink_send_buffer,
    transports_between,
)
from verification.patterns import BIG, pattern
from verification.waiting import until

once = pytest.mark.parametrize("endpoint", ["unix"], indirect=True)  # the link makes no difference


def _is_answered(publisher: Publisher, slow: Subscriber[Any], count: int) -> bool:
    """Return whether subscribers have answered all publications but the last ones, which have arrived."""
    backlogs = backlogs_of(publisher)
    if any(backlog.pending for backlog in backlogs):  # they wait for answers to withdrawn publications
        return False
    unanswered = sum(backlog.unanswered for backlog in backlogs)
    return unanswered == publisher.statistics().lags[0].behind == slow.statistics().unclaimed == count


@pytest.mark.promise(34)
async def test_publishing_waits_for_a_slow_subscriber(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(2, max_behind=3) as (publisher, [slow, quick]):
        for number in range(3):
            await publisher.publish(number)
        assert await received(quick, 3) == [0, 1, 2]
        waiting = [asyncio.create_task(publisher.publish(number)) for number in range(3, 6)]
        await until(lambda: publisher.statistics().waiting == 3)
        assert publisher.statistics().lags[0].behind == 3
        with pytest.raises(WouldBlockError, match="a subscriber is slow") as caught:
            publisher.publish_nowait(b"")
        assert (caught.value.messages.limit, caught.value.messages.in_use) == (3, 3)
        assert "requested" not in str(caught.value)

        assert await received(slow, 1) == [0]
        assert (await waiting[0]).number == 3
        await turns()
        assert not waiting[1].done()  # one publication was taken, and one was published
        assert await received(slow, 5) == [1, 2, 3, 4, 5]
        assert [(await task).number for task in waiting[1:]] == [4, 5]
        assert await received(quick, 3) == [3, 4, 5]
        await publisher.drain()
        for number in range(6, 9):
            await publisher.publish(number)
        waiting = [asyncio.create_task(publisher.publish(9))]
        await received(quick, 3)
        await turns()
        assert not waiting[0].done()
        await slow.aclose()
        assert await waiting[0] == (9, 1, 0)


@once
async def test_a_wait_for_a_slow_subscriber_is_limited(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(2, max_behind=1, max_wait_s=0.5) as (publisher, [slow, quick]):
        await publisher.publish(pattern(0, BIG))
        with pytest.raises(WouldBlockError, match=r"slow.* for 0.5 s \(subscriber .* is 1 of 1 publications"):
            await publisher.publish(pattern(1, BIG))
        await received(slow, 1)
        await received(quick, 1)
        await publisher.drain()  # which has no limit
        assert await publisher.publish(b"next") == (1, 2, 0)


@pytest.mark.promise(17)
@once
async def test_a_long_wait_is_logged_once_with_the_slow_subscribers(
    broadcasts: Broadcasts, caplog: pytest.LogCaptureFixture
) -> None:
    async with broadcasts.open(2, max_behind=2, long_wait_s=0.05) as (publisher, [slow, quick]):
        for number in range(2):
            await publisher.publish(pattern(number, BIG))
        await received(quick, 2)
        with caplog.at_level(logging.WARNING, "aiotensor.publisher"):
            waiting = asyncio.create_task(publisher.publish(b""))
            await until(lambda: bool(caplog.records))
            await asyncio.sleep(0.1)
            await received(slow, 2)
            await waiting
    [record] = caplog.records
    assert record.__dict__["event"] == "long_wait"
    assert record.__dict__["subscribers"] == 2
    assert f"subscriber {slow.id} " in record.__dict__["held_by"]
    assert re.search(r"is 2 of 2 publications behind, for \d+\.\d s", record.__dict__["held_by"])


@once
@pytest.mark.promise(17)
async def test_a_long_wait_for_memory_names_what_lost_subscribers_keep(
    broadcasts: Broadcasts, caplog: pytest.LogCaptureFixture
) -> None:
    with lowered(resource.RLIMIT_FSIZE, 1 << 40):
        publisher = Publisher(broadcasts.endpoint, arena_bytes=BIG * 8, long_wait_s=0.1)
    async with publisher:
        kept = []
        for number in range(2):
            async with broadcasts.subscriber(publisher) as subscriber:
                await publisher.publish(pattern(number, BIG))
                kept.append((await subscriber.receive()).message)
            await until(lambda: publisher.statistics().subscribers == 0)
        caplog.clear()
        waiting = asyncio.create_task(publisher.publish(pattern(2, BIG)))
        await until(lambda: f"keep {whole_pages(BIG * 8)} bytes" in caplog.text)
        del kept[0]
        await waiting
        assert torch.equal(kept[0], pattern(1, BIG))
        kept.clear()


@pytest.mark.promise(34)
@pytest.mark.parametrize("endpoint", ["tcp"], indirect=True)
async def test_a_publication_can_be_dropped_while_its_moves_begin(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(1, max_behind=1, slow="drop") as (publisher, [subscriber]):
        for _ in range(2):
            await publisher.publish(list(torch.ones(1000, 9000, dtype=torch.uint8)))
            assert publisher.publish_nowait(b"next").dropped == 1
            publication = await subscriber.receive()
            assert (publication.message, publication.missed) == (b"next", 1)
            await idle(publisher)


@pytest.mark.promise(34)
async def test_the_oldest_publication_of_a_slow_subscriber_is_dropped(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(2, max_behind=3, slow="drop") as (publisher, [slow, quick]):
        for number in range(10):
            sent = await publisher.publish(pattern(number, (3, BIG)[number % 2]))
            assert sent[:2] == (number, 2)
            assert sent.dropped >= (number >= 3)
            assert torch.equal((await quick.receive()).message, pattern(number, (3, BIG)[number % 2]))
        await until(lambda: _is_answered(publisher, slow, 3))
        found = await taken(slow)
        assert [(one.number, one.missed) for one in found] == [(7, 7), (8, 0), (9, 0)]
        assert all(torch.equal(one.message, pattern(one.number, (3, BIG)[one.number % 2])) for one in found)
        assert (slow.number, slow.missed, slow.statistics().missed) == (9, 7, 7)
        assert (quick.number, quick.missed) == (9, 0)
        assert publisher.statistics().dropped == 7
        assert {lag.dropped for lag in publisher.statistics().lags} == {0, 7}
        del found
        await idle(publisher)


@pytest.mark.promise(34)
async def test_a_slow_subscriber_is_disconnected_with_the_reason(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(2, max_behind=2, slow="disconnect") as (publisher, [slow, quick]):
        for number in range(3):
            sent = await publisher.publish(pattern(number, BIG))
            assert sent == (number, 2 if number < 2 else 1, 0)
            await received(quick, 1)
        found = [(await slow.receive()).message for _ in range(2)]  # these had arrived
        assert all(torch.equal(message, pattern(number, BIG)) for number, message in enumerate(found))
        with pytest.raises(PeerLostError, match="it was 2 publications behind"):
            await slow.receive()
        statistics = publisher.statistics()
        assert (statistics.subscribers, statistics.subscribers_lost) == (1, 1)


@once
@pytest.mark.parametrize("slow", ["wait", "drop", "disconnect"])
async def test_a_subscriber_uses_at_most_max_held_bytes(broadcasts: Broadcasts, slow: SlowPolicy) -> None:
    limits = {"max_held_bytes": 2 << 20, "max_behind": 2, "slow": slow, "max_wait_s": 0.5}
    async with broadcasts.open(2, **limits) as (publisher, [hoarder, quick]):
        kept = []
        for number in range(2):
            await publisher.publish(pattern(number, 100_000))
            kept.append((await hoarder.receive()).message)
            await received(quick, 1)
        for number in range(2, 4):  # 2.4 MB are more than it may use
            await publisher.publish(pattern(number, 100_000))
            await received(quick, 1)
        await turns()
        lag = publisher.statistics().lags[0]
        assert (lag.behind, lag.subscriber) == (2, hoarder.id)
        assert lag.held_bytes <= 2 << 20
        assert hoarder.statistics().unclaimed == 0
        match slow:
            case "wait":
                with pytest.raises(WouldBlockError, match="slow"):
                    await publisher.publish(b"more")
            case "drop":
                assert await publisher.publish(b"more") == (4, 2, 1)
            case "disconnect":
                assert await publisher.publish(b"more") == (4, 1, 0)
        assert all(torch.equal(tensor, pattern(number, 100_000)) for number, tensor in enumerate(kept))
        kept.clear()
        if slow != "disconnect":
            publication = await hoarder.receive()
            assert (publication.number, publication.missed) == ((2, 0) if slow == "wait" else (3, 1))
            assert torch.equal(publication.message, pattern(publication.number, 100_000))


@once
async def test_a_message_larger_than_max_held_bytes_is_rejected(broadcasts: Broadcasts) -> None:
    async with broadcasts.open(1, max_held_bytes=1 << 20) as (publisher, _):
        tensor = await publisher.allocate((2 << 20,), torch.uint8)
        for message in (torch.zeros(1 << 20), tensor, b"0" * (2 << 20)):
            with pytest.raises(TooLargeError, match="max_held_bytes=1048576"):
                await publisher.publish(message)
            with pytest.raises(TooLargeError, match="max_held_bytes=1048576"):
                publisher.publish_nowait(message)


_WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"slow": "never"}, ValueError, 'slow must be "wait", "drop" or "disconnect"'),
    ({"slow": None}, ValueError, "slow must be"),
    ({"max_behind": 0}, ValueError, "max_behind must be at least 1"),
    ({"max_behind": 1.5}, TypeError, "integer"),
    ({"history": -1}, ValueError, "history must be at least 0"),
    ({"history": 8}, ValueError, "history must be less than max_behind=8"),
    ({"max_held_bytes": 0}, ValueError, "max_held_bytes must be at least 1"),
    ({"max_held_bytes": 2 << 30}, ValueError, "max_held_bytes must be at most arena_bytes=1073741824"),
    ({"arena_bytes": 0}, ValueError, "arena_bytes must be at least 1"),
    ({"max_subscribers": 0}, ValueError, "max_subscribers must be at least 1"),
    ({"max_wait_s": 0}, ValueError, "max_wait_s must be positive"),
    ({"long_wait_s": -1}, ValueError, "long_wait_s must be positive"),
    ({"keep_warm_s": 0}, ValueError, "keep_warm_s must be positive"),
]


def test_settings_that_contradict_each_other_are_rejected() -> None:
    for limits, error, text in _WRONG:
        with pytest.raises(error, match=text):
            Publisher("unix:///nowhere/s", **limits)


@once
async def test_closing_waits_as_long_as_subscribers_read(broadcasts: Broadcasts) -> None:
    """A subscriber that reads nothing for a second is cut off; this one takes longer in all."""
    async with broadcasts.open(1, max_behind=1000) as (publisher, [slow]):
        near, far = transports_between(publisher, slow)
        pause_reading(far)
        shrink_send_buffer(near)
        count = 0
        while near.is_writable or count < 40:
            await publisher.publish(b"0" * 1000)
            count += 1
        closing = asyncio.create_task(publisher.aclose())
        while slow.statistics().publishers:
            await asyncio.sleep(1.5 / count)
            read_next(far)
        await closing
        assert len([one async for one in slow]) == count


# A subscriber cannot reconnect to a queue.
@pytest.mark.parametrize("endpoint", ["unix", "tcp"], indirect=True)
async def test_a_subscriber_beyond_the_limit_is_refused(broadcasts: Broadcasts) -> None:
    async with (
        broadcasts.open(2, max_subscribers=2) as (publisher, subscribers),
        Subscriber[Any](broadcasts.endpoint) as third,
    ):
        for attempts in (1, 2):
            with pytest.raises(RefusedError, match="max_subscribers=2 subscribers are already connected"):
                await third.receive()
            assert publisher.statistics().subscribers_refused == attempts
        await publisher.publish(b"all")
        for subscriber in subscribers:
            assert await received(subscriber, 1) == [b"all"]
        await subscribers[0].aclose()
        await until(lambda: publisher.statistics().subscribers == 1)
        receiving = asyncio.create_task(third.receive())
        await publisher.wait_for_subscribers(2)
        await publisher.publish(b"you")
        assert (await receiving).message == b"you"
