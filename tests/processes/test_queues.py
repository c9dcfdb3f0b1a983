"""Queues: the processes that inherit one, and the records that wait on it."""

import asyncio
import pickle

import pytest
import torch

from aiotensor import DiscardedError, PeerLostError, TensorQueue, TensorReceiver, TensorSender, UsageError
from tests.pairs import beyond
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


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


async def test_closing_a_queue_does_not_affect_open_senders_and_receivers() -> None:
    queue = TensorQueue()
    async with TensorReceiver(queue) as receiver, TensorSender(queue) as sender:
        queue.close()
        assert torch.equal(await receiver.receive(await sender.send(pattern(1, BIG))), pattern(1, BIG))


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
