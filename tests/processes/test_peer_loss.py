"""What becomes of the survivor when the other side dies or closes."""

import asyncio
import contextlib
import os
import time
from collections import Counter

import pytest
import torch

from aiotensor import (
    DiscardedError,
    PeerLostError,
    TensorHandle,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    WouldBlockError,
)
from aiotensor.links import Endpoint
from tests.pairs import BIG, pattern, settled, until
from tests.processes import peers
from tests.processes.peers import Peer

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_a_killed_sender_ends_every_wait_for_its_tensors_within_a_second(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 1) as [child], TensorReceiver(endpoint) as receiver:
        name = await child.call(peers.open_sender)
        taken = await receiver.receive(await child.call(peers.send_pattern, 1, BIG))
        waits = [
            asyncio.create_task(receiver.receive(TensorHandle(name, number, 0, "int64", (BIG,), "cpu")))
            for number in (1, 2, 77)
        ]
        await asyncio.sleep(0)
        assert receiver.statistics().waiting == 3
        killed = time.monotonic()
        child.kill()
        for wait in waits:
            with pytest.raises(PeerLostError) as caught:
                await wait
            assert caught.value.pid == child.pid
        assert time.monotonic() - killed < 1
        # What was taken before stays valid, and the receiver goes on.
        assert torch.equal(taken, pattern(1, BIG))
        assert receiver.statistics().senders_lost == 1
        assert receiver.statistics().senders == 0
        async with TensorSender(endpoint) as other:
            assert torch.equal(await receiver.receive(await other.send(pattern(5, 9))), pattern(5, 9))


async def test_tensors_that_a_killed_sender_left_untaken_are_dropped_and_their_handles_say_why(
    endpoint: Endpoint,
) -> None:
    async with peers.peers(endpoint, 1) as [child], TensorReceiver(endpoint) as receiver:
        await child.call(peers.open_sender)
        handle = await child.call(peers.send_pattern, 1, BIG)
        child.kill()
        await child.ended()
        with pytest.raises(PeerLostError):
            await receiver.receive(_beyond(handle))
        with pytest.raises(PeerLostError):
            await receiver.receive(handle)
        assert receiver.statistics().unclaimed_tensors == 0
        await until(lambda: receiver.statistics().leases == 0)


def _beyond(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(handle.sender, handle.message + 1000, 0, handle.dtype, handle.shape, handle.device)


async def test_a_sender_killed_before_the_receiver_started_is_noticed_by_it() -> None:
    queue = TensorQueue()
    async with peers.peers(queue, 1) as [child]:
        await child.call(peers.open_sender)
        handle = await child.call(peers.send_pattern, 1, BIG)
        child.kill()
        await child.ended()
        async with TensorReceiver(queue) as receiver:
            with pytest.raises(PeerLostError) as caught:
                await receiver.receive(_beyond(handle))
            assert caught.value.pid == child.pid


async def test_a_sender_killed_in_the_middle_of_a_message_loses_it_whole(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 1) as [child], TensorReceiver(endpoint) as receiver:
        await child.call(peers.open_sender)
        handles = await child.call(_begin_message_and_stay)
        waits = [asyncio.create_task(receiver.receive(handle)) for handle in handles]
        await asyncio.sleep(0)
        child.kill()
        for wait in waits:
            with pytest.raises(PeerLostError):
                await wait


async def _begin_message_and_stay(state: peers.State) -> list[TensorHandle]:
    message = await state.sender.message().__aenter__()
    return [await message.send(pattern(0, BIG)), await message.send(pattern(1, 3))]


async def test_a_killed_receiver_ends_every_waiting_send_within_a_second(endpoint: Endpoint) -> None:
    async with (
        peers.peers(endpoint, 1) as [child],
        TensorSender(endpoint, max_concurrent_videos=1) as sender,
    ):
        await child.call(peers.open_receiver)
        handle = await sender.send(pattern(0, BIG))
        assert await child.call(peers.receive_pattern, handle, 0)
        await sender.send(pattern(1, BIG))
        waits = [asyncio.create_task(sender.send(pattern(2, count))) for count in (5, BIG)]
        draining = asyncio.create_task(sender.drain())
        await asyncio.sleep(0)
        assert sender.statistics().waiting == 2
        killed = time.monotonic()
        child.kill()
        for wait in [*waits, draining]:
            with pytest.raises(PeerLostError) as caught:
                await wait
            assert caught.value.pid == child.pid
        assert time.monotonic() - killed < 1
        if isinstance(endpoint, TensorQueue):
            with pytest.raises(PeerLostError):
                await sender.send(pattern(3, 5))
            with pytest.raises(PeerLostError):
                sender.send_nowait(pattern(3, 5))
        else:  # another receiver may come
            with pytest.raises(WouldBlockError, match="no receiver"):
                sender.send_nowait(pattern(3, 5))
        assert sender.statistics().in_flight == 0
        await settled(sender)


async def test_a_receiver_killed_during_a_copy_ends_the_send(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 1) as [child], TensorSender(endpoint) as sender:
        await child.call(peers.open_receiver)
        assert await child.call(peers.receive_pattern, await sender.send(pattern(0, 3)), 0)
        sending = asyncio.create_task(sender.send(torch.ones(1 << 26, dtype=torch.uint8)))
        await asyncio.sleep(0)
        child.kill()
        with contextlib.suppress(PeerLostError):  # it may just have been sent
            await sending
        await until(lambda: sender.statistics().receivers_lost == 1)
        await settled(sender)


async def test_what_was_sent_before_a_clean_end_of_the_process_can_still_be_received() -> None:
    queue = TensorQueue()
    async with peers.peers(queue, 1) as [child]:
        await child.call(peers.open_sender)
        handles = [await child.call(peers.send_pattern, seed, count) for seed, count in ((1, 5), (2, BIG))]
        assert await child.finish() == 0
        async with TensorReceiver(queue) as receiver:
            for seed, handle in zip((1, 2), handles, strict=True):
                assert torch.equal(await receiver.receive(handle), pattern(seed, handle.shape[0]))
            with pytest.raises(DiscardedError, match="closed"):
                await receiver.receive(_beyond(handles[0]))


async def test_a_receiver_that_closes_ends_the_waits_of_its_senders(endpoint: Endpoint) -> None:
    async with (
        peers.peers(endpoint, 1) as [child],
        TensorSender(endpoint, max_concurrent_videos=1) as sender,
    ):
        await child.call(peers.open_receiver)
        assert await child.call(peers.receive_pattern, await sender.send(pattern(0, 3)), 0)
        await sender.send(pattern(1, 3))
        wait = asyncio.create_task(sender.send(pattern(2, 3)))
        await asyncio.sleep(0)
        await child.call(peers.close_receiver)
        with pytest.raises(PeerLostError, match="closed"):
            await wait


async def test_a_received_tensor_outlives_its_sender_and_its_receiver(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 1) as [child]:
        async with TensorReceiver(endpoint) as receiver:
            await child.call(peers.open_sender)
            tensor = await receiver.receive(await child.call(peers.send_pattern, 4, BIG))
            view = tensor[100:200]
            child.kill()
            await child.ended()
            del tensor
        assert torch.equal(view, pattern(4, BIG)[100:200])


async def test_one_killed_sender_harms_no_other(endpoint: Endpoint) -> None:
    async with peers.peers(endpoint, 3) as children, TensorReceiver(endpoint) as receiver:
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


async def _send_many(state: peers.State, count: int) -> int:
    for seed in range(count):
        await state.sender.send(pattern(seed, BIG if seed % 2 else 10))
    await state.sender.drain()
    return count


async def test_kill_at_any_moment_leaves_no_waiter_and_no_memory(endpoint: Endpoint) -> None:
    async with TensorReceiver(endpoint) as receiver:
        for moment in range(6):
            async with peers.peers(endpoint, 1) as [child]:
                await child.call(peers.open_sender)
                child.start(_send_many, 10_000)
                for _ in range(moment * 7):
                    await anext(receiver)
                child.kill()
                await child.ended()
                await until(lambda: receiver.statistics().senders == 0)
                assert receiver.statistics().unclaimed_tensors == 0
                await until(lambda: receiver.statistics().leases == 0)
        assert receiver.statistics().senders_lost == 6


async def test_processes_end_silently_with_status_0_also_when_nothing_was_closed(endpoint: Endpoint) -> None:
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


def test_killed_processes_left_no_name_in_the_file_system() -> None:
    # The tests above killed senders and receivers at many moments.
    assert not [name for name in os.listdir("/dev/shm") if "aiotensor" in name or name.startswith("torch_")]
