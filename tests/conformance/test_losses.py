"""Effects on a sender or a receiver when the process of its peer is killed, closes or exits."""

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from aiotensor import (
    DiscardedError,
    PeerLostError,
    TensorHandle,
    TensorReceiver,
    TensorSender,
    WouldBlockError,
)
from aiotensor.transports.endpoints import Endpoint
from tests.cancellation.situations import strided
from tests.conformance.makers import PairMaker
from tests.pairs import beyond
from verification.internals import worker_of
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.processes.peers import Peer
from verification.promptly import promptly
from verification.waiting import settled, until


@pytest.mark.promise(10, 12, 36)
async def test_a_killed_sender_ends_every_wait_for_its_tensors_within_a_second(pairs: PairMaker) -> None:
    async with pairs.near_receiver() as (receiver, api, _):
        taken = await receiver.receive(await api.call(peers.send_pattern, 1, BIG))
        untaken = await api.call(peers.send_pattern, 2, BIG)
        in_part = await api.call(_begin_message_and_stay)
        posted = await api.call(_post_held_back)
        waits = [
            asyncio.create_task(receiver.receive(handle)) for handle in (*in_part, posted, beyond(untaken))
        ]
        await until(lambda: receiver.statistics().waiting == 4)
        with promptly():
            api.kill()
            for wait in waits:
                with pytest.raises(PeerLostError) as caught:
                    await wait
                assert caught.value.pid == api.pid
        with pytest.raises(PeerLostError):
            await receiver.receive(untaken)
        # Tensors that were taken before stay valid, and the receiver still works.
        assert torch.equal(taken, pattern(1, BIG))
        assert receiver.statistics().unclaimed_tensors == 0
        await until(lambda: receiver.statistics().leases == 1)
        assert (receiver.statistics().senders, receiver.statistics().senders_lost) == (0, 1)
        async with TensorSender(pairs.endpoint) as other:
            assert torch.equal(await receiver.receive(await other.send(pattern(5, 9))), pattern(5, 9))


async def _begin_message_and_stay(state: peers.State) -> list[TensorHandle]:
    message = state.others["message"] = await state.sender.message().__aenter__()
    return [await message.send(pattern(0, BIG)), await message.send(pattern(1, 3))]


async def _post_held_back(state: peers.State) -> TensorHandle:
    """Post a tensor whose copy never begins."""
    await state.sender.ready()
    worker_of(state.sender).submit(threading.Event().wait)
    return state.sender.post(strided(1, BIG))


@pytest.mark.promise(10)
async def test_a_killed_receiver_ends_every_wait_of_its_sender_within_a_second(pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, engine):
        assert await engine.call(peers.receive_pattern, await sender.send(pattern(0, BIG)), 0)
        await sender.send(pattern(1, BIG))
        calls: list[Coroutine[Any, Any, object]] = [
            *(sender.send(pattern(2, count)) for count in (5, BIG)),
            sender.message().__aenter__(),
            sender.allocate((BIG,), torch.int64),
            sender.drain(),
        ]
        waits = [asyncio.create_task(call) for call in calls]
        await until(lambda: sender.statistics().waiting == 4)  # all but the last one
        with promptly():
            engine.kill()
            for wait in waits:
                with pytest.raises(PeerLostError) as caught:
                    await wait
                assert caught.value.pid == engine.pid
        # A process that is being killed has its listening socket a little longer than its connections.
        await engine.ended()
        await until(lambda: sender.receiver_id is None)
        with pytest.raises(WouldBlockError, match="no receiver"):
            sender.send_nowait(pattern(3, 5))
        assert sender.statistics().in_flight == 0
        await settled(sender)


@pytest.mark.promise(10)
async def test_tensors_sent_before_a_clean_close_can_still_be_received(pairs: PairMaker) -> None:
    async with pairs.near_receiver(max_concurrent_videos=64) as (receiver, api, _):
        counts = {seed: BIG if seed % 10 == 0 else 50 for seed in range(50)}
        handles = [await api.call(peers.send_pattern, seed, count) for seed, count in counts.items()]
        assert await api.finish() == 0  # it closes its sender, and ends
        for seed, handle in enumerate(handles):
            assert torch.equal(await receiver.receive(handle), pattern(seed, counts[seed]))
        with pytest.raises(DiscardedError, match="closed"):
            await receiver.receive(beyond(handles[0]))


@pytest.mark.promise(9)
async def test_a_view_stays_valid_when_its_sender_was_killed_and_its_receiver_closed(
    endpoint: Endpoint,
) -> None:
    async with peers.peers(endpoint, 2) as children:
        async with TensorReceiver(endpoint) as receiver:
            views = []
            for seed, child in enumerate(children):
                await child.call(peers.open_sender)
                tensor = await receiver.receive(await child.call(peers.send_pattern, seed, BIG))
                views.append(tensor[100:200])
                del tensor
            children[0].kill()
            await children[0].ended()
            await until(lambda: receiver.statistics().senders == 1)
            assert torch.equal(views[0], pattern(0, BIG)[100:200])
            assert receiver.statistics().leases == 2
        for seed, view in enumerate(views):
            assert torch.equal(view, pattern(seed, BIG)[100:200])


@pytest.mark.promise(1, 2)
async def test_a_killed_sender_affects_no_other_and_leaves_no_memory_and_no_file(endpoint: Endpoint) -> None:
    async with (
        peers.peers(endpoint, 3) as children,
        TensorReceiver(endpoint) as receiver,
    ):
        names = [await child.call(peers.open_sender) for child in children]
        victim, *others = children
        victim.start(_send_many, 10_000)
        streams = [child.start(_send_many, 50) for child in others]
        received = Counter[str]()
        async for delivery in receiver:
            assert torch.equal(delivery.tensor, pattern(int(delivery.tensor[0]), delivery.tensor.numel()))
            received[delivery.handle.sender] += 1
            if delivery.handle.sender == names[0] and received[names[0]] == 10:
                victim.kill()  # once: later it may be there no more
            if received[names[1]] == received[names[2]] == 50 and received[names[0]] >= 10:
                break
        assert [await stream for stream in streams] == [50, 50]
        await until(lambda: receiver.statistics().senders == 2)
        del delivery
        assert receiver.statistics().unclaimed_tensors == 0
        await until(lambda: receiver.statistics().leases == 0)
    names = os.listdir("/dev/shm")
    assert not [name for name in names if "aiotensor" in name or name.startswith("torch_")]


async def _send_many(state: peers.State, count: int) -> int:
    for seed in range(count):
        await state.sender.send(pattern(seed, BIG if seed % 2 else 10))
    await state.sender.drain()
    return count


@pytest.mark.promise(4)
async def test_a_process_with_open_objects_exits_silently_with_status_0(endpoint: Endpoint) -> None:
    child = Peer(endpoint)
    try:
        await child.call(peers.open_sender)
        await child.call(peers.open_receiver)
        handle = await child.call(peers.send_pattern, 1, BIG)
        assert await child.call(peers.receive_pattern, handle, 1, keep=True)
        await child.call(_forget_to_close)
        assert await child.finish() == 0
    finally:
        await child.close()


async def _forget_to_close(state: peers.State) -> None:
    state.senders.clear()
    state.receivers.clear()


async def test_a_receivers_forked_child_does_not_keep_its_senders_waiting(pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1) as (sender, engine):
        grandchild = await engine.call(peers.fork_and_sleep)
        await sender.send(pattern(1, 3))
        waiting = asyncio.create_task(sender.send(pattern(2, 3)))
        await until(lambda: sender.statistics().waiting == 1)
        engine.kill()
        try:
            with pytest.raises(PeerLostError):
                await waiting
        finally:
            os.kill(grandchild, signal.SIGKILL)
