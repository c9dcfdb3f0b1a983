"""Sending: backpressure, cancellation, and the release of all resources."""

import asyncio
import errno
import gc
import os
import socket
from typing import Any

import numpy as np
import pytest
import torch

from aiotensor import (
    ClosedError,
    DiscardedError,
    TensorHandle,
    TensorQueue,
    TensorReceiver,
    TensorSender,
    TooLargeError,
    UnsupportedTensorError,
    UsageError,
    WouldBlockError,
)
from aiotensor.protocol.frames import MAX_TENSORS
from aiotensor.transports.endpoints import Endpoint
from tests.cancellation.situations import HeldUp
from tests.pairs import endpoint, on_one_machine, pair
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")


async def test_send_waits_for_a_permit_until_a_message_is_taken() -> None:
    async with pair(max_concurrent_videos=2) as (sender, receiver):
        first = await sender.send(pattern(1, BIG))
        await sender.send(pattern(2, 5))
        third = asyncio.create_task(sender.send(pattern(3, 5)))
        await until(lambda: sender.statistics().waiting == 1)
        # The receiver has both by now: arrival alone returns no permit.
        await until(lambda: receiver.statistics().unclaimed_tensors == 2)
        assert not third.done()
        await receiver.receive(first)
        assert torch.equal(await receiver.receive(await third), pattern(3, 5))
        assert sender.statistics().peak_in_flight == 2


@pytest.mark.parametrize("by", ["sender", "receiver"])
async def test_a_discarded_message_releases_its_permit(by: str) -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        first = await sender.send(pattern(1, BIG))
        second = asyncio.create_task(sender.send(pattern(2, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        (sender if by == "sender" else receiver).discard(first)
        assert torch.equal(await receiver.receive(await second), pattern(2, BIG))
        with pytest.raises(DiscardedError):
            await receiver.receive(first)
        assert sender.statistics().messages_discarded == 1
        await settled(sender)


async def test_discard_all_discards_sent_and_open_messages_but_not_taken_ones() -> None:
    async with pair(max_concurrent_videos=4) as (sender, receiver):
        taken = await receiver.receive(await sender.send(pattern(1, BIG)))
        await sender.drain()
        waiting = await sender.send(pattern(2, BIG))
        with pytest.raises(DiscardedError):
            async with sender.message() as message:
                await message.send(pattern(3, BIG))
                assert sender.discard_all() == 2
                await message.send(pattern(4, BIG))
        assert sender.statistics().in_flight == sender.discard_all() == 0
        await until(lambda: receiver.statistics().messages_discarded == 2)
        with pytest.raises(DiscardedError):
            await receiver.receive(waiting)
        assert torch.equal(taken, pattern(1, BIG))
        assert torch.equal(await receiver.receive(await sender.send(pattern(5, 5))), pattern(5, 5))
        assert sender.statistics().messages_discarded == 2


async def test_send_waits_for_shared_memory_until_the_last_view_is_freed() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):
        tensor = await receiver.receive(await sender.send(pattern(1, BIG)))
        view = tensor[10:20]
        waiting = asyncio.create_task(sender.send(pattern(2, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        await sender.send(pattern(0, 3))  # an inline tensor needs none
        del tensor
        gc.collect()
        assert sender.statistics().waiting == 1  # the view pins it
        assert torch.equal(view, pattern(1, BIG)[10:20])
        del view
        assert torch.equal(await receiver.receive(await waiting), pattern(2, BIG))
        assert sender.statistics().peak_bytes_in_use == BIG * 8


async def test_waits_for_memory_are_granted_in_order_without_starving_large_ones() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):
        held = await receiver.receive(await sender.send(pattern(0, BIG // 2)))
        big = asyncio.create_task(sender.send(pattern(1, BIG)))
        await until(lambda: sender.statistics().waiting == 1)
        small = asyncio.create_task(sender.send(pattern(2, BIG // 4)))  # would fit at once
        await until(lambda: sender.statistics().waiting == 2)
        assert not small.done()
        del held
        tensor = await receiver.receive(await big)
        assert not small.done()
        del tensor
        await receiver.receive(await small)


@pytest.mark.parametrize("count", [5, BIG])
async def test_the_callers_tensor_is_neither_moved_nor_read_after_send(count: int) -> None:
    async with pair() as (sender, receiver):
        array = np.arange(count)
        tensor = torch.from_numpy(array)
        address = tensor.data_ptr()
        handle = await sender.send(tensor)
        assert tensor.data_ptr() == address
        assert not tensor.is_shared()  # type: ignore[no-untyped-call]
        array[:] = -1
        assert tensor[0] == -1
        assert torch.equal(await receiver.receive(handle), torch.arange(count))


async def test_sending_a_slice_transfers_only_its_own_bytes() -> None:
    async with pair() as (sender, receiver):
        whole = pattern(0, BIG * 10)
        received = await receiver.receive(await sender.send(whole[BIG : 2 * BIG]))
        assert torch.equal(received, whole[BIG : 2 * BIG])
        assert received.untyped_storage().nbytes() == BIG * 8
        assert sender.statistics().bytes_in_use == BIG * 8


async def test_handles_name_sender_message_and_tensor() -> None:
    async with pair() as (sender, receiver):
        first = await sender.send(torch.zeros(2, 3, dtype=torch.bfloat16))
        async with sender.message() as message:
            handles = [await message.send(torch.zeros(())), await message.send(np.zeros(2, np.uint16))]
        assert first == TensorHandle(sender.id, 0, 0, "bfloat16", (2, 3), "cpu")
        assert handles == [
            TensorHandle(sender.id, 1, 0, "float32", (), "cpu"),
            TensorHandle(sender.id, 1, 1, "uint16", (2,), "cpu"),
        ]
        for handle in [first, *handles]:
            await receiver.receive(handle)


async def test_a_message_holds_one_permit_until_all_its_tensors_are_taken() -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        async with sender.message() as message:
            frames = await message.send(pattern(1, BIG))
            times = await message.send(pattern(2, 7))
        await receiver.receive(times)
        following = asyncio.create_task(sender.send(pattern(3, 1)))
        await until(lambda: sender.statistics().waiting == 1)
        await asyncio.sleep(0)
        assert not following.done()
        await receiver.receive(frames)
        await receiver.receive(await following)


async def test_an_exception_in_the_block_discards_the_message() -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        with pytest.raises(ZeroDivisionError):
            async with sender.message() as message:
                handle = await message.send(pattern(1, BIG))
                raise ZeroDivisionError
        with pytest.raises(DiscardedError):
            await receiver.receive(handle)
        await settled(sender)
        with pytest.raises(DiscardedError, match="has ended"):
            await message.send(pattern(1, 1))


async def test_a_failed_send_leaves_its_message_unchanged() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):
        async with sender.message() as message:
            with pytest.raises(UnsupportedTensorError):
                await message.send(torch.zeros(3).to_sparse())
            with pytest.raises(TooLargeError):
                await message.send(pattern(0, BIG + 1))
            handle = await message.send(pattern(1, BIG))
        assert handle.tensor == 0
        assert torch.equal(await receiver.receive(handle), pattern(1, BIG))


async def test_an_empty_message_returns_its_permit_and_sends_nothing() -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        async with sender.message():
            assert sender.statistics().in_flight == 1
        assert sender.statistics().in_flight == 0
        assert (await sender.send(pattern(0, 1))).message == 0
        assert receiver.statistics().messages_discarded == 0


async def test_leaving_a_message_with_a_pending_send_raises_usage_error() -> None:
    async with pair() as (sender, _):
        with pytest.raises(UsageError, match="not awaited"):
            async with sender.message() as message:
                sending = asyncio.create_task(message.send(torch.zeros(4 << 20, dtype=torch.uint8)))
                await asyncio.sleep(0)
        with pytest.raises(DiscardedError):
            await sending
        await settled(sender)


async def test_a_deadlock_of_two_messages_over_memory_is_detected() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):
        both_hold = asyncio.Barrier(2)

        async def send_two(seed: int) -> bool:
            try:
                async with sender.message() as message:
                    await message.send(pattern(seed, BIG // 2))
                    await both_hold.wait()
                    await message.send(pattern(seed, BIG // 2))
            except WouldBlockError as error:
                assert error.bytes.limit == error.bytes.in_use == BIG * 8  # noqa: PT017
                return False
            return True

        assert sorted(await asyncio.gather(send_two(1), send_two(2))) == [False, True]
        deliveries = [await anext(receiver), await anext(receiver)]
        assert {delivery.handle.message for delivery in deliveries} in ({0}, {1})


@on_one_machine
async def test_discarding_in_the_middle_of_a_copy_ends_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    held_up = HeldUp(monkeypatch)
    async with pair() as (sender, _):
        message = sender.message()
        await message.__aenter__()
        first = await message.send(pattern(0, 1))
        held_up.stop()
        sending = asyncio.create_task(message.send(torch.zeros(1 << 25, dtype=torch.uint8)))
        await until(held_up.is_copying)
        sender.discard(first)
        held_up.go_on()
        with pytest.raises(DiscardedError):
            await sending
        with pytest.raises(DiscardedError):
            await message.__aexit__(None, None, None)
        await settled(sender)


@pytest.mark.parametrize("count", [5, BIG])
async def test_send_nowait_without_a_free_permit_raises_would_block_error(count: int) -> None:
    async with pair(max_concurrent_videos=2, arena_bytes=BIG * 16) as (sender, receiver):
        first, second = sender.send_nowait(pattern(1, count)), sender.send_nowait(pattern(2, count))
        with pytest.raises(WouldBlockError, match="no permit") as caught:
            sender.send_nowait(pattern(3, count))
        assert (caught.value.messages.limit, caught.value.messages.in_use) == (2, 2)
        assert caught.value.messages.requested == 1
        for seed, handle in ((1, first), (2, second)):
            assert torch.equal(await receiver.receive(handle), pattern(seed, count))
        await settled(sender)


async def test_send_nowait_without_free_memory_raises_and_returns_its_permit() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):
        held = await receiver.receive(await sender.send(pattern(1, BIG)))
        await until(lambda: sender.statistics().in_flight == 0)
        with pytest.raises(WouldBlockError, match="not enough shared memory") as caught:
            sender.send_nowait(pattern(2, BIG))
        assert (caught.value.bytes.limit, caught.value.bytes.requested) == (BIG * 8, BIG * 8)
        assert sender.statistics().in_flight == 0
        del held


async def test_send_nowait_raises_while_the_receiver_is_slow_to_read() -> None:
    queue = TensorQueue()
    async with TensorSender(queue, max_concurrent_videos=10_000) as sender:
        sent = 0
        with pytest.raises(WouldBlockError, match="slow to read"):
            while True:
                sender.send_nowait(pattern(sent, 1000))
                sent += 1
        assert 1 < sent < 1000
        waiting = asyncio.create_task(sender.send(pattern(0, 1)))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        closing = asyncio.create_task(sender.aclose())  # waits for the link, and can be cancelled
        await asyncio.sleep(0)
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing


async def test_invalid_arguments_raise_errors_that_suggest_a_remedy() -> None:
    queue = TensorQueue()
    few: tuple[dict[str, Any], ...] = (
        {"max_concurrent_videos": 0},
        {"max_concurrent_videos": -1},
        {"arena_bytes": 0},
    )
    for limits in few:
        with pytest.raises(ValueError, match="at least 1"):
            TensorSender(queue, **limits)
    for limit in ("max_concurrent_videos", "arena_bytes"):
        with pytest.raises(ValueError, match=f"{limit} must be at most {2**63 - 1}, got {2**63}"):
            TensorSender(queue, **dict[str, Any]({limit: 2**63}))
    with pytest.raises(TypeError):
        TensorSender(queue, max_concurrent_videos=2.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TensorQueue"):
        TensorSender(5)  # type: ignore[arg-type]
    for address in ("udp://127.0.0.1:80", "unix://relative/path", "/run/socket", "unix:///run/"):
        with pytest.raises(ValueError, match=r"unix:///run|does not name a file"):
            TensorSender(address)
    with pytest.raises(ValueError, match="107 bytes"):
        TensorSender("unix:///" + "a" * 107)
    wrong: tuple[dict[str, Any], ...] = ({"keep_warm_s": 0}, {"long_wait_s": -1})
    for seconds in wrong:
        with pytest.raises(ValueError, match="positive, or None"):
            TensorSender(queue, **seconds)
    async with pair(arena_bytes=100) as (sender, _):
        with pytest.raises(TypeError, match="numpy array"):
            await sender.send([1, 2, 3])  # type: ignore[arg-type]
        with pytest.raises(TooLargeError, match="arena_bytes") as caught:
            await sender.allocate((101,), torch.uint8)
        assert (caught.value.limit, caught.value.requested) == (100, 101)
        with pytest.raises(ValueError, match="not be negative"):
            await sender.allocate((-1,), torch.uint8)
        with pytest.raises(TypeError, match=r"torch\.dtype"):
            await sender.allocate((1,), int)  # type: ignore[arg-type]
        with pytest.raises(UnsupportedTensorError):
            await sender.allocate((1,), torch.quint8)
        with pytest.raises(ValueError, match="belongs to sender"):
            sender.discard(TensorHandle("0" * 32, 0, 0, "uint8", (), "cpu"))
        sender.discard(TensorHandle(sender.id, 99, 0, "uint8", (), "cpu"))  # never sent: nothing to drop
        assert sender.statistics().in_flight == 0


async def test_closing_a_sender_fails_pending_and_later_calls() -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        handle = await sender.send(pattern(0, BIG))
        waiting = asyncio.create_task(sender.send(pattern(1, 1)))
        draining = asyncio.create_task(sender.drain())
        await until(lambda: sender.statistics().waiting == 1)
        await sender.aclose()
        await sender.aclose()
        for task in (waiting, draining):
            with pytest.raises(ClosedError):
                await task
        with pytest.raises(ClosedError):
            await sender.send(pattern(1, 1))
        with pytest.raises(ClosedError):
            sender.message()
        with pytest.raises(ClosedError):
            await sender.__aenter__()
        assert torch.equal(await receiver.receive(handle), pattern(0, BIG))
        assert sender.statistics().messages_sent == 1


async def test_closing_in_the_middle_of_a_copy_ends_the_send() -> None:
    async with pair() as (sender, receiver):
        sending = asyncio.create_task(sender.send(torch.zeros(1 << 26, dtype=torch.uint8)))
        await until(lambda: sender.statistics().bytes_in_use > 0)
        await sender.aclose()
        with pytest.raises(ClosedError):
            await sending
        assert sender.statistics().bytes_in_use == 0
        assert receiver.statistics().unclaimed_tensors == 0


async def test_drain_waits_for_messages_sent_before_the_call_only() -> None:
    async with pair() as (sender, receiver):
        await sender.drain()
        first, second = await sender.send(pattern(0, 1)), await sender.send(pattern(1, BIG))
        draining = asyncio.create_task(sender.drain())
        await asyncio.sleep(0)
        await sender.send(pattern(2, 1))
        await receiver.receive(first)
        receiver.discard(second)
        await draining
        assert sender.statistics().in_flight == 1


async def test_a_sender_is_opened_in_one_task_and_closed_in_another() -> None:
    with endpoint() as place:
        await _open_and_close_in_tasks(place)


async def _open_and_close_in_tasks(place: Endpoint) -> None:
    async with TensorReceiver(place) as receiver:
        sender = TensorSender(place)
        await asyncio.create_task(sender.__aenter__())
        handle = await asyncio.create_task(sender.send(pattern(0, BIG)))
        await asyncio.create_task(sender.aclose())
        assert torch.equal(await asyncio.create_task(receiver.receive(handle)), pattern(0, BIG))


async def test_using_an_unopened_sender_or_opening_it_twice_raises_usage_error() -> None:
    sender = TensorSender(TensorQueue())
    with pytest.raises(UsageError, match="not open yet"):
        await sender.send(pattern(0, 1))
    async with sender:
        with pytest.raises(UsageError, match="already open"):
            await sender.__aenter__()
        with pytest.raises(UsageError, match="not begun yet"):
            await sender.message().send(pattern(0, 1))
        async with sender.message() as message:
            with pytest.raises(UsageError, match="already begun"):
                await message.__aenter__()


async def test_entering_a_message_twice_raises_usage_error_and_loses_no_permit() -> None:
    async with pair(1) as (sender, receiver):
        first = await sender.send(pattern(0, 1))
        message = sender.message()
        entering = asyncio.ensure_future(message.__aenter__())
        await until(lambda: sender.statistics().waiting == 1)
        with pytest.raises(UsageError, match="already begun"):
            await message.__aenter__()
        await receiver.receive(first)
        await entering
        await message.__aexit__(None, None, None)
        assert sender.statistics().in_flight == 0


async def test_statistics_count_messages_tensors_and_bytes() -> None:
    async with pair() as (sender, receiver):
        await receiver.receive(await sender.send(pattern(0, BIG)))
        async with sender.message() as message:
            await message.send(pattern(0, 2))
            await message.send(pattern(0, 3))
        sender.discard(await sender.send(pattern(0, 4)))
        found = sender.statistics()
        assert (found.messages_sent, found.tensors_sent, found.messages_discarded) == (3, 4, 1)
        assert found.bytes_sent == (BIG + 2 + 3 + 4) * 8


@on_one_machine
@pytest.mark.parametrize("what", ["send", "allocate"])
@pytest.mark.parametrize("call", ["memfd_create", "ftruncate", "posix_fallocate"])
async def test_running_out_of_memory_raises_os_error_and_releases_everything(
    call: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with pair(max_concurrent_videos=1) as (sender, receiver):
        monkeypatch.setattr(os, call, refuse)
        with pytest.raises(OSError, match="No space left"):
            if what == "allocate":
                await sender.allocate((BIG,), torch.int64)
            else:
                await sender.send(pattern(0, BIG))
        monkeypatch.undo()
        await settled(sender)
        assert torch.equal(await receiver.receive(await sender.send(pattern(1, BIG))), pattern(1, BIG))


async def test_a_permit_granted_in_the_iteration_of_closing_is_released() -> None:
    async with pair(max_concurrent_videos=1) as (sender, _):
        first = await sender.send(pattern(0, 3))
        waiting = asyncio.create_task(sender.send(pattern(1, 3)))
        await until(lambda: sender.statistics().waiting == 1)
        sender.discard(first)
        await sender.aclose()
        with pytest.raises(ClosedError):
            await waiting
        assert sender.statistics().in_flight == 0


async def test_leaving_a_message_that_was_discarded_raises_discarded_error() -> None:
    async with pair() as (sender, receiver):
        with pytest.raises(DiscardedError):
            async with sender.message() as message:
                handle = await message.send(pattern(0, 3))
                await until(lambda: receiver.statistics().unclaimed_tensors == 1)
                receiver.discard(handle)
                await until(lambda: sender.statistics().in_flight == 0)


async def test_a_message_stays_usable_after_exceeding_its_limit_of_tensors() -> None:
    async with pair() as (sender, receiver):
        async with sender.message() as message:
            handles = [await message.send(pattern(0, 1)) for _ in range(MAX_TENSORS)]
            with pytest.raises(TooLargeError, match="stack small ones") as caught:
                await message.send(pattern(0, 1))
            assert (caught.value.limit, caught.value.requested) == (MAX_TENSORS, MAX_TENSORS + 1)
        assert torch.equal(await receiver.receive(handles[-1]), pattern(0, 1))


async def test_the_default_socket_timeout_of_the_application_has_no_effect() -> None:
    socket.setdefaulttimeout(0.001)
    try:
        async with pair() as (sender, receiver):
            await asyncio.to_thread(gc.collect)  # nothing arrives for longer than that
            assert torch.equal(await receiver.receive(await sender.send(pattern(0, BIG))), pattern(0, BIG))
    finally:
        socket.setdefaulttimeout(None)


async def test_two_waits_of_one_message_are_not_mistaken_for_a_deadlock() -> None:
    async with pair(max_concurrent_videos=2, arena_bytes=BIG * 8) as (sender, receiver):
        tensor = await sender.allocate((BIG,), torch.int64)
        tensor.copy_(pattern(1, BIG))
        async with sender.message() as waits_twice:
            parts = [asyncio.create_task(waits_twice.send(pattern(seed, BIG // 4))) for seed in (2, 3)]
            async with sender.message():  # it can continue, and release its permit
                await until(lambda: sender.statistics().waiting == 2)
                allocated = asyncio.create_task(sender.send(tensor))
                await until(lambda: sender.statistics().waiting == 3)
                await asyncio.sleep(0)
                assert not any(part.done() for part in parts)
            received = await receiver.receive(await allocated)
            assert torch.equal(received, tensor)
            del tensor, received, allocated
            handles = await asyncio.gather(*parts)
        for handle in handles:
            await receiver.receive(handle)


@pytest.mark.parametrize("what", ["a permit", "800000 bytes of shared memory"])
async def test_a_long_wait_is_logged_once_and_its_holders_are_in_the_statistics(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    permits = 1 if what == "a permit" else 2
    with endpoint() as place:
        async with (
            TensorReceiver(place) as receiver,
            TensorSender(place, permits, BIG * 8, long_wait_s=0.01) as sender,
        ):
            held = await sender.send(pattern(0, BIG))
            await until(lambda: sender.receiver_id is not None)
            waiting = asyncio.create_task(sender.send(pattern(1, BIG)))
            await until(lambda: "has waited" in caplog.text)
            assert sender.statistics().longest_wait_s > 0
            holder = sender.statistics().holders[0]
            assert (holder.message, holder.state, holder.bytes) == (0, "waiting to be taken", BIG * 8)
            assert holder.seconds > 0
            await asyncio.sleep(0.03)  # no second line comes
            assert caplog.text.count("has waited") == 1
            assert f"for {what}; receiver: pid {os.getpid()}; held by: message 0" in caplog.text
            await receiver.receive(held)
            gc.collect()
            await receiver.receive(await waiting)
            assert sender.statistics().longest_wait_s == 0
