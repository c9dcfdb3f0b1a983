"""Cancelling `TensorSender.allocate` returns the bytes, and the next call gets them."""

import pytest
import torch

from tests.cancellation.situations import in_line
from tests.cancelling import Attempt, cancel_everywhere
from tests.pairs import pair
from verification.internals import memory_of
from verification.patterns import BIG, pattern
from verification.waiting import settled

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")


async def test_allocating_free_warm_memory_does_not_suspend() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            allocating = attempt.start(sender.allocate((BIG,), torch.int64))
            assert await allocating.completed()
            allocating.value.fill_(7)

        assert not await cancel_everywhere(attempt, sender, receiver)


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


async def test_an_allocate_cancelled_while_it_waits_for_bytes_lets_the_next_call_run() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            held = [await sender.allocate((BIG,), torch.int64)]
            allocating = attempt.start(sender.allocate((BIG,), torch.int64))
            await allocating.until(lambda: sender.statistics().waiting == 1)
            behind = await in_line(sender, sender.send(pattern(2, BIG // 2)))

            def free() -> None:
                held.clear()
                memory_of(sender).freed.collect_all()  # in this very turn

            await allocating.bring(free)
            if await allocating.completed():
                assert not behind.done()
                assert sender.statistics().bytes_in_use == BIG * 8
                allocating.value.fill_(7)
            del allocating
            assert torch.equal(await receiver.receive(await behind), pattern(2, BIG // 2))

        assert await cancel_everywhere(attempt, sender, receiver)


async def test_an_allocate_cancelled_in_a_message_returns_its_bytes_only() -> None:
    async with pair(arena_bytes=BIG * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            held = [await sender.allocate((BIG,), torch.int64)]
            async with sender.message() as message:
                allocating = attempt.start(message.allocate((BIG,), torch.int64))
                await allocating.until(lambda: sender.statistics().waiting == 1)

                def free() -> None:
                    held.clear()
                    memory_of(sender).freed.collect_all()  # in this very turn

                await allocating.bring(free)
                if await allocating.completed():
                    tensor = allocating.value
                else:
                    tensor = await message.allocate((BIG,), torch.int64)
                handle = await message.send(tensor.copy_(pattern(1, BIG)))
            del allocating, tensor
            assert torch.equal(await receiver.receive(handle), pattern(1, BIG))

        assert await cancel_everywhere(attempt, sender, receiver)
