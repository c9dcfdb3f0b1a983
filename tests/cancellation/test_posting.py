"""Cancelling `TensorSender.copied` has no side effects; cancelling `aclose` leaves no copy behind."""

import asyncio
from collections.abc import Awaitable

import pytest
import torch

from aiotensor import DiscardedError, PeerLostError, TensorReceiver, TensorSender
from tests.cancellation.situations import held_back, strided
from tests.cancelling import Attempt, cancel_everywhere
from tests.pairs import endpoint, pair
from verification.internals import held_by_sender
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")


async def test_a_wait_for_a_copy_is_cancelled_anywhere_without_side_effects() -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            async with held_back(sender) as go_on:
                handle = sender.post(strided(1, BIG))
                other = asyncio.create_task(sender.copied(handle))
                copied = attempt.start(sender.copied(handle))
                await copied.until(lambda: copied.suspensions == 1)
                await copied.bring(go_on.set)
                await copied.completed()
                await other
            assert torch.equal(await receiver.receive(handle), pattern(1, BIG))

        assert await cancel_everywhere(attempt, sender, receiver)


async def test_a_wait_for_a_discarded_message_is_cancelled_anywhere_without_side_effects() -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            async with held_back(sender):
                handle = sender.post(strided(1, BIG))
                copied = attempt.start(_ends(sender.copied(handle)))
                await copied.until(lambda: copied.suspensions == 1)
                await copied.bring(lambda: sender.discard(handle))
                await copied.completed()
                with pytest.raises(DiscardedError):
                    await sender.copied(handle)

        assert await cancel_everywhere(attempt, sender, receiver)


async def _ends(copied: Awaitable[None]) -> None:
    with pytest.raises(DiscardedError):
        await copied


async def test_closing_is_cancelled_anywhere_and_leaves_no_copy_behind() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            async with TensorReceiver(place) as receiver:
                sender = await TensorSender(place).__aenter__()
                await sender.ready()
                async with held_back(sender) as go_on:
                    handles = [sender.post(strided(seed, BIG)) for seed in range(2)]
                    closing = attempt.start(sender.aclose())
                    await closing.until(lambda: closing.suspensions == 1)
                    await closing.bring(go_on.set)
                    is_closed = await closing.completed()
                for seed, handle in enumerate(handles):
                    try:
                        assert torch.equal(await receiver.receive(handle), pattern(seed, BIG))
                    except (PeerLostError, DiscardedError):
                        assert not is_closed
                await until(lambda: not held_by_sender(sender)["messages that are copied"])

    assert await cancel_everywhere(attempt)
