"""Either side is killed or restarted; the survivor keeps working, and the next one is served."""

import asyncio
import contextlib
import gc
import os
import random
from collections.abc import Sequence

import pytest
import torch

from aiotensor import PeerLostError, TensorHandle, TensorReceiver, TensorSender, WouldBlockError
from tests.selection import COMPLETE
from verification.internals import worker_of
from verification.patterns import BIG, pattern
from verification.processes import peers, watch
from verification.processes.peers import Peer
from verification.promptly import promptly
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

_ROUNDS = 10 if COMPLETE else 3  # for each side
_ARENA = 8 << 20
_LONGEST_MOMENT_S = 0.03


async def _send_for_ever(state: peers.State) -> None:
    seed = 0
    while True:
        await state.sender.send(pattern(seed, (10, BIG // 10, BIG)[seed % 3]))
        seed += 1


async def _receive_for_ever(state: peers.State) -> None:
    async for delivery in state.receiver:
        assert torch.equal(delivery.tensor, pattern(int(delivery.tensor[0]), delivery.tensor.numel()))


@pytest.mark.promise(1)
async def test_a_receiver_survives_its_killed_senders(address: str, moments: random.Random) -> None:
    me = os.getpid()
    async with TensorReceiver(address) as receiver:
        left: list[tuple[int, int]] = []
        for index in range(_ROUNDS):
            child = Peer(address)
            try:
                name = await child.call(peers.open_sender, 8, _ARENA)
                await child.call(peers.send_pattern, 0, 10)
                child.start(_send_for_ever)
                delivery = await anext(receiver)
                beyond = TensorHandle(name, 1 << 40, 0, "int64", (1,), "cpu")
                waiting = asyncio.create_task(receiver.receive(beyond))
                taking = asyncio.create_task(_check_all(receiver))
                await asyncio.sleep(moments.random() * _LONGEST_MOMENT_S)
                kept = delivery.tensor
                with promptly():
                    child.kill()
                    with pytest.raises(PeerLostError) as caught:
                        await waiting
                    assert caught.value.pid == child.pid
                taking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await taking
            finally:
                await child.close()
            assert torch.equal(kept, pattern(0, 10))
            del delivery, kept, caught
            await until(lambda: receiver.statistics().leases == 0)
            await until(lambda: watch.memfds(me) == 0)
            statistics = receiver.statistics()
            assert (statistics.senders, statistics.unclaimed_tensors, statistics.mapped_bytes) == (0, 0, 0)
            assert statistics.senders_lost == index + 1
            left.append((watch.memfds(me), watch.descriptors(me)))
        assert len(set(left[1:])) == 1, left
        assert os.listdir(os.path.dirname(address.removeprefix("unix://"))) == ["s"]
        async with TensorSender(address) as sender:
            assert torch.equal(await receiver.receive(await sender.send(pattern(5, BIG))), pattern(5, BIG))


async def _check_all(receiver: TensorReceiver) -> None:
    async for delivery in receiver:
        assert torch.equal(delivery.tensor, pattern(int(delivery.tensor[0]), delivery.tensor.numel()))
        await asyncio.sleep(0)


@pytest.mark.promise(1)
async def test_a_sender_survives_its_killed_receivers(address: str, moments: random.Random) -> None:
    me = os.getpid()
    async with TensorSender(address, 2, _ARENA) as sender:
        left: list[tuple[int, int]] = []
        for index in range(_ROUNDS):
            child = Peer(address)
            try:
                opening = child.start(peers.open_receiver)
                first = await _send_to_the_next(sender)
                await opening
                assert await child.call(peers.receive_pattern, first, 0, keep=True)
                lost = sender.statistics().receivers_lost
                if index % 2:
                    child.start(_receive_for_ever)  # else it takes nothing, and both permits are soon held
                sending = [asyncio.create_task(_send_until_lost(sender, number)) for number in range(3)]
                await asyncio.sleep(moments.random() * _LONGEST_MOMENT_S)
                with promptly():
                    child.kill()
                    await _told(sender, sending, lost)
                for send in sending:
                    send.cancel()
                ends = await asyncio.gather(*sending, return_exceptions=True)
                assert {end for end in ends if not isinstance(end, asyncio.CancelledError)} <= {
                    child.pid,
                    None,
                }
            finally:
                await child.close()
            await settled(sender)
            gc.collect()
            assert sender.statistics().receivers_lost > lost
            await until(lambda: sender.receiver_id is None)
            # The worker unmaps the memory that the dead receiver may have read.
            await worker_of(sender).settle()
            left.append((watch.memfds(me), watch.descriptors(me)))
        assert {mapped for mapped, _ in left} <= {0, 1}, left  # the segment that the next receiver gets
        assert len({count - mapped for mapped, count in left[1:]}) == 1, left
        async with TensorReceiver(address) as receiver:
            handle = await sender.send(pattern(5, BIG))
            assert torch.equal(await receiver.receive(handle), pattern(5, BIG))


async def _told(sender: TensorSender, sending: Sequence["asyncio.Task[int | None]"], lost: int) -> None:
    """Wait until all calls that waited for the lost receiver have raised."""
    await until(lambda: sender.statistics().receivers_lost > lost)
    # A call that got its permit in the iteration of the loss continues with the next receiver.
    await until(lambda: sum(not send.done() for send in sending) == sender.statistics().in_flight)


async def _send_to_the_next(sender: TensorSender) -> TensorHandle:
    """Send to the receiver that has just begun, or will."""
    while True:
        # A process that is being killed has its listening socket a little longer than its connections.
        with contextlib.suppress(PeerLostError):
            return await sender.send(pattern(0, BIG))


async def _send_until_lost(sender: TensorSender, number: int) -> int | None:
    """Send until the receiver is lost, and say which one it was, if that ended a wait."""
    seed, lost = number, sender.statistics().receivers_lost
    while sender.statistics().receivers_lost == lost:
        try:
            await sender.send(pattern(seed, (10, BIG // 10, BIG)[seed % 3]))
        except PeerLostError as error:
            return error.pid
        seed += 3
    return None


# Restarts of a receiver at its address


@pytest.mark.parametrize("end", ["close", "kill"])
async def test_a_restarted_receiver_gets_only_tensors_sent_after_its_start(end: str, address: str) -> None:
    async with peers.peers(address, 2) as [first, second], TensorSender(address, 4) as sender:
        await first.call(peers.open_receiver)
        taken = await sender.send(pattern(0, BIG))
        assert await first.call(peers.receive_pattern, taken, 0, keep=True)
        lost = [await sender.send(pattern(seed, count)) for seed, count in ((1, BIG), (2, 5))]
        with pytest.raises(PeerLostError):
            async with sender.message() as message:
                await message.send(pattern(3, BIG))
                await _end(first, end)
                await until(lambda: sender.statistics().receivers_lost > 0)
                await message.send(pattern(4, 5))
        await settled(sender)
        with pytest.raises(WouldBlockError, match="no receiver"):
            sender.send_nowait(pattern(9, 5))
        waiting = [asyncio.create_task(sender.send(pattern(seed, BIG))) for seed in (5, 6)]
        await second.call(peers.open_receiver)
        for seed, send in zip((5, 6), waiting, strict=True):
            assert await second.call(peers.receive_pattern, await send, seed)
        # No call waits forever for a tensor that was sent to the first one.
        for handle in (taken, *lost):
            with pytest.raises(PeerLostError):
                await second.call(peers.receive_pattern, handle, 0)
        await settled(sender)


async def _end(child: Peer, how: str) -> None:
    if how == "kill":
        child.kill()
        await child.ended()
    else:
        await child.call(peers.close_receiver)


async def test_a_handle_of_an_earlier_receiver_raises_peer_lost_error(address: str) -> None:
    async with peers.peers(address, 1) as [child]:
        async with TensorReceiver(address):
            await child.call(peers.open_sender)
            handle = await child.call(peers.send_pattern, 1, BIG)
        async with TensorReceiver(address) as receiver:
            with pytest.raises(PeerLostError):
                await receiver.receive(handle)


@pytest.mark.promise(9)
@pytest.mark.parametrize("end", ["close", "kill"])
async def test_tensors_of_two_receivers_survive_the_end_of_their_sender(end: str, address: str) -> None:
    async with peers.peers(address, 1) as [child]:
        await child.call(peers.open_sender)
        async with TensorReceiver(address) as first:
            old = await first.receive(await child.call(peers.send_pattern, 1, BIG))
        async with TensorReceiver(address) as second:
            new = await second.receive(await child.call(peers.send_pattern, 2, BIG))
            if end == "kill":
                child.kill()
                await child.ended()
            else:
                await child.call(peers.close_sender)
            await until(lambda: second.statistics().senders == 0)
        # Both receivers have returned the memory that their tensors do not use.
        assert torch.equal(old, pattern(1, BIG))
        assert torch.equal(new, pattern(2, BIG))


@pytest.mark.promise(9)
async def test_a_view_survives_its_receiver_while_the_sender_uses_another(address: str) -> None:
    arena_bytes = 4 * BIG * 8
    async with TensorSender(address, arena_bytes=arena_bytes) as sender:
        async with TensorReceiver(address) as first:
            old = [await first.receive(await sender.send(pattern(seed, BIG))) for seed in range(3)]
        await until(lambda: sender.statistics().receivers_lost == 1)
        async with TensorReceiver(address) as second:
            for seed in range(10, 30):
                handle = await sender.send(pattern(seed, BIG))
                assert torch.equal(await second.receive(handle), pattern(seed, BIG))
            for seed, tensor in enumerate(old):
                assert torch.equal(tensor, pattern(seed, BIG))
            await settled(sender)
        for seed, tensor in enumerate(old):
            assert torch.equal(tensor, pattern(seed, BIG))
