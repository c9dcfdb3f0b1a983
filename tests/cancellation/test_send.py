"""Cancelling `TensorSender.send` wherever it waits releases everything, and the next call continues."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from aiotensor import TensorReceiver, TensorSender
from tests.cancellation.situations import SLOW, HeldUp, clog, in_line, unread
from tests.cancelling import Attempt, Way, cancel_everywhere
from tests.pairs import Links, at_once, endpoint, is_local, on_one_machine, pair
from verification.internals import memory_of
from verification.patterns import BIG, pattern
from verification.waiting import settled

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")


async def _plain(sender: TensorSender, count: int) -> torch.Tensor:
    return pattern(1, count)


async def _allocated(sender: TensorSender, count: int) -> torch.Tensor:
    tensor = await sender.allocate((count,), torch.int64)
    return tensor.copy_(pattern(1, count))


Source = Callable[[TensorSender, int], Awaitable[torch.Tensor]]


@on_one_machine
@pytest.mark.parametrize("count", [3, BIG])
@pytest.mark.parametrize("source", [_plain, _allocated])
async def test_a_send_with_free_resources_does_not_suspend(source: Source, count: int) -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            sending = attempt.start(sender.send(await source(sender, count)))
            assert await sending.completed()
            assert torch.equal(await receiver.receive(sending.value), pattern(1, count))

        assert not await cancel_everywhere(attempt, sender, receiver)


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


@pytest.mark.parametrize("count", [BIG, SLOW])
async def test_a_send_cancelled_while_it_waits_for_bytes_does_not_block_the_next(count: int) -> None:
    async with pair(max_concurrent_videos=2, arena_bytes=count * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            held = [await sender.allocate((count,), torch.int64)]
            sending = attempt.start(sender.send(pattern(1, count)))
            await sending.until(lambda: sender.statistics().waiting == 1)
            behind = await in_line(sender, sender.send(pattern(2, count - 1)))

            def free() -> None:
                held.clear()
                memory_of(sender).freed.collect_all()  # in this very turn

            await sending.bring(free)
            if await sending.completed():
                assert not behind.done()
                assert torch.equal(await receiver.receive(sending.value), pattern(1, count))
            assert torch.equal(await receiver.receive(await behind), pattern(2, count - 1))

        assert await cancel_everywhere(attempt, sender, receiver)


@pytest.mark.parametrize("count", [3, BIG])
async def test_a_send_cancelled_before_its_receiver_connects_is_not_received(count: int) -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            receiver = TensorReceiver(place)
            opening: list[asyncio.Task[TensorReceiver]] = []
            async with TensorSender(place, max_concurrent_videos=1) as sender:
                sending = attempt.start(sender.send(pattern(1, count)))
                await sending.bring(lambda: opening.append(asyncio.create_task(receiver.__aenter__())))
                await opening[0]
                if await sending.completed():
                    assert torch.equal(await receiver.receive(sending.value), pattern(1, count))
                assert torch.equal(await receiver.receive(await sender.send(pattern(2, 5))), pattern(2, 5))
                assert receiver.statistics().unclaimed_tensors == 0
                await settled(sender)
            await receiver.aclose()

    found = await cancel_everywhere(attempt)
    assert found or (Links.current == "queue" and count == 3)  # which does not wait


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_send_cancelled_during_page_allocation_releases_its_block(is_first: bool) -> None:
    count = BIG if is_local() else SLOW  # a small tensor waits for nothing between machines

    async def attempt(attempt: Attempt) -> None:
        async with pair(max_concurrent_videos=2, arena_bytes=SLOW * 16) as (sender, receiver):
            handles = [] if is_first else [await sender.send(pattern(0, SLOW))]
            sending = attempt.start(sender.send(pattern(1, count)))
            if await sending.completed():
                assert torch.equal(await receiver.receive(sending.value), pattern(1, count))
            for handle in handles:
                assert torch.equal(await receiver.receive(handle), pattern(0, SLOW))
            await settled(sender)
            whole = await sender.allocate((SLOW * 2,), torch.int64)  # all of it is free again
            del whole
            await settled(sender)

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
                await memory_of(sender).settle()
                seen = sender.statistics()
                assert seen.in_flight == in_flight + completed
                assert seen.bytes_in_use == SLOW * 8 * completed

    found = await cancel_everywhere(attempt)
    assert found[Way.WITH_RESULT] == 2
