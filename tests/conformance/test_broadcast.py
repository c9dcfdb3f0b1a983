"""A publisher and subscribers in other processes: nothing is lost, reordered, altered or kept too long."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest
import torch

from aiotensor import PeerLostError, UsageError, WouldBlockError
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast import workers
from tests.broadcast.audiences import audience, idle
from tests.runtime.test_affinity import forks, in_a_fork
from verification.patterns import BIG, pattern
from verification.processes.peers import fork_and_sleep, peers
from verification.promptly import promptly
from verification.waiting import until


@pytest.mark.parametrize("count", [1, 2, 4, 8])
async def test_each_subscriber_receives_each_publication_once_and_in_order(
    endpoint: Endpoint, count: int
) -> None:
    async with audience(endpoint, count) as (publisher, children):
        counts = [child.start(workers.receive_for_ever) for child in children]
        for number in range(30):
            await publisher.publish(pattern(number, (10, 1000, BIG)[number % 3]))
        await publisher.drain()
        await publisher.aclose()
        assert [await each for each in counts] == [30] * count


@pytest.mark.parametrize("max_behind", [1, 3])
async def test_no_subscriber_is_ever_more_than_max_behind_publications_behind(
    endpoint: Endpoint, max_behind: int
) -> None:
    async with audience(endpoint, 2, max_behind=max_behind) as (publisher, [slow, quick]):
        for number in range(max_behind):
            publisher.publish_nowait(pattern(number, BIG))
            assert await quick.call(workers.receive, 1) == [number]
        for number in range(max_behind, max_behind + 4):
            with pytest.raises(WouldBlockError, match=f"is {max_behind} of {max_behind} publications behind"):
                publisher.publish_nowait(b"")
            waiting = asyncio.create_task(publisher.publish(pattern(number, BIG)))
            await until(lambda: publisher.statistics().waiting == 1)
            assert publisher.statistics().behind == max_behind
            assert await slow.call(workers.receive, 1) == [number - max_behind]
            assert await waiting == (number, 2, 0)
            assert await quick.call(workers.receive, 1) == [number]
            assert publisher.statistics().behind == max_behind
        await slow.call(workers.receive, max_behind)


async def test_views_stay_valid_while_memory_is_reused_and_after_both_ends_ended(
    endpoint: Endpoint,
) -> None:
    async with (
        peers(endpoint, 1) as [child],
        Subscriber(endpoint, torch.Tensor) as subscriber,
    ):
        await child.call(workers.start, 1, arena_bytes=8 << 20)
        publishing = child.start(workers.publish, 40, BIG)
        kept = {}
        for number in range(40):
            view = (await subscriber.receive()).message
            assert torch.equal(view, pattern(number, BIG))
            if number % 9 == 0:
                kept[number] = view
            del view
        await publishing
        child.kill()
        with pytest.raises(PeerLostError):
            await subscriber.receive()
        for number, view in kept.items():
            assert torch.equal(view, pattern(number, BIG))
        await subscriber.aclose()
        kept.pop(9).zero_()
        for number, view in kept.items():
            assert torch.equal(view, pattern(number, BIG))


async def test_all_objects_are_opened_in_one_task_and_closed_in_another(endpoint: Endpoint) -> None:
    publisher = Publisher(endpoint)
    subscribers = [Subscriber(endpoint, torch.Tensor) for _ in range(2)]
    await asyncio.create_task(publisher.__aenter__())
    for subscriber in subscribers:
        await asyncio.create_task(subscriber.__aenter__())
    await asyncio.create_task(publisher.wait_for_subscribers(2))
    await asyncio.create_task(publisher.publish(pattern(0, BIG)))
    for subscriber in subscribers:
        publication = await asyncio.create_task(subscriber.receive())
        assert torch.equal(publication.message, pattern(0, BIG))
        del publication
    await asyncio.create_task(publisher.aclose())
    for subscriber in subscribers:
        await asyncio.create_task(subscriber.aclose())


def _uses(publisher: Publisher, subscriber: Subscriber[torch.Tensor]) -> list[Callable[[], object]]:
    """Use both objects in all ways; coroutines run up to their first wait."""
    return [
        lambda: publisher.publish_nowait(b""),
        lambda: publisher.publish(b"").send(None),
        lambda: publisher.allocate((1,), torch.uint8).send(None),
        lambda: publisher.wait_for_subscribers(1).send(None),
        lambda: publisher.drain().send(None),
        lambda: publisher.aclose().send(None),
        publisher.statistics,
        subscriber.receive_nowait,
        lambda: subscriber.receive().send(None),
        lambda: subscriber.__anext__().send(None),
        lambda: subscriber.aclose().send(None),
        subscriber.statistics,
    ]


async def test_every_use_in_another_thread_or_loop_raises_at_once(endpoint: Endpoint) -> None:
    async def use_there(use: Callable[[], object]) -> None:
        use()

    async with (
        Publisher(endpoint) as publisher,
        Subscriber(endpoint, torch.Tensor) as subscriber,
    ):
        await publisher.wait_for_subscribers(1)
        for use in _uses(publisher, subscriber):
            with pytest.raises(UsageError, match="another thread"):
                await asyncio.to_thread(use)
            with pytest.raises(UsageError, match="another thread"):
                await asyncio.to_thread(lambda: asyncio.run(use_there(use)))  # noqa: B023
        await publisher.publish(pattern(1, BIG))
        assert torch.equal((await subscriber.receive()).message, pattern(1, BIG))


@forks
async def test_every_use_in_a_forked_child_raises_at_once(endpoint: Endpoint) -> None:
    async with (
        Publisher(endpoint) as publisher,
        Subscriber(endpoint, torch.Tensor) as subscriber,
    ):
        await publisher.wait_for_subscribers(1)
        for use in _uses(publisher, subscriber):
            assert in_a_fork(use).startswith("UsageError: this ")
        await publisher.publish(pattern(1, BIG))
        assert torch.equal((await subscriber.receive()).message, pattern(1, BIG))


async def test_a_subscribers_forked_child_does_not_keep_its_memory(endpoint: Endpoint) -> None:
    async with audience(endpoint, 2) as (publisher, [victim, other]):
        await publisher.publish(pattern(0, BIG))
        assert await victim.call(workers.receive, 1, keep=True) == [0]
        assert await other.call(workers.receive, 1) == [0]
        grandchild = await victim.call(fork_and_sleep)
        try:
            victim.kill()
            with promptly():
                await idle(publisher)
        finally:
            os.kill(grandchild, signal.SIGKILL)


async def test_a_publishers_forked_child_does_not_keep_its_subscribers_waiting(endpoint: Endpoint) -> None:
    async with (
        peers(endpoint, 1) as [child],
        Subscriber(endpoint, torch.Tensor) as subscriber,
    ):
        await child.call(workers.start, 1)
        grandchild = await child.call(fork_and_sleep)
        waiting = asyncio.create_task(subscriber.receive())
        await until(lambda: subscriber.statistics().waiting == 1)
        try:
            with promptly():
                child.kill()
                with pytest.raises(PeerLostError):
                    await waiting
        finally:
            os.kill(grandchild, signal.SIGKILL)
