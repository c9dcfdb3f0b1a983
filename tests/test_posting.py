"""Posted tensors are copied after `post` has returned, and every end of the copy reaches both sides."""

import asyncio

import pytest
import torch

from aiotensor import ClosedError
from tests.cancellation.situations import held_back, strided
from tests.pairs import pair
from verification.patterns import BIG, pattern

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")


async def test_drain_and_closing_wait_for_the_copies_and_posted_messages_can_still_be_received() -> None:
    async with pair() as (sender, receiver):
        async with held_back(sender):
            handles = [sender.post(strided(seed, BIG)) for seed in range(3)]
            draining = asyncio.create_task(sender.drain())
            await asyncio.sleep(0)
            assert not draining.done()
        await sender.copied(handles[2])
        assert not draining.done()
        for seed, handle in enumerate(handles):
            assert torch.equal(await receiver.receive(handle), pattern(seed, BIG))
        await draining

        async with held_back(sender):
            handles = [sender.post(strided(seed, BIG)) for seed in range(3)]
            copying = asyncio.create_task(sender.copied(handles[2]))
            closing = asyncio.create_task(sender.aclose())
            await asyncio.sleep(0.01)
            with pytest.raises(ClosedError):
                sender.post(pattern(0, 3))
            assert not closing.done()
        await copying
        await closing
        for seed, handle in enumerate(handles):
            assert torch.equal(await receiver.receive(handle), pattern(seed, BIG))
