"""An iteration delivers the tensors of a message consecutively, with their number, in any order of events."""

import asyncio

import pytest
import torch

from aiotensor import Delivery, TensorHandle, TensorReceiver, TensorSender
from tests.pairs import endpoint, pair
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


async def test_arrived_does_not_change_the_order_of_iteration() -> None:
    async with pair() as (sender, receiver):
        first, second = await _send(sender, 3), await _send(sender, 2)
        await receiver.arrived(second[1])
        assert await _take(receiver, 1) == [(0, 0)]
        for handle in (second[0], first[2], first[1]):
            await receiver.arrived(handle)
        assert await _take(receiver, 4) == [(0, 1), (0, 2), (1, 0), (1, 1)]


async def test_a_cancelled_copy_does_not_change_the_order_of_iteration() -> None:
    async with pair() as (sender, receiver):
        [_, last], _ = await _send(sender, 2, BIG), await _send(sender, 2)
        await until(lambda: receiver.statistics().unclaimed_tensors == 4)
        copying = asyncio.create_task(receiver.receive(last, copy=True))
        assert await _take(receiver, 1) == [(0, 0)]
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert await _take(receiver, 3) == [(0, 1), (1, 0), (1, 1)]


async def test_iteration_skips_tensors_that_a_call_awaits_by_handle() -> None:
    async with pair() as (sender, receiver):
        # The sender numbers its messages from 0, so their handles are known before they are sent.
        awaited = [TensorHandle(sender.id, 0, number, "int64", (3,), "cpu") for number in (0, 1)]
        waiting = [asyncio.create_task(receiver.receive(handle)) for handle in awaited]
        await asyncio.sleep(0)
        await _send(sender, 3)
        await _send(sender, 2)
        assert await _take(receiver, 2) == [(0, 2), (1, 0)]
        for seed, receiving in enumerate(waiting):
            assert torch.equal(await receiving, pattern(seed, 3))
        assert await _take(receiver, 1) == [(1, 1)]


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


async def test_remaining_tensors_of_a_discarded_message_are_not_delivered() -> None:
    with endpoint("unix") as place:
        async with TensorReceiver(place) as receiver, TensorSender(place) as sender:
            first = await _send(sender, 3)
            await _send(sender, 2)
            assert await _take(receiver, 1) == [(0, 0)]
            sender.discard(first[0])
            await until(lambda: receiver.statistics().messages_discarded == 1)
            assert await _take(receiver, 2) == [(1, 0), (1, 1)]
