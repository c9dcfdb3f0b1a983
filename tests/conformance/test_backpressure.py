"""Limits hold, waits are served in order, and discarded messages release their memory at once."""

import asyncio
import os
from collections.abc import Callable

import pytest
import torch

from aiotensor import DiscardedError, RefusedError, TensorHandle, TensorReceiver, WouldBlockError
from aiotensor.transports.endpoints import Endpoint
from tests.conformance.makers import PairMaker
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.processes.peers import Peer
from verification.waiting import settled, until


async def test_untaken_messages_never_exceed_max_concurrent_videos(pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=3) as (sender, engine):
        sending = [asyncio.create_task(sender.send(pattern(seed, BIG // 10))) for seed in range(20)]
        await until(lambda: sender.statistics().waiting == 17)
        # The engine answers, so it has run: that the link was read returns no permit.
        await engine.call(_holds_untaken, 3)
        assert sum(send.done() for send in sending) == 3
        with pytest.raises(WouldBlockError, match="no permit") as caught:
            sender.send_nowait(pattern(0, 1))
        messages = caught.value.messages
        assert (messages.limit, messages.in_use, messages.requested) == (3, 3, 1)
        for seed, send in enumerate(sending):
            assert await engine.call(peers.receive_pattern, await send, seed)
            assert await engine.call(_untaken) <= 3
        assert sender.statistics().peak_in_flight == 3


async def _untaken(state: peers.State) -> int:
    return state.receiver.statistics().unclaimed_tensors


async def _holds_untaken(state: peers.State, count: int) -> None:
    await until(lambda: state.receiver.statistics().unclaimed_tensors == count)


async def test_taking_a_tensor_releases_its_permit_and_freeing_it_its_memory(
    pairs: PairMaker,
) -> None:
    async with pairs.near_sender(max_concurrent_videos=2) as (sender, engine):
        handles = [await sender.send(pattern(seed, BIG)) for seed in range(2)]
        third = asyncio.create_task(sender.send(pattern(2, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        await engine.call(_holds_untaken, 2)
        assert not third.done()
        assert await engine.call(peers.receive_pattern, handles[1], 1, keep=True)
        assert await engine.call(peers.receive_pattern, await third, 2, keep=True)
        assert sender.statistics().bytes_in_use == 3 * BIG * 8
        await engine.call(peers.forget_tensors)  # at once: nothing else is sent
        await until(lambda: sender.statistics().bytes_in_use == BIG * 8)


async def test_shared_memory_never_exceeds_arena_bytes(pairs: PairMaker) -> None:
    arena_bytes = 5 << 20
    async with pairs.near_sender(max_concurrent_videos=64, arena_bytes=arena_bytes) as (sender, engine):
        elements = (1 << 20) // 8
        sending = [asyncio.create_task(sender.send(pattern(seed, elements))) for seed in range(20)]
        await until(lambda: sum(send.done() for send in sending) == 5)
        assert await engine.call(peers.receive_pattern, await sending[0], 0, keep=True)
        with pytest.raises(WouldBlockError, match="not enough shared memory") as caught:
            sender.send_nowait(pattern(0, elements))
        found = caught.value.bytes
        assert (found.limit, found.in_use, found.requested) == (arena_bytes, arena_bytes, 1 << 20)
        assert sum(send.done() for send in sending) == 5  # taken, but not freed
        await engine.call(peers.forget_tensors)
        for seed, send in list(enumerate(sending))[1:]:
            assert await engine.call(peers.receive_pattern, await send, seed)
        await settled(sender)
        assert sender.statistics().peak_bytes_in_use == arena_bytes
        assert _bytes_of_memfds() <= arena_bytes


def _bytes_of_memfds() -> int:
    """Return the memory that the kernel has allocated for the segments of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and os.readlink(path).startswith("/memfd:aiotensor "):
            status = os.stat(path)
            found[status.st_ino] = status.st_blocks * 512
    assert found
    return sum(found.values())


_LIMITS: dict[str, Callable[[Endpoint], TensorReceiver]] = {
    "max_senders=1": lambda endpoint: TensorReceiver(endpoint, max_senders=1),
    "max_mapped_bytes=1073741824": lambda endpoint: TensorReceiver(endpoint, max_mapped_bytes=1 << 30),
    "max_unclaimed_messages=15": lambda endpoint: TensorReceiver(endpoint, max_unclaimed_messages=15),
}


@pytest.mark.parametrize("limit", _LIMITS)
async def test_a_sender_beyond_a_limit_over_all_senders_is_refused(limit: str, pairs: PairMaker) -> None:
    async with peers.peers(pairs.endpoint, 2) as [first, second], _LIMITS[limit](pairs.endpoint) as receiver:
        await first.call(peers.open_sender)
        assert await _arrives(receiver, first)
        await second.call(peers.open_sender)
        for _ in range(3):
            with pytest.raises(RefusedError, match=limit):
                await second.call(_send_and_drain)
        assert receiver.statistics().senders_refused > 0
        assert await _arrives(receiver, first)
        assert receiver.statistics().senders == 1
        await first.call(peers.close_sender)
        await until(lambda: receiver.statistics().senders == 0)
        if not pairs.comes_back:
            await second.call(peers.open_sender)
        assert await _arrives(receiver, second)  # memory is free now
        assert receiver.statistics().senders_lost == 0


async def _send_and_drain(state: peers.State) -> None:
    await state.sender.send(pattern(0, 3))
    await state.sender.drain()
    await state.sender.send(pattern(0, 3))  # drained: then the loss was known before


async def _arrives(receiver: TensorReceiver, child: Peer) -> bool:
    handle: TensorHandle = await child.call(peers.send_pattern, 7, BIG)
    return torch.equal(await receiver.receive(handle), pattern(7, BIG))


async def test_waiting_sends_arrive_in_the_order_of_their_calls_without_the_cancelled_ones(
    pairs: PairMaker,
) -> None:
    async with pairs.near_sender(max_concurrent_videos=1) as (sender, engine):
        sending = [asyncio.create_task(sender.send(pattern(seed, 10))) for seed in range(8)]
        await until(lambda: sender.statistics().waiting == 7)
        for number in (2, 5):
            sending[number].cancel()
        assert await engine.call(_take_in_order, 6) == [0, 1, 3, 4, 6, 7]
        assert [send.cancelled() for send in sending] == [seed in (2, 5) for seed in range(8)]
        await settled(sender)


async def _take_in_order(state: peers.State, count: int) -> list[int]:
    return [int((await anext(state.receiver)).tensor[0]) for _ in range(count)]


async def test_a_big_tensor_that_waits_is_not_overtaken_by_small_ones_that_would_fit(
    pairs: PairMaker,
) -> None:
    async with pairs.near_sender(arena_bytes=BIG * 8) as (sender, engine):
        assert await engine.call(peers.receive_pattern, await sender.send(pattern(0, BIG // 2)), 0, keep=True)
        big = asyncio.create_task(sender.send(pattern(1, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        small = asyncio.create_task(sender.send(pattern(2, BIG // 4)))
        await until(lambda: sender.statistics().waiting == 2)
        assert not small.done()
        await engine.call(peers.forget_tensors)
        handle = await big
        assert not small.done()
        assert await engine.call(peers.receive_pattern, handle, 1)
        assert await engine.call(peers.receive_pattern, await small, 2)


@pytest.mark.parametrize("by", ["sender", "receiver"])
async def test_a_discarded_message_frees_its_permit_and_its_memory_at_once(by: str, pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, engine):
        first = await sender.send(pattern(1, BIG))
        second = asyncio.create_task(sender.send(pattern(2, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        if by == "sender":
            sender.discard(first)
        else:
            await engine.call(_discard, first)
        assert await engine.call(peers.receive_pattern, await second, 2)
        with pytest.raises(DiscardedError):
            await engine.call(peers.receive_pattern, first, 1)
        assert sender.statistics().messages_discarded == 1
        await settled(sender)


async def _discard(state: peers.State, handle: TensorHandle) -> None:
    state.receiver.discard(handle)


async def test_a_message_discarded_before_it_arrives_is_dropped_when_it_does(pairs: PairMaker) -> None:
    async with pairs.near_receiver(max_concurrent_videos=1) as (receiver, api, name):
        handle = TensorHandle(name, 0, 0, "int64", (BIG,), "cpu")
        waiting = asyncio.create_task(receiver.receive(handle))
        await until(lambda: receiver.statistics().waiting == 1)
        receiver.discard(handle)
        with pytest.raises(DiscardedError):
            await waiting
        assert await api.call(peers.send_pattern, 0, BIG) == handle
        following = await api.call(peers.send_pattern, 1, BIG)  # there is but one permit
        assert torch.equal(await receiver.receive(following), pattern(1, BIG))
        assert receiver.statistics().messages_discarded == 1
        await until(lambda: receiver.statistics().leases == 0)


async def test_a_long_wait_for_a_permit_is_logged_once_with_its_holders(
    pairs: PairMaker, caplog: pytest.LogCaptureFixture
) -> None:
    async with pairs.near_sender(max_concurrent_videos=1, long_wait_s=0.01) as (sender, engine):
        held = await sender.send(pattern(0, BIG))
        waiting = asyncio.create_task(sender.send(pattern(1, 3)))
        await until(lambda: "has waited" in caplog.text)
        (holder,) = sender.statistics().holders
        assert (holder.message, holder.state) == (held.message, "waiting to be taken")
        assert (holder.bytes, holder.seconds > 0) == (BIG * 8, True)
        assert sender.statistics().longest_wait_s > 0
        assert await engine.call(peers.receive_pattern, held, 0)
        assert await engine.call(peers.receive_pattern, await waiting, 1)
        assert caplog.text.count("has waited") == 1
        assert f"receiver: pid {engine.pid}; held by: message {held.message}" in caplog.text
