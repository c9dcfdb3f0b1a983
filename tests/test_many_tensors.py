"""Thousands of tensors that are freed or discarded at once: the work is divided over many iterations."""

import asyncio

import pytest
import torch

from aiotensor import TensorHandle, TensorReceiver, TensorSender
from tests.conformance.turns import Changes
from tests.pairs import pair
from verification.waiting import settled

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")

MESSAGES, TENSORS = 3, 1000
ALL = MESSAGES * TENSORS
NBYTES = 16 << 10  # too large for a frame, so each has a block


async def _send_all(sender: TensorSender, receiver: TensorReceiver) -> list[TensorHandle]:
    handles: list[TensorHandle] = []
    for _ in range(MESSAGES):
        async with sender.message() as message:
            handles += [await message.send(torch.zeros(NBYTES, dtype=torch.uint8)) for _ in range(TENSORS)]
    for handle in handles:
        await receiver.arrived(handle)
    return handles


async def test_many_freed_tensors_are_released_over_many_iterations() -> None:
    async with pair() as (sender, receiver):
        tensors = [await receiver.receive(handle) for handle in await _send_all(sender, receiver)]
        assert receiver.statistics().leases == ALL

        with (
            Changes(lambda: receiver.statistics().leases) as leases,
            Changes(lambda: sender.statistics().bytes_in_use // NBYTES) as blocks,
        ):
            tensors.clear()
            await settled(sender)

        assert 0 < leases.most < ALL // 5
        assert 0 < blocks.most < ALL // 5

        tensors = [await receiver.receive(handle) for handle in await _send_all(sender, receiver)]
        while tensors:
            del tensors[-97:]  # while earlier ones are released
            await asyncio.sleep(0)
        await settled(sender)
        assert receiver.statistics().leases == 0


async def test_tensors_freed_before_a_receiver_closes_are_released() -> None:
    async with pair() as (sender, receiver):
        tensors = [await receiver.receive(handle) for handle in await _send_all(sender, receiver)]
        await sender.drain()

        tensors.clear()
        await receiver.aclose()

        await settled(sender)
        assert sender.statistics().messages_discarded == 0
