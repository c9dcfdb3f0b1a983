"""Receiving in any order, with any number of waiters; nothing is lost when one is cancelled."""

import asyncio
import gc
import os
import threading
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from aiotensor import (
    AlreadyTakenError,
    Delivery,
    DiscardedError,
    RefusedError,
    TensorHandle,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    WouldBlockError,
)
from aiotensor import receiver as receiver_module
from tests.conformance.turns import Changes
from tests.pairs import beyond, endpoint, is_local, pair
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")

once = pytest.mark.parametrize("link", ["unix"], indirect=True)  # the link makes no difference


def _one(name: str, value: int) -> dict[str, Any]:
    return {name: value}


@once
async def test_invalid_arguments_raise_errors_that_suggest_a_remedy() -> None:
    queue = TensorQueue()
    for limit in ("max_senders", "max_mapped_bytes", "max_unclaimed_messages"):
        with pytest.raises(ValueError, match=f"{limit} must be at least 1, got 0"):
            TensorReceiver(queue, **_one(limit, 0))
    with pytest.raises(TypeError, match="TensorQueue"):
        TensorReceiver(object())  # type: ignore[arg-type]
    async with pair() as (sender, receiver):
        for wrong in (
            TensorHandle(sender.id, -1, 0, "int64", (3,), "cpu"),
            TensorHandle(sender.id, 0, -1, "int64", (3,), "cpu"),
        ):
            with pytest.raises(ValueError, match="negative"):
                await receiver.receive(wrong)
        with pytest.raises(TypeError, match="decode it with its type"):
            await receiver.receive({"message": 0})  # type: ignore[arg-type]


@pytest.mark.promise(13)
async def test_receiving_a_handle_twice_raises_already_taken_error() -> None:
    async with pair() as (sender, receiver):
        handle = await sender.send(pattern(0, 3))
        first, second = (asyncio.create_task(receiver.receive(handle)) for _ in range(2))
        assert torch.equal(await first, pattern(0, 3))
        with pytest.raises(AlreadyTakenError):
            await second
        with pytest.raises(AlreadyTakenError):
            receiver.receive_nowait(handle)


@pytest.mark.promise(29)
async def test_the_error_of_a_cancelled_copy_keeps_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    copying, go_on = threading.Event(), threading.Event()

    def slow_copy(tensor: torch.Tensor) -> torch.Tensor:
        copying.set()
        go_on.wait()
        return tensor.clone()

    monkeypatch.setattr(receiver_module, "own_copy", slow_copy)
    gc.disable()  # nor may the block wait for a collection
    try:
        async with pair() as (sender, receiver):
            handle = await sender.send(pattern(1, BIG))
            receiving = asyncio.create_task(receiver.receive(handle, copy=True))
            await asyncio.to_thread(copying.wait)
            receiving.cancel()
            await asyncio.wait([receiving])
            go_on.set()
            tensor = await receiver.receive(handle)
            del tensor
            async with asyncio.timeout(10):
                await settled(sender)
            assert receiving.cancelled()  # keeps the task alive, and with it the error
    finally:
        gc.enable()


async def test_a_copy_has_its_own_memory_and_releases_the_lease_immediately() -> None:
    async with pair() as (sender, receiver):
        source = torch.randn(1000, 50, requires_grad=True)
        received = await receiver.receive(await sender.send(source), copy=True)
        await settled(sender)  # while the copy lives
        assert torch.equal(received, source)
        assert received.requires_grad
        parameter = torch.nn.Parameter(torch.randn(1000, 50))
        assert isinstance(await receiver.receive(await sender.send(parameter), copy=True), torch.nn.Parameter)


async def test_iteration_delivers_whole_messages_and_skips_awaited_tensors() -> None:
    async with pair() as (sender, receiver):
        awaited = TensorHandle(sender.id, 1, 0, "int64", (2,), "cpu")
        waiting = asyncio.create_task(receiver.receive(awaited))
        await until(lambda: receiver.statistics().waiting == 1)
        async with sender.message() as message:
            await message.send(pattern(0, 1))
            await message.send(pattern(1, BIG))
            assert await sender.send(pattern(2, 2)) == awaited  # whole before the first one
        last = await sender.send(pattern(3, 3))
        seen = []
        async for delivery in receiver:
            assert isinstance(delivery, Delivery)
            assert torch.equal(delivery.tensor, pattern(int(delivery.tensor[0]), delivery.tensor.numel()))
            seen.append(delivery.handle)
            if delivery.handle == last:
                break
        assert [(handle.message, handle.tensor) for handle in seen] == [(0, 0), (0, 1), (2, 0)]
        assert torch.equal(await waiting, pattern(2, 2))


@pytest.mark.promise(12)
async def test_a_message_that_is_not_whole_cannot_be_taken() -> None:
    async with pair() as (sender, receiver):
        async with sender.message() as message:
            handle = await message.send(pattern(0, BIG))
            await until(lambda: receiver.statistics().unclaimed_tensors == 1)
            with pytest.raises(WouldBlockError, match="has not arrived"):
                receiver.receive_nowait(handle)
        assert torch.equal(await receiver.receive(handle), pattern(0, BIG))
        handle = await sender.send(pattern(1, BIG))
        await until(lambda: receiver.statistics().unclaimed_tensors == 1)
        assert torch.equal(receiver.receive_nowait(handle), pattern(1, BIG))


@once
@pytest.mark.promise(16)
async def test_a_message_discarded_before_it_arrives_is_dropped_when_it_does() -> None:
    queue = TensorQueue()
    async with TensorReceiver(queue) as receiver:
        sender = TensorSender(queue, max_concurrent_videos=1)
        handle = TensorHandle(sender.id, 0, 0, "int64", (BIG,), "cpu")
        receiver.discard(handle)
        async with sender:
            assert await sender.send(pattern(0, BIG)) == handle
            await settled(sender)
            assert sender.statistics().messages_discarded == 1
            with pytest.raises(DiscardedError):
                await receiver.receive(handle)
            assert torch.equal(await receiver.receive(await sender.send(pattern(1, 1))), pattern(1, 1))


@pytest.mark.promise(14, 26)
@pytest.mark.parametrize(
    ("limit", "enough_for_one"),
    [("max_senders", 1), ("max_mapped_bytes", 1 << 30), ("max_unclaimed_messages", 8)],
)
async def test_a_sender_beyond_a_limit_over_all_senders_is_refused(limit: str, enough_for_one: int) -> None:
    with endpoint() as place:
        async with (
            TensorReceiver(place, **_one(limit, enough_for_one)) as receiver,
            TensorSender(place) as first,
            AsyncExitStack() as later,
        ):
            await receiver.receive(await first.send(pattern(0, 3)))
            sender = TensorSender(place)
            beyond = TensorHandle(sender.id, 1, 0, "int64", (1,), "cpu")
            receiver.discard(TensorHandle(sender.id, 2, 0, "int64", (1,), "cpu"))  # it was reported before
            waiting = asyncio.create_task(receiver.receive(beyond))
            await asyncio.sleep(0)
            await later.enter_async_context(sender)
            calls: list[Awaitable[object]] = [waiting]
            if is_local():
                calls.append(receiver.receive(await sender.send(pattern(0, 3))))
            else:
                calls.append(sender.send(pattern(0, 3)))  # which waits until it is admitted
            for call in calls:
                with pytest.raises(RefusedError, match=limit) as caught:
                    await call
                assert caught.value.pid == os.getpid()
            with pytest.raises(RefusedError, match=f"refused this sender: .*{limit}=.*: raise {limit}"):
                await sender.ready()
            received = await receiver.receive(await first.send(pattern(1, BIG)))
            assert torch.equal(received, pattern(1, BIG))
            del received
            await settled(first)
            assert receiver.statistics().senders == 1
            refused = receiver.statistics().senders_refused
            await first.aclose()
            await until(lambda: receiver.statistics().senders == 0)
            async with TensorSender(place) as third:
                await third.ready()
            # There was capacity, but the refused sender has not connected again before its next call.
            assert receiver.statistics().senders_refused == refused > 0
            await until(lambda: receiver.statistics().senders == 0)
            assert torch.equal(await receiver.receive(await sender.send(pattern(2, BIG))), pattern(2, BIG))
            assert receiver.statistics().senders_lost == 0


@pytest.mark.promise(5)
async def test_memory_returns_when_the_last_view_is_freed_in_whatever_thread() -> None:
    async with pair() as (sender, receiver):
        cycle: list[Any] = [await receiver.receive(await sender.send(pattern(0, BIG)))]
        cycle.append(cycle)
        del cycle
        gc.collect()
        await settled(sender)
        holder: list[Any] = [await receiver.receive(await sender.send(pattern(0, BIG)))]
        holder.append(holder[0].numpy()[5:9])
        del holder[0]
        gc.collect()
        assert receiver.statistics().leases == 1
        thread = threading.Thread(target=holder.clear)
        thread.start()
        await asyncio.to_thread(thread.join)
        await settled(sender)
        assert receiver.statistics().leases == 0
        assert receiver.statistics().peak_leased_bytes == BIG * 8


@once
async def test_copies_and_errors_are_counted_and_cancelling_is_no_error() -> None:
    async with pair() as (sender, receiver):
        for count in (3, BIG):
            handle = await sender.send(pattern(0, count))
            assert torch.equal(await receiver.receive(handle, copy=True), pattern(0, count))
            handle = await sender.send(pattern(0, count))
            await receiver.receive(handle)
        now = receiver.statistics()
        assert (now.tensors_taken, now.tensors_copied, now.bytes_copied) == (4, 2, (3 + BIG) * 8)
        handle = await sender.send(pattern(0, 3))
        await receiver.receive(handle)
        for call in (receiver.receive, receiver.arrived):
            with pytest.raises(AlreadyTakenError):
                await call(handle)
        with pytest.raises(AlreadyTakenError):
            receiver.receive_nowait(handle)
        with pytest.raises(WouldBlockError):
            receiver.receive_nowait(beyond(handle))
        waiting = asyncio.create_task(receiver.receive(beyond(handle)))
        await until(lambda: receiver.statistics().waiting == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        with pytest.raises(TypeError):
            await receiver.receive("a name")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            receiver.discard("a name")  # type: ignore[arg-type]
    with pytest.raises(StopAsyncIteration):  # which is no error
        await anext(receiver)
    assert receiver.statistics().errors == {"AlreadyTakenError": 3, "WouldBlockError": 1, "other": 2}


# Thousands of tensors that are freed at once: the work is divided over many iterations.

MESSAGES, TENSORS = 10, 300
ALL = MESSAGES * TENSORS
NBYTES = 16 << 10  # too large for a frame, so each has a block


async def _send_all(senders: list[TensorSender], receiver: TensorReceiver) -> list[torch.Tensor]:
    handles: list[TensorHandle] = []
    for number in range(MESSAGES):
        async with senders[number % len(senders)].message() as message:
            handles += [await message.send(torch.zeros(NBYTES, dtype=torch.uint8)) for _ in range(TENSORS)]
    return [await receiver.receive(handle) for handle in handles]


@pytest.mark.parametrize("count", [1, MESSAGES])
async def test_many_freed_tensors_are_released_over_many_iterations(count: int) -> None:
    async with AsyncExitStack() as stack:
        place = stack.enter_context(endpoint())
        receiver = await stack.enter_async_context(TensorReceiver(place))
        senders = [await stack.enter_async_context(TensorSender(place, MESSAGES)) for _ in range(count)]
        for sender in senders:
            await sender.ready()
        tensors = await _send_all(senders, receiver)
        assert receiver.statistics().leases == ALL

        with (
            Changes(lambda: receiver.statistics().leases) as leases,
            Changes(lambda: sum(one.statistics().bytes_in_use for one in senders) // NBYTES) as blocks,
        ):
            tensors.clear()
            for sender in senders:
                await settled(sender)

        assert 0 < leases.most < ALL // 5
        assert 0 < blocks.most < ALL // 5 or count > 1  # each sender releases its own in an iteration

        tensors = await _send_all(senders, receiver)
        while tensors:
            del tensors[-97:]  # while earlier ones are released
            await asyncio.sleep(0)
        for sender in senders:
            await settled(sender)
        assert receiver.statistics().leases == 0
