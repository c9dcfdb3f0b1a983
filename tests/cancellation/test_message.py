"""Cancelling a message of several tensors: its beginning, a send in its block, and the whole block."""

import pytest
import torch

from aiotensor import DiscardedError, TensorHandle
from tests.cancellation.situations import SLOW, HeldUp, in_line
from tests.cancelling import Attempt, cancel_everywhere
from tests.pairs import is_local, pair
from verification.patterns import BIG, pattern

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")


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


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
async def test_leaving_the_block_of_a_message_does_not_suspend(error: type[Exception] | None) -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            message = await sender.message().__aenter__()
            handle = await message.send(pattern(0, BIG))
            raised = None if error is None else error()
            await attempt.start(message.__aexit__(error, raised, None)).completed()
            if error is None:
                assert torch.equal(await receiver.receive(handle), pattern(0, BIG))

        assert not await cancel_everywhere(attempt, sender, receiver)
