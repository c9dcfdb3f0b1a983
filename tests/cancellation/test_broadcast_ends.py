"""Cancelling the opening and the closing of a publisher and of a subscriber."""

import asyncio
import fcntl
import os
from contextlib import AsyncExitStack, nullcontext, suppress

import pytest
import torch

from aiotensor import ClosedError, PeerLostError
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests.cancellation.situations import SLOW
from tests.cancelling import Attempt, cancel_everywhere
from tests.pairs import endpoint, is_local, on_one_machine
from verification.internals import pause_reading, resume_reading, shrink_send_buffer, transports_between
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_SUBSCRIBERS = 4


async def _works(place: Endpoint) -> None:
    """Check that a publisher can be opened and reached at an endpoint."""
    async with Publisher(place) as publisher, Subscriber(place, torch.Tensor) as subscriber:
        await publisher.wait_for_subscribers(1)
        await publisher.publish(pattern(0, 3))
        assert torch.equal((await subscriber.receive()).message, pattern(0, 3))


@pytest.mark.usefixtures("link")
async def test_opening_a_publisher_or_subscriber_does_not_suspend_without_contention() -> None:
    async def publisher_opens(attempt: Attempt) -> None:
        with endpoint() as place:
            publisher = Publisher(place)
            assert await attempt.start(publisher.__aenter__()).completed()
            await publisher.aclose()

    async def subscriber_opens(attempt: Attempt) -> None:
        with endpoint() as place:
            subscriber = Subscriber(place, torch.Tensor)
            assert await attempt.start(subscriber.__aenter__()).completed()
            await subscriber.aclose()

    assert not await cancel_everywhere(publisher_opens)
    assert not await cancel_everywhere(subscriber_opens)


async def test_an_opening_cancelled_while_the_folder_is_locked_leaves_nothing() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint("unix") as place:
            assert isinstance(place, str)
            folder = os.open(os.path.dirname(place.removeprefix("unix://")), os.O_RDONLY)
            fcntl.flock(folder, fcntl.LOCK_EX)
            publisher = Publisher(place)
            opening = attempt.start(publisher.__aenter__())
            await opening.until(lambda: opening.suspensions)
            await opening.bring(lambda: os.close(folder))
            if await opening.completed():
                await publisher.aclose()
            with pytest.raises(ClosedError):
                await publisher.__aenter__()
            await _works(place)

    assert await cancel_everywhere(attempt)


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize("which", ["publisher", "subscriber"])
async def test_a_cancelled_close_closes(which: str) -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            async with Publisher(place) as publisher, Subscriber(place) as first, Subscriber(place) as second:
                await publisher.wait_for_subscribers(2)
                kept = await publisher.allocate((SLOW,), torch.int64)
                await publisher.publish(kept)
                taken = (await first.receive()).message
                closing = attempt.start((publisher if which == "publisher" else first).aclose())
                await closing.completed()
                assert repr(publisher if which == "publisher" else first).split()[1].startswith("closed")
                del kept, taken
                if which == "publisher":
                    # The bytes may be under way to another machine, where a cancelled close does not wait.
                    with nullcontext() if is_local() else suppress(PeerLostError):
                        assert len([one async for one in second]) <= 1

    await cancel_everywhere(attempt)


@pytest.mark.usefixtures("link")
async def test_a_close_cancelled_anywhere_ends_every_wait() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            async with AsyncExitStack() as stack:
                publisher = await Publisher(place, max_behind=1, arena_bytes=1 << 20).__aenter__()
                subscribers = [
                    await stack.enter_async_context(Subscriber(place, torch.Tensor))
                    for _ in range(_SUBSCRIBERS)
                ]
                await publisher.wait_for_subscribers(_SUBSCRIBERS)
                await publisher.publish(pattern(0, BIG))
                waits = [
                    asyncio.create_task(waiting)
                    for waiting in (
                        publisher.publish(pattern(1, BIG)),
                        publisher.allocate((BIG,), torch.int64),
                        publisher.drain(),
                        publisher.wait_for_subscribers(_SUBSCRIBERS + 1),
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
@pytest.mark.usefixtures("link")
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
