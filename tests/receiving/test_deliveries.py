"""An iteration delivers the tensors of a message consecutively, with their number, in any order of events."""

import asyncio

import pytest
import torch

from aiotensor import Delivery, TensorHandle, TensorSender
from tests.pairs import pair
from tests.steps import Count, Resumed
from verification.patterns import BIG, pattern

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def _send(sender: TensorSender, count: int, elements: int = 3) -> list[TensorHandle]:
    async with sender.message() as message:
        return [await message.send(pattern(seed, elements)) for seed in range(count)]


@pytest.mark.promise(12)
@pytest.mark.usefixtures("link")
async def test_deliveries_state_the_number_of_tensors_of_their_message() -> None:
    async with pair() as (sender, receiver):
        sizes = [3, 1, 2]
        sent = [await _send(sender, size) for size in sizes[:1]]
        sent.append([await sender.send(pattern(0, BIG))])
        sent.append(await _send(sender, sizes[2], BIG))
        for size, handles in zip(sizes, sent, strict=True):
            first = await anext(receiver)
            rest = [await anext(receiver) for _ in range(first.tensors - 1)]
            assert [delivery.tensors for delivery in (first, *rest)] == [size] * size
            assert [delivery.handle for delivery in (first, *rest)] == handles
            for seed, delivery in enumerate((first, *rest)):
                assert torch.equal(delivery.tensor, pattern(seed, delivery.tensor.numel()))
            del first, rest, delivery


async def test_a_tensor_wakes_one_of_the_waiting_iterations() -> None:
    async with pair(max_concurrent_videos=300) as (sender, receiver):
        await sender.ready()
        resumed = Count()

        async def take() -> Delivery:
            return await Resumed(anext(receiver), resumed)

        taking = [asyncio.create_task(take()) for _ in range(300)]
        await asyncio.sleep(0)
        handles = [sender.send_nowait(pattern(seed, 3)) for seed in range(300)]
        assert [(await one).handle for one in taking] == handles
        assert resumed.number < 2 * len(taking)
