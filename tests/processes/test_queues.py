"""Queues: processes that inherit one, or that are killed with a lock or in the middle of a record."""

import asyncio
import os
import pickle
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from aiotensor import (
    DiscardedError,
    PeerLostError,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    UsageError,
    WouldBlockError,
)
from tests.pairs import beyond
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.promptly import promptly
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


# Queues of this library


async def test_a_queue_can_be_pickled_only_while_a_child_is_spawned() -> None:
    queue = TensorQueue()
    with pytest.raises(UsageError, match="while it is spawned"):
        pickle.dumps(queue)
    assert repr(queue) == "<TensorQueue open>"
    queue.close()
    queue.close()
    assert repr(queue) == "<TensorQueue closed>"
    with pytest.raises(UsageError, match="was closed"):
        await TensorReceiver(queue).__aenter__()


async def test_a_queue_has_one_receiver_over_all_processes_whatever_was_closed() -> None:
    queue = TensorQueue()
    async with peers.peers(queue, 1) as [child]:
        async with TensorReceiver(queue):
            with pytest.raises(UsageError, match="already has a receiver"):
                await TensorReceiver(queue).__aenter__()
            queue.close()
            with pytest.raises(UsageError, match="already has a receiver"):
                await child.call(peers.open_receiver)
        await child.call(peers.open_receiver)


async def test_an_engine_killed_before_opening_is_detected_if_the_queue_is_closed() -> None:
    queue = TensorQueue()
    async with (
        peers.peers(queue, 1) as [engine],
        TensorSender(queue, max_concurrent_videos=1) as sender,
    ):
        queue.close()
        await sender.send(pattern(0, BIG))
        waiting = asyncio.create_task(sender.send(pattern(1, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        engine.kill()
        with pytest.raises(PeerLostError):
            await waiting


@pytest.mark.promise(10)
async def test_a_sender_killed_before_the_receiver_opened_raises_peer_lost_error() -> None:
    queue = TensorQueue()
    async with peers.peers(queue, 1) as [child]:
        await child.call(peers.open_sender)
        handle = await child.call(peers.send_pattern, 1, BIG)
        child.kill()
        await child.ended()
        async with TensorReceiver(queue) as receiver:
            with pytest.raises(PeerLostError) as caught:
                await receiver.receive(beyond(handle))
            assert caught.value.pid == child.pid


@pytest.mark.promise(10)
async def test_tensors_sent_before_a_clean_exit_can_still_be_received() -> None:
    queue = TensorQueue()
    async with peers.peers(queue, 1) as [child]:
        await child.call(peers.open_sender)
        handles = [await child.call(peers.send_pattern, seed, count) for seed, count in ((1, 5), (2, BIG))]
        assert await child.finish() == 0
        async with TensorReceiver(queue) as receiver:
            for seed, handle in zip((1, 2), handles, strict=True):
                assert torch.equal(await receiver.receive(handle), pattern(seed, handle.shape[0]))
            with pytest.raises(DiscardedError, match="closed"):
                await receiver.receive(beyond(handles[0]))


# Stock queues


@pytest.fixture
def queue() -> Iterator[Any]:  # whose private parts the tests use
    queue = get_context("spawn").Queue()
    yield queue
    queue.close()
    queue.join_thread()


async def _acquire(state: peers.State, lock: str) -> None:
    endpoint: Any = state.endpoint
    assert getattr(endpoint, lock).acquire(block=False)


@pytest.mark.parametrize("lock", ["_wlock", "_rlock"])
async def test_a_process_killed_with_a_lock_of_the_queue_blocks_no_other(lock: str, queue: Any) -> None:
    async with (
        peers.peers(queue, 2) as [holder, api],
        TensorReceiver(queue) as receiver,
        TensorSender(queue) as sender,
    ):
        await sender.ready()
        await holder.call(_acquire, lock)
        holder.kill()
        await holder.ended()
        assert not getattr(queue, lock).acquire(block=False)
        with promptly():
            for seed, count in enumerate((3, BIG)):
                handle = await sender.send(pattern(seed, count))
                assert torch.equal(await receiver.receive(handle), pattern(seed, count))
        await api.call(peers.open_sender)
        handle = await api.call(peers.send_pattern, 1, BIG)
        assert torch.equal(await receiver.receive(handle), pattern(1, BIG))


async def test_a_receiver_does_not_open_if_a_process_was_killed_in_get(queue: Any) -> None:
    async with peers.peers(queue, 1) as [holder]:
        await holder.call(_acquire, "_rlock")
        holder.kill()
        await holder.ended()
        with pytest.raises(UsageError, match="was killed in it"):
            await TensorReceiver(queue).__aenter__()


async def _put_half(state: peers.State) -> None:
    """Write half of an object as multiprocessing does, with the lock."""
    endpoint: Any = state.endpoint
    endpoint._wlock.acquire()
    os.write(endpoint._writer.fileno(), (1 << 20).to_bytes(4) + bytes(10_000))


@pytest.mark.promise(10)
async def test_a_partial_object_of_a_killed_process_ends_every_wait_within_a_second(queue: Any) -> None:
    async with (
        peers.peers(queue, 1) as [other],
        TensorReceiver(queue) as receiver,
        TensorSender(queue, 1) as sender,
    ):
        handle = await sender.send(pattern(0, 3))
        await receiver.arrived(handle)
        waits: list[asyncio.Task[object]] = [
            asyncio.create_task(sender.send(pattern(1, 3))),
            asyncio.create_task(sender.drain()),
            asyncio.create_task(receiver.receive(beyond(handle))),
        ]
        await until(lambda: sender.statistics().waiting == receiver.statistics().waiting == 1)
        with promptly():
            await other.call(_put_half)
            other.kill()
            for wait in waits:
                with pytest.raises(PeerLostError):
                    await wait
        with pytest.raises(PeerLostError, match="not written in one piece"):
            await anext(receiver)


async def test_a_queue_serves_a_new_receiver_and_sender_after_a_killed_receiver(queue: Any) -> None:
    async with (
        peers.peers(queue, 2) as [engine, next_engine],
        TensorSender(queue, 1000) as sender,
    ):
        await engine.call(peers.open_receiver)
        await sender.ready()
        await engine.stop()
        with pytest.raises(WouldBlockError, match="slow to read"):
            while True:
                sender.send_nowait(pattern(0, 1000))
        waiting = asyncio.create_task(sender.send(pattern(0, 3)))
        with promptly():
            engine.kill()
            with pytest.raises(PeerLostError) as caught:
                await waiting
        assert caught.value.pid == engine.pid
        with pytest.raises(PeerLostError):
            await sender.send(pattern(0, 3))

        await engine.ended()  # the kernel closes the connection of a killed process before its lock
        async with TensorSender(queue) as later:  # whose request waits behind the unread records
            await next_engine.call(peers.open_receiver)
            handle = await later.send(pattern(1, BIG))
            assert await next_engine.call(peers.receive_pattern, handle, 1)
