"""Subscribers and publishers in other processes, which are killed, closed and restarted."""

import asyncio
import os
import random
import signal

import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.broadcast import Subscriber
from aiotensor.transports.endpoints import Endpoint
from tests.broadcast import workers
from tests.broadcast.audiences import audience, idle, remove_socket
from tests.selection import COMPLETE, LINKS
from verification.internals import lost_bytes_of
from verification.patterns import BIG, pattern
from verification.processes import watch
from verification.processes.peers import Peer, fork_and_sleep, peers
from verification.promptly import promptly
from verification.waiting import until

_KILLS = int(os.environ.get("AIOTENSOR_KILLS", "40")) // (8 if COMPLETE else 20)


@pytest.mark.promise(33)
async def test_each_subscriber_receives_each_publication_once_and_in_order(endpoint: Endpoint) -> None:
    count = 400  # more than the connections hold: some are sent while the publisher closes
    async with audience(endpoint, 4, max_behind=1000) as (publisher, children):
        counts = [child.start(workers.receive_for_ever) for child in children]
        for number in range(count):
            size = BIG if number % 50 == 0 else (10, 1000)[number % 2]
            await publisher.publish(pattern(number, size))
        await publisher.aclose()
        assert [await each for each in counts] == [count] * 4


@pytest.mark.promise(34)
async def test_a_killed_subscriber_releases_its_memory_within_a_second(
    endpoint: Endpoint, moments: random.Random
) -> None:
    async with audience(endpoint, 2, slow="drop") as (publisher, [_, survivor]):
        receiving = survivor.start(workers.receive_for_ever)
        number = 0
        for _ in range(_KILLS):
            victim = Peer(endpoint)
            try:
                await victim.call(workers.subscribe)
                await publisher.wait_for_subscribers(3)
                victim.start(workers.receive, 1000, keep=True)
                end = asyncio.get_running_loop().time() + moments.random() * 0.03
                while asyncio.get_running_loop().time() < end:
                    await publisher.publish(pattern(number, BIG))
                    number += 1
                    await asyncio.sleep(0)
                victim.kill()
                with promptly():
                    await until(lambda: publisher.statistics().subscribers == 2)
                    await until(lambda: publisher.statistics().lags[-1].held_bytes <= 9 * BIG * 8)
            finally:
                await victim.close()
        assert lost_bytes_of(publisher) == 0
        await publisher.aclose()
        assert await receiving == number


@pytest.mark.promise(10)
async def test_waiting_calls_raise_promptly_after_the_publisher_was_killed(endpoint: Endpoint) -> None:
    async with (
        peers(endpoint, 1) as [child],
        Subscriber(endpoint, torch.Tensor) as first,
        Subscriber(endpoint, torch.Tensor) as second,
    ):
        await child.call(workers.start, 2)
        await child.call(workers.publish, 2, BIG)
        kept = (await first.receive()).message
        waiting = [asyncio.create_task(second.receive()) for _ in range(4)]
        await waiting[0]
        await waiting[1]
        await until(lambda: first.statistics().unclaimed == 1)
        child.kill()
        with promptly():
            for task in waiting[2:]:
                with pytest.raises(PeerLostError, match=r"the publisher .* was lost"):
                    await task
        assert torch.equal((await first.receive()).message, pattern(1, BIG))  # it had arrived
        with pytest.raises(PeerLostError):
            await anext(first)
        assert torch.equal(kept, pattern(0, BIG))
        kept.zero_()
    remove_socket(endpoint)


@pytest.mark.promise(1)
async def test_nothing_is_left_after_all_processes_were_killed(address: str) -> None:
    async with peers(address, 3) as [publisher, *children]:
        for child in children:
            await child.call(workers.subscribe)
        await publisher.call(workers.start, 2, history=3)
        await publisher.call(workers.publish, 3, BIG)
        for child in children:
            await child.call(workers.receive, 2, keep=True)
        for child in (publisher, *children):
            child.kill()
            await child.ended()
    remove_socket(address)


@pytest.mark.promise(20)
@pytest.mark.parametrize("endpoint", LINKS if COMPLETE else ["unix"], indirect=True)
async def test_idle_objects_use_no_processor_time(endpoint: Endpoint) -> None:
    async with peers(endpoint, 5) as [publisher, *children]:
        starting = publisher.start(workers.start, 4, history=2)
        for child in children:
            await child.call(workers.subscribe)
        await starting
        await publisher.call(workers.publish, 2, BIG)
        for child in children:
            await child.call(workers.receive, 1, keep=True)
        assert await watch.become_idle([publisher.pid, *(child.pid for child in children)])
        await publisher.finish()


async def test_publications_add_a_constant_number_of_descriptors_to_each_process(endpoint: Endpoint) -> None:
    async with audience(endpoint, 3, history=2) as (publisher, children):
        before = watch.descriptors(os.getpid()), [watch.descriptors(child.pid) for child in children]
        for number in range(20):
            await publisher.publish(pattern(number, BIG))
            for child in children:
                await child.call(workers.receive, 1, keep=True)
        after = watch.descriptors(os.getpid()), [watch.descriptors(child.pid) for child in children]
        assert after[0] - before[0] <= 3 + len(children)  # the segment, its token, one for each subscriber
        for now, then in zip(after[1], before[1], strict=True):
            assert now - then <= 3  # the segment, and two ends of pipes


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
