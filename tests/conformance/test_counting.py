"""Statistics count the waits that ended, the copies that were made, and the errors that calls raised."""

import asyncio

import pytest
import torch

from aiotensor import (
    AlreadyTakenError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    TooLargeError,
    UnsupportedTensorError,
    UsageError,
    WouldBlockError,
)
from tests.conformance.makers import PairMaker
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import settled, until

_BIG_BYTES = BIG * 8


async def test_waits_for_permits_and_for_memory_are_counted_apart_once_they_have_ended(
    pairs: PairMaker,
) -> None:
    async with pairs.near_sender(max_concurrent_videos=2, arena_bytes=_BIG_BYTES * 2) as (sender, engine):
        handles = [await sender.send(pattern(seed, BIG)) for seed in range(2)]
        waiting = [asyncio.create_task(sender.send(pattern(2, 3))) for _ in range(3)]
        await until(lambda: sender.statistics().waiting == 3)
        assert sum(sender.statistics().permit_waits.counts) == 0
        waiting[1].cancel()
        await asyncio.wait(waiting[1:2])
        assert sum(sender.statistics().permit_waits.counts) == 1
        for seed, handle in enumerate(handles):
            assert await engine.call(peers.receive_pattern, handle, seed, keep=True)
        await asyncio.gather(waiting[0], waiting[2])
        now = sender.statistics()
        assert (sum(now.permit_waits.counts), sum(now.memory_waits.counts)) == (3, 0)
        assert now.permit_waits.total_s > 0

        for task in (waiting[0], waiting[2]):
            assert await engine.call(peers.receive_pattern, task.result(), 2)
        await until(lambda: sender.statistics().in_flight == 0)
        last = asyncio.create_task(sender.send(pattern(3, BIG)))  # its permit is free, its memory is not
        await until(lambda: sender.statistics().waiting == 1)
        await engine.call(peers.forget_tensors)
        assert await engine.call(peers.receive_pattern, await last, 3)
        now = sender.statistics()
        assert (sum(now.permit_waits.counts), sum(now.memory_waits.counts)) == (3, 1)
        await settled(sender)


async def test_a_sender_counts_only_copies_into_shared_memory(pairs: PairMaker) -> None:
    async with pairs.near_sender() as (sender, engine):
        handles = [await sender.send(pattern(0, 3))]  # rides in the frame
        allocated = await sender.allocate((BIG,), torch.int64)
        allocated.copy_(pattern(0, BIG))
        handles.append(await sender.send(allocated))
        del allocated
        assert (sender.statistics().tensors_copied, sender.statistics().bytes_copied) == (0, 0)

        handles.append(await sender.send(pattern(0, BIG)))
        handles.append(sender.send_nowait(pattern(0, BIG)))
        async with sender.message() as message:
            handles += [await message.send(pattern(0, BIG // 2)), await message.send(pattern(0, 3))]
        now = sender.statistics()
        assert (now.tensors_copied, now.bytes_copied) == (3, _BIG_BYTES * 5 // 2)
        # One was sent when the two met; over TCP, that of `send_nowait` counts once it was moved.
        await until(lambda: sender.statistics().tensors_sent == len(handles) + 1)
        for handle in handles:
            assert await engine.call(peers.receive_pattern, handle, 0)
        await settled(sender)


async def test_a_receiver_counts_only_tensors_received_with_copy(pairs: PairMaker) -> None:
    async with pairs.near_receiver() as (receiver, api, _):
        for count in (3, BIG):
            handle = await api.call(peers.send_pattern, 0, count)
            assert torch.equal(await receiver.receive(handle, copy=True), pattern(0, count))
            handle = await api.call(peers.send_pattern, 0, count)
            assert torch.equal(await receiver.receive(handle), pattern(0, count))
        now = receiver.statistics()
        assert (now.tensors_copied, now.bytes_copied) == (2, (3 + BIG) * 8)
        assert now.tensors_taken == 4


async def test_errors_of_a_sender_are_counted_by_their_type_and_cancelling_is_none(pairs: PairMaker) -> None:
    async with pairs.near_sender(max_concurrent_videos=1, arena_bytes=_BIG_BYTES) as (sender, _):
        with pytest.raises(UnsupportedTensorError):
            await sender.send(torch.eye(3).to_sparse())
        with pytest.raises(UnsupportedTensorError):
            sender.send_nowait(torch.eye(3).to_sparse())
        with pytest.raises(TooLargeError):
            await sender.allocate((BIG + 1,), torch.int64)
        with pytest.raises(ValueError, match="not be negative"):
            await sender.allocate((-1,), torch.int64)
        async with sender.message() as message:
            with pytest.raises(WouldBlockError):
                sender.send_nowait(pattern(0, 3))
            with pytest.raises(TooLargeError):
                await message.send(pattern(0, BIG + 1))
            waiting = asyncio.create_task(sender.send(pattern(0, 3)))
            await until(lambda: sender.statistics().waiting == 1)
            waiting.cancel()
            await asyncio.wait([waiting])
            handle = await message.send(pattern(0, 3))
        sender.discard(handle)
        with pytest.raises(ValueError, match="belongs to sender"):
            sender.discard(type(handle)("another", 0, 0, "int64", (3,), "cpu"))
        with pytest.raises(DiscardedError):
            await message.send(pattern(0, 3))
        await settled(sender)
        with pytest.raises(UsageError):
            await message.__aenter__()
        late = sender.message()
    with pytest.raises(ClosedError):
        await sender.drain()
    with pytest.raises(ClosedError):
        await late.__aenter__()
    for call in (sender.message, sender.discard_all):
        with pytest.raises(ClosedError):
            call()
    assert sender.statistics().errors == {
        "UnsupportedTensorError": 2,
        "TooLargeError": 2,
        "other": 2,
        "WouldBlockError": 1,
        "DiscardedError": 1,
        "UsageError": 1,
        "ClosedError": 4,
    }


async def test_errors_of_a_receiver_are_counted_by_their_type_and_cancelling_is_none(
    pairs: PairMaker,
) -> None:
    async with pairs.near_receiver() as (receiver, api, _):
        handle = await api.call(peers.send_pattern, 0, 3)
        waiting = asyncio.create_task(receiver.receive(handle))
        await waiting
        for _ in range(2):
            with pytest.raises(AlreadyTakenError):
                await receiver.receive(handle)
        with pytest.raises(AlreadyTakenError):
            receiver.receive_nowait(handle)
        with pytest.raises(AlreadyTakenError):
            await receiver.arrived(handle)
        later = await api.call(peers.send_pattern, 0, 3)
        beyond = type(later)(later.sender, later.message + 1, 0, later.dtype, later.shape, later.device)
        with pytest.raises(WouldBlockError):
            receiver.receive_nowait(beyond)
        waiting = asyncio.create_task(receiver.receive(beyond))
        await until(lambda: receiver.statistics().waiting == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        with pytest.raises(TypeError):
            await receiver.receive("a name")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            receiver.discard("a name")  # type: ignore[arg-type]
        counted = {"AlreadyTakenError": 4, "WouldBlockError": 1, "other": 2}
        assert receiver.statistics().errors == counted
        assert (await anext(receiver)).handle == later
        waiting = asyncio.create_task(receiver.receive(beyond))
        await until(lambda: receiver.statistics().waiting == 1)
        api.kill()
        with pytest.raises(PeerLostError):
            await waiting
    with pytest.raises(StopAsyncIteration):  # which is no error
        await anext(receiver)
    assert receiver.statistics().errors == {**counted, "PeerLostError": 1}
