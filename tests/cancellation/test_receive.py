"""A tensor whose receiving call was cancelled can be received by the next; cancelled waits change nothing."""

import asyncio
import threading
from functools import partial

import pytest
import torch

from aiotensor import (
    AlreadyTakenError,
    DiscardedError,
    TensorHandle,
    TensorReceiver,
    TensorSender,
)
from aiotensor.inspection import inspect
from aiotensor.memory import tensors
from aiotensor.memory.tensors import RawBytes, flat_bytes
from tests.cancellation.situations import SLOW
from tests.cancelling import Attempt, Running, Way, cancel_everywhere
from tests.pairs import endpoint, on_one_machine, pair
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")

_PATIENCE_S = 20.0  # for the answer to an inspection, on any machine


async def _received(receiving: Running[torch.Tensor], receiver: TensorReceiver, handle: TensorHandle) -> bool:
    """See that a tensor was received, or still can be; say whether it was."""
    completed = await receiving.completed()
    tensor = receiving.value if completed else await receiver.receive(handle)
    assert torch.equal(tensor, pattern(tensor.numel(), tensor.numel()))
    with pytest.raises(AlreadyTakenError):
        receiver.receive_nowait(handle)
    return completed


@on_one_machine
async def test_receiving_an_arrived_tensor_does_not_suspend() -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt, count: int) -> None:
            handle = await sender.send(pattern(count, count))
            await until(lambda: receiver.statistics().unclaimed_tensors == 1)
            assert await _received(attempt.start(receiver.receive(handle)), receiver, handle)

        for count in (3, BIG):
            assert not await cancel_everywhere(partial(attempt, count=count), sender, receiver)


@pytest.mark.promise(21)
@pytest.mark.parametrize(("count", "copy"), [(3, False), (BIG, False), (BIG, True)])
async def test_a_cancelled_receive_leaves_an_arriving_tensor_claimable(count: int, copy: bool) -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            before = await sender.send(pattern(0, 3))
            await receiver.receive(before)
            handle = TensorHandle(sender.id, before.message + 1, 0, "int64", (count,), "cpu")
            receiving = attempt.start(receiver.receive(handle, copy=copy))
            await receiving.bring(lambda: sender.send_nowait(pattern(count, count)))
            await _received(receiving, receiver, handle)

        assert await cancel_everywhere(attempt, sender, receiver)


@on_one_machine
@pytest.mark.parametrize("count", [3, SLOW])
async def test_a_receive_cancelled_while_it_copies_leaves_the_tensor_claimable(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()

    def slow_copy(tensor: torch.Tensor) -> RawBytes:
        copying.set()
        go_on.wait()
        return flat_bytes(tensor)

    monkeypatch.setattr(tensors, "flat_bytes", slow_copy)
    async with pair(max_concurrent_videos=1, arena_bytes=SLOW * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            copying.clear()
            go_on.clear()
            handle = await sender.send(pattern(count, count))
            await until(lambda: receiver.statistics().unclaimed_tensors == 1)
            receiving = attempt.start(receiver.receive(handle, copy=True))
            await receiving.until(copying.is_set)
            if not receiving.cancels:
                with pytest.raises(AlreadyTakenError):
                    receiver.receive_nowait(handle)
            await receiving.bring(go_on.set)
            go_on.set()
            await _received(receiving, receiver, handle)

        assert await cancel_everywhere(attempt, sender, receiver)


async def test_a_receive_cancelled_before_its_sender_connects_leaves_it_claimable() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            async with TensorReceiver(place) as receiver:
                sender = TensorSender(place)
                handle = TensorHandle(sender.id, 0, 0, "int64", (BIG,), "cpu")
                receiving = attempt.start(receiver.receive(handle))
                opening: list[asyncio.Task[TensorSender]] = []
                await receiving.bring(lambda: opening.append(asyncio.create_task(sender.__aenter__())))
                await opening[0]
                assert await sender.send(pattern(BIG, BIG)) == handle
                await _received(receiving, receiver, handle)
                await sender.aclose()

    assert await cancel_everywhere(attempt)


@on_one_machine
@pytest.mark.parametrize("by", ["sender", "receiver"])
async def test_a_receive_of_a_discarded_tensor_is_cancelled_or_raises_discarded_error(by: str) -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            message = await sender.message().__aenter__()
            handle = await message.send(pattern(BIG, BIG))
            await until(lambda: receiver.statistics().unclaimed_tensors == 1)
            receiving = attempt.start(receiver.receive(handle))
            await receiving.bring(lambda: (sender if by == "sender" else receiver).discard(handle))
            try:
                assert not await receiving.completed()
            except DiscardedError:
                assert not receiving.cancels
            with pytest.raises(DiscardedError):
                await receiver.receive(handle)
            await until(lambda: sender.statistics().in_flight == 0)
            with pytest.raises(DiscardedError):
                await message.__aexit__(None, None, None)

        assert await cancel_everywhere(attempt, sender, receiver)


@on_one_machine
async def test_a_second_receive_gets_the_tensor_if_the_first_is_cancelled() -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            message = await sender.message().__aenter__()
            handle = await message.send(pattern(5, 5))
            receiving = attempt.start(receiver.receive(handle))
            await receiving.until(lambda: receiver.statistics().waiting == 1)
            second = asyncio.create_task(receiver.receive(handle))
            await asyncio.sleep(0)
            ending: list[asyncio.Task[None]] = []
            await receiving.bring(
                lambda: ending.append(asyncio.create_task(message.__aexit__(None, None, None)))
            )
            await ending[0]
            if await receiving.completed():
                with pytest.raises(AlreadyTakenError):
                    await second
            else:
                assert torch.equal(await second, pattern(5, 5))

        assert await cancel_everywhere(attempt, sender, receiver)


async def test_a_cancelled_iteration_leaves_its_tensor_to_the_next_iteration() -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            iterating = attempt.start(receiver.__anext__())
            await iterating.until(lambda: receiver.statistics().waiting == 1)
            second = asyncio.create_task(anext(receiver))
            await asyncio.sleep(0)
            await iterating.bring(lambda: sender.send_nowait(pattern(1, 3)))
            if await iterating.completed():
                assert torch.equal(iterating.value.tensor, pattern(1, 3))
                assert not second.done()
                sender.send_nowait(pattern(1, 3))
            assert torch.equal((await second).tensor, pattern(1, 3))

        found = await cancel_everywhere(attempt, sender, receiver)
        assert found[Way.WITH_RESULT] == 1


# Waits that take no resource


async def test_a_sender_whose_ready_was_cancelled_still_connects() -> None:
    async def attempt(attempt: Attempt) -> None:
        with endpoint() as place:
            receiver = TensorReceiver(place)
            opening: list[asyncio.Task[TensorReceiver]] = []
            async with TensorSender(place) as sender:
                probe = attempt.start(sender.ready())
                second = asyncio.create_task(sender.ready())
                await probe.bring(lambda: opening.append(asyncio.create_task(receiver.__aenter__())))
                await second
                await probe.completed()
                await opening[0]
                handle = await sender.send(pattern(0, 3))
                assert torch.equal(await receiver.receive(handle), pattern(0, 3))
            await receiver.aclose()

    assert await cancel_everywhere(attempt)


@on_one_machine
@pytest.mark.parametrize("nbytes", [0, 8])
async def test_a_sender_whose_wait_for_capacity_was_cancelled_still_sends(nbytes: int) -> None:
    async with pair(max_concurrent_videos=1, arena_bytes=BIG * 8) as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            handle = await sender.send(pattern(0, BIG))
            tensor = await receiver.receive(handle) if nbytes else None
            probe = attempt.start(sender.ready(nbytes=nbytes))
            second = asyncio.create_task(sender.ready(nbytes=nbytes))

            def release() -> None:
                nonlocal tensor
                tensor = receiver.receive_nowait(handle) if tensor is None else None

            await receiver.arrived(handle) if not nbytes else None
            await probe.bring(release)
            await second
            await probe.completed()
            tensor = None
            await sender.ready(nbytes=BIG * 8)
            await receiver.receive(sender.send_nowait(pattern(1, 3)))

        assert await cancel_everywhere(attempt, sender, receiver)


@on_one_machine
async def test_iteration_yields_a_tensor_after_arrived_was_cancelled() -> None:
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            before = await sender.send(pattern(0, 3))
            await receiver.receive(before)
            handle = TensorHandle(sender.id, before.message + 1, 0, "int64", (3,), "cpu")
            waiting = attempt.start(receiver.arrived(handle))
            await waiting.until(lambda: receiver.statistics().waiting == 1)
            iterating = asyncio.create_task(anext(receiver))
            await asyncio.sleep(0)
            await waiting.bring(lambda: sender.send_nowait(pattern(1, 3)))
            await waiting.completed()
            delivery = await iterating
            assert delivery.handle == handle
            assert torch.equal(delivery.tensor, pattern(1, 3))

        assert await cancel_everywhere(attempt, sender, receiver)


@on_one_machine
async def test_a_cancelled_inspection_leaves_no_connection_and_the_next_one_is_complete() -> None:
    with endpoint("unix") as address:
        assert isinstance(address, str)
        async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
            await sender.ready()

            async def attempt(attempt: Attempt) -> None:
                await attempt.start(inspect(address, patience_s=_PATIENCE_S)).completed()
                seen = await inspect(address, patience_s=_PATIENCE_S)
                assert [one.sender for one in seen.senders] == [sender.id]

            assert await cancel_everywhere(attempt, sender, receiver)
