"""Cancelling a send, a message, an allocation or a wait for a copy releases everything it acquired."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import pytest
import torch

from aiotensor import DiscardedError, TensorHandle, TensorReceiver, TensorSender
from tests.cancellation.situations import SLOW, HeldUp, clog, held_back, in_line, strided, unread
from tests.cancelling import Attempt, Way, cancel_everywhere
from tests.pairs import at_once, endpoint, is_local, on_one_machine, pair
from verification.internals import memory_of, worker_of
from verification.patterns import BIG, pattern
from verification.waiting import settled

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")


async def _plain(sender: TensorSender, count: int) -> torch.Tensor:
    return pattern(1, count)


async def _allocated(sender: TensorSender, count: int) -> torch.Tensor:
    tensor = await sender.allocate((count,), torch.int64)
    return tensor.copy_(pattern(1, count))


Source = Callable[[TensorSender, int], Awaitable[torch.Tensor]]


def _freeing(sender: TensorSender, held: list[torch.Tensor]) -> Callable[[], None]:
    """Return a function that frees tensors, and their memory in this iteration of the loop."""

    def free() -> None:
        held.clear()
        memory_of(sender).freed.collect_all()

    return free


# Nothing to wait for


@on_one_machine
async def test_calls_with_free_resources_do_not_suspend() -> None:
    async with pair() as (sender, receiver):

        async def send(attempt: Attempt, source: Source, count: int) -> None:
            sending = attempt.start(sender.send(await source(sender, count)))
            assert await sending.completed()
            assert torch.equal(await receiver.receive(sending.value), pattern(1, count))

        for source in (_plain, _allocated):
            for count in (3, BIG):
                assert not await cancel_everywhere(
                    lambda attempt: send(attempt, source, count),  # noqa: B023
                    sender,
                    receiver,
                )

        async def allocate(attempt: Attempt) -> None:
            allocating = attempt.start(sender.allocate((BIG,), torch.int64))
            assert await allocating.completed()
            allocating.value.fill_(7)

        assert not await cancel_everywhere(allocate, sender, receiver)

        async def leave(attempt: Attempt, error: Exception | None) -> None:
            message = await sender.message().__aenter__()
            handle = await message.send(pattern(0, BIG))
            await attempt.start(message.__aexit__(type(error) if error else None, error, None)).completed()
            if error is None:
                assert torch.equal(await receiver.receive(handle), pattern(0, BIG))

        for error in (None, ZeroDivisionError()):
            assert not await cancel_everywhere(
                lambda attempt: leave(attempt, error),  # noqa: B023
                sender,
                receiver,
            )


# Sends


@pytest.mark.promise(21)
@pytest.mark.parametrize("count", [SLOW, 5 << 17])  # of one thread, and of two
async def test_a_send_cancelled_around_its_copy_leaves_nothing(count: int) -> None:
    async with pair(max_concurrent_videos=1, arena_bytes=count * 8) as (sender, receiver):
        source = pattern(1, count)
        await receiver.receive(await sender.send(source))  # the threads exist

        async def attempt(attempt: Attempt) -> None:
            sending = attempt.start(sender.send(source))
            if await sending.completed():
                assert torch.equal(await receiver.receive(sending.value), source)

        assert await cancel_everywhere(attempt, sender, receiver)


@on_one_machine
async def test_a_send_cancelled_during_its_copy_releases_the_permit_before_the_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_up = HeldUp(monkeypatch)
    async with pair(max_concurrent_videos=1, arena_bytes=SLOW * 8) as (sender, receiver):
        source = pattern(1, SLOW)

        async def attempt(attempt: Attempt) -> None:
            before = await sender.send(pattern(0, 3))
            await receiver.receive(before)
            await settled(sender)
            held_up.stop()
            sending = attempt.start(sender.send(source))
            await sending.until(held_up.is_copying)

            def go_on() -> None:
                if attempt.plan.way is Way.WHILE_WAITING and sending.cancels:
                    assert sender.statistics().in_flight == 0
                    assert sender.statistics().bytes_in_use == SLOW * 8
                held_up.go_on()

            await sending.bring(go_on)
            completed = await sending.completed()
            if completed:
                assert torch.equal(await receiver.receive(sending.value), source)
            # The receiver has no record of a cancelled one.
            after = await sender.send(pattern(2, 3))
            assert after.message == before.message + 1 + completed
            await receiver.receive(after)

        assert await cancel_everywhere(attempt, sender, receiver)


@pytest.mark.promise(15)
@on_one_machine
@pytest.mark.parametrize(("source", "count"), [(_plain, 3), (_plain, SLOW), (_allocated, BIG)])
async def test_a_send_cancelled_while_it_waits_for_a_permit_does_not_block_the_next(
    source: Source, count: int
) -> None:
    async with pair(max_concurrent_videos=1, arena_bytes=SLOW * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            held = await sender.send(pattern(0, 3))
            tensor = await source(sender, count)
            sending = attempt.start(sender.send(tensor))
            await sending.until(lambda: sender.statistics().waiting == 1)
            behind = await in_line(sender, sender.send(pattern(2, 5)))
            await sending.bring(lambda: sender.discard(held))
            if await sending.completed():
                assert not behind.done()
                assert torch.equal(await receiver.receive(sending.value), pattern(1, count))
            assert torch.equal(await receiver.receive(await behind), pattern(2, 5))

        assert await cancel_everywhere(attempt, sender, receiver)


@on_one_machine
@pytest.mark.parametrize("count", [BIG, SLOW])
async def test_a_send_cancelled_while_it_waits_for_bytes_does_not_block_the_next(count: int) -> None:
    async with pair(max_concurrent_videos=2, arena_bytes=count * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            held = [await sender.allocate((count,), torch.int64)]
            sending = attempt.start(sender.send(pattern(1, count)))
            await sending.until(lambda: sender.statistics().waiting == 1)
            behind = await in_line(sender, sender.send(pattern(2, count - 1)))
            await sending.bring(_freeing(sender, held))
            if await sending.completed():
                assert not behind.done()
                assert torch.equal(await receiver.receive(sending.value), pattern(1, count))
            assert torch.equal(await receiver.receive(await behind), pattern(2, count - 1))

        assert await cancel_everywhere(attempt, sender, receiver)


async def test_a_send_cancelled_before_its_receiver_connects_is_not_received() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            receiver = TensorReceiver(place)
            opening: list[asyncio.Task[TensorReceiver]] = []
            async with TensorSender(place, max_concurrent_videos=1) as sender:
                sending = attempt.start(sender.send(pattern(1, BIG)))
                await sending.bring(lambda: opening.append(asyncio.create_task(receiver.__aenter__())))
                await opening[0]
                if await sending.completed():
                    assert torch.equal(await receiver.receive(sending.value), pattern(1, BIG))
                assert torch.equal(await receiver.receive(await sender.send(pattern(2, 5))), pattern(2, 5))
                assert receiver.statistics().unclaimed_tensors == 0
                await settled(sender)
            await receiver.aclose()

    assert await cancel_everywhere(attempt)


@at_once
async def test_a_send_cancelled_while_the_link_is_full_is_not_sent_later() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place, unread(place) as far:
            async with TensorSender(place, max_concurrent_videos=1000) as sender:
                in_flight = clog(sender)
                sending = attempt.start(sender.send(pattern(1, 3)))
                behind = asyncio.create_task(sender.send(pattern(2, 3)))
                await sending.bring(far.read)
                completed = await sending.completed()
                assert (await behind).message == in_flight + completed
                assert sender.statistics().in_flight == in_flight + completed + 1

    assert await cancel_everywhere(attempt)


@at_once
async def test_a_copied_send_cancelled_while_the_link_is_full_releases_its_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_up = HeldUp(monkeypatch)

    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place, unread(place) as far:
            async with TensorSender(place, max_concurrent_videos=1000) as sender:
                held_up.stop()
                sending = attempt.start(sender.send(pattern(1, SLOW)))
                await sending.until(held_up.is_copying)
                in_flight = clog(sender)
                held_up.go_on()
                await sending.until(lambda: sending.suspensions == 2)
                await sending.bring(far.read)
                completed = await sending.completed()
                await worker_of(sender).settle()
                seen = sender.statistics()
                assert seen.in_flight == in_flight + completed
                assert seen.bytes_in_use == SLOW * 8 * completed

    found = await cancel_everywhere(attempt)
    assert found[Way.WITH_RESULT] == 2


# Messages of several tensors


@on_one_machine
async def test_a_message_cancelled_while_it_waits_for_a_permit_can_be_begun_again() -> None:
    async with pair(max_concurrent_videos=1) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            held = await sender.send(pattern(0, 3))
            message = sender.message()
            beginning = attempt.start(message.__aenter__())
            await beginning.until(lambda: sender.statistics().waiting == 1)
            behind = await in_line(sender, sender.send(pattern(2, 5)))
            await beginning.bring(lambda: sender.discard(held))
            if await beginning.completed():
                assert not behind.done()
                await message.__aexit__(None, None, None)  # an empty one gives its permit back
                assert torch.equal(await receiver.receive(await behind), pattern(2, 5))
                return
            assert torch.equal(await receiver.receive(await behind), pattern(2, 5))
            async with message:
                handle = await message.send(pattern(3, 7))
            assert torch.equal(await receiver.receive(handle), pattern(3, 7))

        assert await cancel_everywhere(attempt, sender, receiver)


async def test_a_cancelled_send_in_a_message_does_not_affect_the_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_up = HeldUp(monkeypatch)
    async with pair(max_concurrent_videos=1, arena_bytes=SLOW * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            async with sender.message() as message:
                handles = [(await message.send(pattern(0, 3)), pattern(0, 3))]
                held = [await sender.allocate((SLOW,), torch.int64)]
                held_up.stop()
                sending = attempt.start(message.send(pattern(1, SLOW)))
                await sending.until(lambda: sender.statistics().waiting == 1)
                await sending.bring(held.clear)
                await sending.until(held_up.is_copying)
                held_up.go_on()
                if await sending.completed():
                    handles.append((sending.value, pattern(1, SLOW)))
                handles.append((await message.send(pattern(2, 5)), pattern(2, 5)))
            assert [handle.tensor for handle, _ in handles] == list(range(len(handles)))
            for handle, tensor in handles:
                assert torch.equal(await receiver.receive(handle), tensor)

        assert await cancel_everywhere(attempt, sender, receiver)


@pytest.mark.promise(12)
async def test_a_message_whose_block_is_cancelled_is_discarded_whole() -> None:
    async with pair(max_concurrent_videos=1, arena_bytes=(SLOW + BIG) * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            handles: list[TensorHandle] = []

            async def block() -> None:
                async with sender.message() as message:
                    handles.append(await message.send(pattern(0, BIG)))
                    handles.append(await message.send(pattern(1, SLOW)))
                    handles.append(await message.send(pattern(2, 3)))

            sending = attempt.start(block())
            if await sending.completed():
                for handle, seed in zip(handles, range(3), strict=True):
                    tensor = await receiver.receive(handle)
                    assert torch.equal(tensor, pattern(seed, tensor.numel()))
                return
            assert sender.statistics().in_flight == 0
            # Between machines, the first one waits too.
            assert len(handles) == 1 or (not handles and not is_local())
            for handle in handles:
                with pytest.raises(DiscardedError):
                    await receiver.receive(handle)

        assert await cancel_everywhere(attempt, sender, receiver)


# Allocations


@on_one_machine
async def test_an_allocate_cancelled_during_page_allocation_releases_its_block() -> None:
    async def attempt(attempt: Attempt) -> None:
        async with pair(arena_bytes=BIG * 8) as (sender, receiver):
            allocating = attempt.start(sender.allocate((BIG,), torch.int64))
            if await allocating.completed():
                handle = await sender.send(allocating.value.copy_(pattern(1, BIG)))
                assert torch.equal(await receiver.receive(handle), pattern(1, BIG))
            del allocating
            await settled(sender)
            again = await sender.allocate((BIG,), torch.int64)
            handle = await sender.send(again.copy_(pattern(2, BIG)))
            assert torch.equal(await receiver.receive(handle), pattern(2, BIG))

    assert await cancel_everywhere(attempt)


@on_one_machine
async def test_an_allocate_cancelled_in_a_message_returns_its_bytes_only() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            held = [await sender.allocate((BIG,), torch.int64)]
            async with sender.message() as message:
                allocating = attempt.start(message.allocate((BIG,), torch.int64))
                await allocating.until(lambda: sender.statistics().waiting == 1)
                await allocating.bring(_freeing(sender, held))
                if await allocating.completed():
                    tensor = allocating.value
                else:
                    tensor = await message.allocate((BIG,), torch.int64)
                handle = await message.send(tensor.copy_(pattern(1, BIG)))
            del allocating, tensor
            assert torch.equal(await receiver.receive(handle), pattern(1, BIG))

        assert await cancel_everywhere(attempt, sender, receiver)


# Copies of posted tensors


@on_one_machine
@pytest.mark.parametrize("is_discarded", [False, True])
async def test_a_wait_for_a_copy_is_cancelled_anywhere_without_side_effects(is_discarded: bool) -> None:
    async with pair() as (sender, receiver):

        async def ends(copied: Awaitable[None]) -> None:
            with pytest.raises(DiscardedError) if is_discarded else nullcontext():
                await copied

        async def attempt(attempt: Attempt) -> None:
            async with held_back(sender) as go_on:
                handle = sender.post(strided(1, BIG))
                other = asyncio.create_task(ends(sender.copied(handle)))
                copied = attempt.start(ends(sender.copied(handle)))
                await copied.until(lambda: copied.suspensions == 1)
                await copied.bring(lambda: sender.discard(handle) if is_discarded else go_on.set())
                await copied.completed()
                await other
            if not is_discarded:
                assert torch.equal(await receiver.receive(handle), pattern(1, BIG))

        assert await cancel_everywhere(attempt, sender, receiver)
