"""Cancelling any await of a publisher or a subscriber loses nothing and leaks nothing."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
import torch

from aiotensor import ClosedError, PeerLostError
from aiotensor.broadcast import Published, Publisher, Subscriber
from tests.cancellation.situations import SLOW
from tests.cancelling import Attempt, Running, cancel_everywhere
from tests.pairs import endpoint, is_local, on_one_machine
from verification.internals import pause_reading, resume_reading, shrink_send_buffer, transports_between
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")


@asynccontextmanager
async def several(count: int, **limits: Any) -> AsyncIterator[tuple[Publisher, list[Subscriber[Any]]]]:
    with endpoint() as place:
        async with AsyncExitStack() as stack:
            publisher = await stack.enter_async_context(Publisher(place, **limits))
            subscribers = [await stack.enter_async_context(Subscriber[Any](place)) for _ in range(count)]
            await publisher.wait_for_subscribers(count)
            await until(lambda: all(one.statistics().mapped_bytes for one in subscribers))
            yield publisher, subscribers


def settled(
    attempt: Callable[[Attempt], Awaitable[None]], publisher: Publisher
) -> Callable[[Attempt], Awaitable[None]]:
    """Wait after each run until the memory was released, for which subscribers use threads."""

    async def run(one: Attempt) -> None:
        await attempt(one)
        gc.collect()  # the task refers to its result
        await until(lambda: not publisher.statistics().bytes_in_use)

    return run


class Message(msgspec.Struct):
    name: str
    tensors: list[torch.Tensor]


async def _check_publish(
    publishing: Running[Published], message: Any, before: int, *subscribers: Subscriber[Any]
) -> None:
    """See that a message was published to all, or to none."""
    completed = await publishing.completed()
    for subscriber in subscribers:
        if completed:
            publication = await subscriber.receive()
            assert publication.number == publishing.value.number == before
            assert msgspec.msgpack.encode(publication.message, enc_hook=_as_list) == msgspec.msgpack.encode(
                message, enc_hook=_as_list
            )
        assert not subscriber.statistics().unclaimed


def _as_list(value: object) -> object:
    assert isinstance(value, torch.Tensor)
    return value.tolist()


@pytest.mark.promise(33)
@pytest.mark.parametrize(
    ("letters", "sizes"),
    [(1, []), (1, [SLOW, 3, BIG // 8]), (1, [2000] * 70), (1 << 20, [3])],
    ids=["body", "tensors", "many tensors", "long body"],
)
async def test_a_cancelled_publish_publishes_to_all_or_to_none(letters: int, sizes: list[int]) -> None:
    message = Message("m" * letters, [pattern(size, size) for size in sizes])
    async with several(2) as (publisher, [first, second]):

        async def attempt(attempt: Attempt) -> None:
            before = publisher.statistics().published
            await _check_publish(attempt.start(publisher.publish(message)), message, before, first, second)

        await cancel_everywhere(settled(attempt, publisher), publisher, first, second)


async def test_a_publish_cancelled_while_a_subscriber_is_slow() -> None:
    async with several(2, max_behind=1) as (publisher, [first, second]):

        async def attempt(attempt: Attempt) -> None:
            before = (await publisher.publish(b"before")).number
            publishing = attempt.start(publisher.publish(pattern(1, BIG)))
            await first.receive()
            await until(lambda: bool(second.statistics().unclaimed))
            await publishing.bring(second.receive_nowait)
            if await publishing.completed():
                assert publishing.value.number == before + 1
                for subscriber in (first, second):
                    assert torch.equal((await subscriber.receive()).message, pattern(1, BIG))

        assert await cancel_everywhere(settled(attempt, publisher), publisher, first, second)


@on_one_machine
async def test_a_publish_cancelled_while_an_earlier_one_waits() -> None:
    async with several(2, arena_bytes=1 << 20) as (publisher, [first, second]):

        async def attempt(attempt: Attempt) -> None:
            await publisher.publish(pattern(0, BIG))
            await second.receive()
            kept = [(await first.receive()).message]
            earlier = asyncio.create_task(publisher.publish(pattern(1, BIG)))
            await until(lambda: publisher.statistics().waiting == 1)
            publishing = attempt.start(publisher.publish(b"next"))
            await publishing.bring(kept.clear)
            kept.clear()
            completed = await publishing.completed()
            number = (await earlier).number
            for subscriber in (first, second):
                assert torch.equal((await subscriber.receive()).message, pattern(1, BIG))
                if completed:
                    assert (await subscriber.receive()).number == publishing.value.number == number + 1

        assert await cancel_everywhere(settled(attempt, publisher), publisher, first, second)


@on_one_machine
async def test_a_publish_cancelled_while_it_copies_an_allocated_tensor_that_is_in_use() -> None:
    async with several(4) as (publisher, subscribers):

        async def attempt(attempt: Attempt) -> None:
            allocated = await publisher.allocate((SLOW,), torch.int64)
            allocated.copy_(pattern(1, SLOW))
            before = (await publisher.publish(allocated)).number
            publishing = attempt.start(publisher.publish(allocated))
            completed = await publishing.completed()
            for subscriber in subscribers:
                for number in range(before, before + 1 + completed):
                    publication = await subscriber.receive()
                    assert publication.number == number
                    assert torch.equal(publication.message, pattern(1, SLOW))
                    del publication
                assert not subscriber.statistics().unclaimed

        assert await cancel_everywhere(settled(attempt, publisher), publisher, *subscribers)


@pytest.mark.parametrize(
    "message", [b"small", b"0" * 200_000, pattern(1, BIG)], ids=["small", "long", "tensor"]
)
async def test_a_cancelled_receive_loses_nothing(message: Any) -> None:
    async with several(2) as (publisher, [first, second]):

        async def attempt(attempt: Attempt) -> None:
            receiving = attempt.start(first.receive())
            await receiving.bring(lambda: publisher.publish_nowait(message))
            completed = await receiving.completed()
            publication = receiving.value if completed else await first.receive()
            other = await second.receive()
            assert (publication.number, publication.missed) == (other.number, 0)
            for one in (publication, other):
                assert (
                    torch.equal(one.message, message)
                    if isinstance(message, torch.Tensor)
                    else one.message == message
                )

        assert await cancel_everywhere(settled(attempt, publisher), publisher, first, second)


@on_one_machine
async def test_a_cancelled_receive_of_many_tensors_loses_nothing() -> None:
    message = [pattern(number, 1100) for number in range(150)]
    async with several(2) as (publisher, [first, second]):

        async def attempt(attempt: Attempt) -> None:
            await publisher.publish(message)
            await publisher.publish(b"next")
            await until(lambda: first.statistics().unclaimed == 2)
            receiving = attempt.start(first.receive())
            completed = await receiving.completed()
            publication = receiving.value if completed else await first.receive()
            assert all(map(torch.equal, publication.message, message))
            following = await first.receive()
            assert (following.number, following.missed) == (publication.number + 1, 0)
            for _ in range(2):
                await second.receive()

        assert await cancel_everywhere(settled(attempt, publisher), publisher, first, second)


@on_one_machine
async def test_cancelling_wait_for_subscribers_or_drain_has_no_effect() -> None:
    with endpoint() as place:
        async with (
            Publisher(place) as publisher,
            Subscriber[Any](place) as first,
            Subscriber[Any](place) as second,
        ):
            await publisher.wait_for_subscribers(2)

            async def drain(attempt: Attempt) -> None:
                await publisher.publish(b"")
                draining = attempt.start(publisher.drain())
                await second.receive()
                await until(lambda: bool(first.statistics().unclaimed))
                await draining.bring(first.receive_nowait)
                await draining.completed()

            assert await cancel_everywhere(settled(drain, publisher), publisher, first, second)

            async def wait(attempt: Attempt) -> None:
                third = Subscriber[Any](place)
                waiting = attempt.start(publisher.wait_for_subscribers(3))
                await waiting.until(lambda: waiting.suspensions)
                await third.__aenter__()
                await waiting.completed()
                await third.aclose()
                await until(lambda: publisher.statistics().subscribers == 2)

            assert await cancel_everywhere(settled(wait, publisher), publisher, first, second)


@on_one_machine
async def test_a_cancelled_allocation_returns_the_memory() -> None:
    async with several(2, arena_bytes=1 << 20) as (publisher, subscribers):

        async def wait(attempt: Attempt) -> None:
            await publisher.publish(pattern(1, BIG))
            kept = [(await subscriber.receive()).message for subscriber in subscribers]
            allocating = attempt.start(publisher.allocate((BIG,), torch.int64))
            await allocating.until(lambda: publisher.statistics().waiting)
            del kept[1:]
            await allocating.bring(kept.clear)
            kept.clear()
            await allocating.completed()

        assert await cancel_everywhere(settled(wait, publisher), publisher, *subscribers)


# Opening and closing


async def test_a_cancelled_close_of_a_subscriber_closes() -> None:
    with endpoint() as place:
        async with Publisher(place) as publisher, Subscriber[Any](place) as other:

            async def attempt(attempt: Attempt) -> None:
                async with Subscriber[Any](place) as subscriber:
                    await publisher.wait_for_subscribers(2)
                    await publisher.publish(pattern(1, SLOW))
                    taken = (await subscriber.receive()).message
                    await attempt.start(subscriber.aclose()).completed()
                    with pytest.raises(ClosedError):
                        await subscriber.receive()
                    assert torch.equal(taken, pattern(1, SLOW))
                assert torch.equal((await other.receive()).message, pattern(1, SLOW))
                await until(lambda: publisher.statistics().subscribers == 1)

            await cancel_everywhere(settled(attempt, publisher), publisher, other)


async def test_a_close_cancelled_anywhere_ends_every_wait() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            async with AsyncExitStack() as stack:
                publisher = await Publisher(place, max_behind=1, arena_bytes=1 << 20).__aenter__()
                subscribers = [
                    await stack.enter_async_context(Subscriber(place, torch.Tensor)) for _ in range(4)
                ]
                await publisher.wait_for_subscribers(4)
                await publisher.publish(pattern(0, BIG))
                waits = [
                    asyncio.create_task(waiting)
                    for waiting in (
                        publisher.publish(pattern(1, BIG)),
                        publisher.allocate((BIG,), torch.int64),
                        publisher.drain(),
                        publisher.wait_for_subscribers(5),
                    )
                ]
                await until(lambda: publisher.statistics().waiting == 2)
                if not is_local():  # its bytes are moved after the call has returned
                    await until(lambda: all(one.statistics().unclaimed for one in subscribers))
                await attempt.start(publisher.aclose()).completed()
                for wait in waits:
                    with pytest.raises(ClosedError):
                        await wait
                for subscriber in subscribers:  # they have received all, whatever was cancelled
                    [publication] = [publication async for publication in subscriber]
                    assert torch.equal(publication.message, pattern(0, BIG))
                    del publication

    await cancel_everywhere(attempt)


@on_one_machine
async def test_a_close_cancelled_while_a_subscriber_does_not_read_closes_at_once() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            publisher = await Publisher(place, max_behind=1000).__aenter__()
            async with Subscriber[int](place) as clogged, Subscriber[int](place) as other:
                await publisher.wait_for_subscribers(2)
                near, far = transports_between(publisher, clogged)
                pause_reading(far)
                shrink_send_buffer(near)
                number = -1
                while near.is_writable:
                    number = (await publisher.publish(b"0" * 1000)).number
                closing = attempt.start(publisher.aclose())
                await closing.bring(lambda: resume_reading(far))
                is_complete = await closing.completed()
                assert [one.number async for one in other] == list(range(number + 1))
                received = []
                try:
                    received += [one.number async for one in clogged]
                    assert received == list(range(number + 1))
                except PeerLostError:
                    assert not is_complete

    assert await cancel_everywhere(attempt)
