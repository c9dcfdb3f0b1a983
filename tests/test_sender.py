"""Sending: backpressure, cancellation, and the release of all resources."""

import asyncio
import errno
import gc
import itertools
import os
import socket
from collections.abc import Callable
from typing import Any

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
from tests.pairs import endpoint, on_one_machine, pair
from tests.runtime.test_affinity import forks, in_a_fork
from verification.patterns import BIG, pattern
from verification.processes import watch
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")

once = pytest.mark.parametrize("link", ["unix"], indirect=True)  # the link makes no difference


@pytest.mark.promise(14)
async def test_untaken_messages_never_exceed_max_concurrent_videos() -> None:
    async with pair(max_concurrent_videos=3) as (sender, receiver):
        sending = [asyncio.create_task(sender.send(pattern(seed, BIG // 10))) for seed in range(20)]
        await until(lambda: sender.statistics().waiting == 17)
        # The receiver has three by now: arrival alone returns no permit.
        await until(lambda: receiver.statistics().unclaimed_tensors == 3)
        assert sum(send.done() for send in sending) == 3
        for seed, send in enumerate(sending):
            assert torch.equal(await receiver.receive(await send), pattern(seed, BIG // 10))
            assert receiver.statistics().unclaimed_tensors <= 3
        assert sender.statistics().peak_in_flight == 3


@pytest.mark.promise(14)
@on_one_machine
async def test_shared_memory_never_exceeds_arena_bytes() -> None:
    arena_bytes, elements = 5 << 20, (1 << 20) // 8
    async with pair(max_concurrent_videos=64, arena_bytes=arena_bytes) as (sender, receiver):
        sending = [asyncio.create_task(sender.send(pattern(seed, elements))) for seed in range(20)]
        await until(lambda: sum(send.done() for send in sending) == 5)
        view = (await receiver.receive(await sending[0]))[10:20]
        gc.collect()
        await receiver.receive(await sender.send(pattern(0, 3)))  # an inline tensor needs none
        with pytest.raises(WouldBlockError, match="not enough shared memory") as caught:
            sender.send_nowait(pattern(0, elements))
        found = caught.value.bytes
        assert (found.limit, found.in_use, found.requested) == (arena_bytes, arena_bytes, 1 << 20)
        assert sum(send.done() for send in sending) == 5  # taken, but not freed: the view pins it
        assert torch.equal(view, pattern(0, elements)[10:20])
        del view
        for seed, send in list(enumerate(sending))[1:]:
            assert torch.equal(await receiver.receive(await send), pattern(seed, elements))
        await settled(sender)
        assert sender.statistics().peak_bytes_in_use == arena_bytes
        assert 0 < watch.memfd_bytes(os.getpid()) <= arena_bytes


@pytest.mark.promise(15)
async def test_waiting_sends_arrive_in_the_order_of_their_calls_without_the_cancelled_ones() -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):
        sending = [asyncio.create_task(sender.send(pattern(seed, 10))) for seed in range(8)]
        await until(lambda: sender.statistics().waiting == 7)
        for number in (2, 5):
            sending[number].cancel()
        taken = [int((await anext(receiver)).tensor[0]) for _ in range(6)]
        assert taken == [int(pattern(seed, 1)[0]) for seed in (0, 1, 3, 4, 6, 7)]
        assert [send.cancelled() for send in sending] == [seed in (2, 5) for seed in range(8)]
        await settled(sender)


@pytest.mark.promise(16)
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


@pytest.mark.promise(15)
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


@pytest.mark.promise(8)
async def test_sending_a_slice_transfers_only_its_own_bytes() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):  # the whole would never fit
        whole = pattern(0, BIG * 10)
        received = await receiver.receive(await sender.send(whole[BIG : 2 * BIG]))
        assert torch.equal(received, whole[BIG : 2 * BIG])
        assert received.untyped_storage().nbytes() == BIG * 8
        assert sender.statistics().bytes_in_use == BIG * 8


@pytest.mark.promise(11)
async def test_a_failed_send_releases_everything_and_leaves_its_message_and_the_connection_usable() -> None:
    async with pair(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, receiver):
        for wrong, error in (
            (torch.zeros(3).to_sparse(), UnsupportedTensorError),
            (torch.ones(3, requires_grad=True) * 2, UnsupportedTensorError),
            (pattern(0, BIG + 1), TooLargeError),
        ):
            with pytest.raises(error):
                await sender.send(wrong)
            for call in (sender.send_nowait, sender.post):
                with pytest.raises(error):
                    call(wrong)
            statistics = sender.statistics()
            assert (statistics.in_flight, statistics.bytes_in_use, statistics.waiting) == (0, 0, 0)
            async with sender.message() as message:
                with pytest.raises(error):
                    await message.send(wrong)
                handle = await message.send(pattern(1, BIG))
            assert handle.tensor == 0
            assert torch.equal(await receiver.receive(handle), pattern(1, BIG))
            await settled(sender)


@once
async def test_leaving_a_message_with_a_pending_send_raises_usage_error() -> None:
    async with pair() as (sender, _):
        with pytest.raises(UsageError, match="not awaited"):
            async with sender.message() as message:
                sending = asyncio.create_task(message.send(torch.zeros(4 << 20, dtype=torch.uint8)))
                await asyncio.sleep(0)
        with pytest.raises(DiscardedError):
            await sending
        await settled(sender)


@once
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
    wrong: tuple[dict[str, Any], ...] = (
        {"keep_warm_s": 0},
        {"long_wait_s": -1},
        {"max_wait_s": float("nan")},
    )
    for seconds in wrong:
        with pytest.raises(ValueError, match="positive, or None"):
            TensorSender(queue, **seconds)
    async with pair() as (sender, _):
        with pytest.raises(TypeError, match="numpy array"):
            await sender.send([1, 2, 3])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="belongs to sender"):
            sender.discard(TensorHandle("0" * 32, 0, 0, "uint8", (), "cpu"))
        sender.discard(TensorHandle(sender.id, 99, 0, "uint8", (), "cpu"))  # never sent: nothing to drop
        assert sender.statistics().in_flight == 0


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


@pytest.mark.promise(22)
@pytest.mark.both_loops
async def test_both_ends_are_opened_in_one_task_and_closed_in_another() -> None:
    with endpoint() as place:
        receiver, sender = TensorReceiver(place), TensorSender(place)
        await asyncio.create_task(receiver.__aenter__())
        await asyncio.create_task(sender.__aenter__())
        handle = await asyncio.create_task(sender.send(pattern(0, BIG)))
        received = await asyncio.create_task(receiver.receive(handle))
        assert torch.equal(received, pattern(0, BIG))
        del received
        await asyncio.create_task(sender.aclose())
        await asyncio.create_task(receiver.aclose())


def _uses(sender: TensorSender, receiver: TensorReceiver, handle: TensorHandle) -> list[Callable[[], object]]:
    """Use both objects in all ways; coroutines run up to their first wait."""
    return [
        lambda: sender.send_nowait(torch.ones(3)),
        lambda: sender.post(torch.ones(3)),
        lambda: sender.send(torch.ones(3)).send(None),
        lambda: sender.allocate((3,), torch.uint8).send(None),
        lambda: sender.ready().send(None),
        lambda: sender.drain().send(None),
        lambda: sender.aclose().send(None),
        lambda: sender.discard(handle),
        sender.discard_all,
        sender.message,
        sender.statistics,
        lambda: receiver.receive_nowait(handle),
        lambda: receiver.receive(handle).send(None),
        lambda: receiver.__anext__().send(None),
        lambda: receiver.aclose().send(None),
        lambda: receiver.discard(handle),
        receiver.statistics,
    ]


@pytest.mark.promise(23)
async def test_every_use_in_another_thread_or_loop_raises_at_once() -> None:
    async def use_there(use: Callable[[], object]) -> None:
        use()

    async with pair() as (sender, receiver):
        handle = await sender.send(pattern(0, 3))
        for use in _uses(sender, receiver, handle):
            with pytest.raises(UsageError, match="another thread"):
                await asyncio.to_thread(use)
            with pytest.raises(UsageError, match="another thread"):
                await asyncio.to_thread(lambda: asyncio.run(use_there(use)))  # noqa: B023
        assert torch.equal(await receiver.receive(handle), pattern(0, 3))


@pytest.mark.promise(23)
@forks
async def test_every_use_in_a_forked_child_raises_at_once() -> None:
    async with pair() as (sender, receiver):
        handle = await sender.send(pattern(1, BIG))

        def use_all() -> None:
            for use in _uses(sender, receiver, handle):
                with pytest.raises(UsageError, match="fork"):
                    use()

        assert in_a_fork(use_all) == "nothing was raised"
        assert torch.equal(await receiver.receive(handle), pattern(1, BIG))


@once
async def test_a_message_is_begun_once_and_used_while_it_is_open() -> None:
    async with TensorSender(TensorQueue()) as sender:
        with pytest.raises(UsageError, match="not begun yet"):
            await sender.message().send(pattern(0, 1))
        async with sender.message() as message:
            with pytest.raises(UsageError, match="already begun"):
                await message.__aenter__()
        with pytest.raises(DiscardedError, match="has ended"):
            await message.send(pattern(0, 1))


async def test_statistics_count_messages_tensors_bytes_and_copies_into_shared_memory() -> None:
    async with pair() as (sender, receiver):
        await receiver.receive(await sender.send(pattern(0, 3)))  # rides in the frame
        allocated = await sender.allocate((BIG,), torch.int64)
        await receiver.receive(await sender.send(allocated))
        assert (sender.statistics().tensors_copied, sender.statistics().bytes_copied) == (0, 0)
        await receiver.receive(await sender.send(pattern(0, BIG)))
        await receiver.receive(sender.send_nowait(pattern(0, BIG)))
        async with sender.message() as message:
            await message.send(pattern(0, BIG // 2))
            await message.send(pattern(0, 3))
        sender.discard(await sender.send(pattern(0, 4)))
        found = sender.statistics()
        assert (found.messages_sent, found.tensors_sent, found.messages_discarded) == (6, 7, 1)
        assert found.bytes_sent == (BIG * 7 // 2 + 3 + 3 + 4) * 8
        assert (found.tensors_copied, found.bytes_copied) == (3, BIG * 8 * 5 // 2)


@once
async def test_errors_are_counted_by_their_type_and_cancelling_is_none() -> None:
    async with pair(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, _):
        await sender.ready()
        with pytest.raises(UnsupportedTensorError):
            await sender.send(torch.eye(3).to_sparse())
        with pytest.raises(UnsupportedTensorError):
            sender.send_nowait(torch.eye(3).to_sparse())
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
            sender.discard(TensorHandle("another", 0, 0, "int64", (3,), "cpu"))
        with pytest.raises(DiscardedError):
            await message.send(pattern(0, 3))
        with pytest.raises(UsageError):
            await message.__aenter__()
    with pytest.raises(ClosedError):
        await sender.drain()
    for call in (sender.message, sender.discard_all):
        with pytest.raises(ClosedError):
            call()
    assert sender.statistics().errors == {
        "UnsupportedTensorError": 2,
        "TooLargeError": 1,
        "other": 2,
        "WouldBlockError": 1,
        "DiscardedError": 1,
        "UsageError": 1,
        "ClosedError": 3,
    }


@pytest.mark.promise(11)
@on_one_machine
async def test_running_out_of_memory_raises_os_error_and_releases_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for call, allocates in itertools.product(("memfd_create", "ftruncate", "posix_fallocate"), (False, True)):
        async with pair(max_concurrent_videos=1) as (sender, receiver):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, refuse)
                with pytest.raises(OSError, match="No space left"):
                    if allocates:
                        await sender.allocate((BIG,), torch.int64)
                    else:
                        await sender.send(pattern(0, BIG))
            await settled(sender)
            assert torch.equal(await receiver.receive(await sender.send(pattern(1, BIG))), pattern(1, BIG))


@once
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
