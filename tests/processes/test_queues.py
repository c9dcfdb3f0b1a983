"""Queues, over which processes find each other: killed processes, several producers, and foreign objects."""

import asyncio
import os
import pickle
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from aiotensor import (
    AccessDeniedError,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    UsageError,
)
from aiotensor.broadcast import Publisher
from tests.transports.unix_ends import NOBODY, in_child, needs_root
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# Queues of this library


async def test_a_queue_is_only_a_name_and_can_be_pickled_at_any_time() -> None:
    before = os.listdir("/proc/self/fd")
    queue = TensorQueue()
    assert os.listdir("/proc/self/fd") == before
    copy: TensorQueue = pickle.loads(pickle.dumps(queue))
    assert repr(copy) == repr(queue) != repr(TensorQueue())
    async with TensorReceiver(copy) as receiver, TensorSender(queue) as sender:
        assert torch.equal(await receiver.receive(await sender.send(pattern(1, BIG))), pattern(1, BIG))


async def test_a_queue_has_one_receiver_over_all_processes() -> None:
    queue = TensorQueue()
    async with peers.peers(queue, 1) as [child]:
        async with TensorReceiver(queue):
            with pytest.raises(UsageError, match="already listens on this queue"):
                await Publisher(queue).__aenter__()
            with pytest.raises(UsageError, match="already listens on this queue"):
                await child.call(peers.open_receiver)
        await child.call(peers.open_receiver)


@needs_root
@pytest.mark.promise(25)
async def test_another_user_who_knows_the_name_of_a_queue_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue = TensorQueue()
    async with TensorReceiver(queue) as receiver:
        assert await in_child(_send_as_nobody, queue) == "AccessDeniedError"
        assert receiver.statistics().senders == 0
        await until(lambda: f"runs as user {NOBODY}" in caplog.text)


def _send_as_nobody(queue: TensorQueue) -> str:
    async def send() -> str:
        try:
            await TensorSender(queue).__aenter__()
        except AccessDeniedError as error:
            return type(error).__name__
        return "it was admitted"

    os.setuid(NOBODY)
    return asyncio.run(send())


# Queues of multiprocessing


@pytest.fixture
def queue() -> Iterator[Any]:
    queue = get_context("spawn").Queue()
    yield queue
    queue.close()
    queue.join_thread()


async def test_many_producers_reach_a_receiver_that_starts_later_and_the_one_after_it(queue: Any) -> None:
    async with peers.peers(queue, 3) as producers:
        for producer in producers:
            await producer.call(peers.open_sender)
        for _ in range(2):
            async with TensorReceiver(queue) as receiver:
                for seed, producer in enumerate(producers):
                    handle = await producer.call(peers.send_pattern, seed, BIG)
                    assert torch.equal(await receiver.receive(handle), pattern(seed, BIG))


async def test_the_objects_of_the_application_on_a_queue_stay_there(queue: Any) -> None:
    queue.put({"a": [1]})
    async with TensorSender(queue) as sender, TensorReceiver(queue) as receiver:
        assert torch.equal(await receiver.receive(await sender.send(pattern(1, BIG))), pattern(1, BIG))
        with pytest.raises(UsageError, match="already listens on this queue"):
            await Publisher(queue).__aenter__()
    assert await asyncio.to_thread(queue.get) == {"a": [1]}


async def test_a_closed_queue_raises_value_error(queue: Any) -> None:
    queue.close()
    with pytest.raises(ValueError, match="the queue was closed"):
        TensorSender(queue)
