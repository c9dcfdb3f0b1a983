"""An iteration delivers the tensors of a message consecutively, with their number, in any order of events."""

import asyncio

import pytest
import torch

from aiotensor import Delivery, TensorHandle, TensorReceiver, TensorSender
from tests.pairs import endpoint, pair
from tests.steps import Count, Resumed
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def _send(sender: TensorSender, count: int, elements: int = 3) -> list[TensorHandle]:
    async with sender.message() as message:
        return [await message.send(pattern(seed, elements)) for seed in range(count)]


async def _take(receiver: TensorReceiver, count: int) -> list[tuple[int, int]]:
    """Iterate this many times, and return the numbers of the messages and tensors."""
    return [_place(await anext(receiver)) for _ in range(count)]


def _place(delivery: Delivery) -> tuple[int, int]:
    return delivery.handle.message, delivery.handle.tensor


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


async def test_several_iterations_share_the_order() -> None:
    async with pair() as (sender, receiver):
        taken: list[tuple[int, int]] = []

        async def iterate() -> None:
            async for delivery in receiver:
                taken.append(_place(delivery))
                await asyncio.sleep(0)

        iterating = [asyncio.create_task(iterate()) for _ in range(3)]
        for _ in range(4):
            await _send(sender, 5)
        await until(lambda: len(taken) == 20)
        assert taken == [(message, tensor) for message in range(4) for tensor in range(5)]
        await receiver.aclose()
        await asyncio.wait(iterating)


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


async def test_remaining_tensors_of_a_discarded_message_are_not_delivered() -> None:
    with endpoint("unix") as place:
        async with TensorReceiver(place) as receiver, TensorSender(place) as sender:
            first = await _send(sender, 3)
            await _send(sender, 2)
            assert await _take(receiver, 1) == [(0, 0)]
            sender.discard(first[0])
            await until(lambda: receiver.statistics().messages_discarded == 1)
            assert await _take(receiver, 2) == [(1, 0), (1, 1)]
