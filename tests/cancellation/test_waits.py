"""Cancelling waits that take no resource, `ready`, `arrived` and `inspect`, changes nothing."""

import asyncio

import pytest
import torch

from aiotensor import TensorHandle, TensorReceiver, TensorSender
from aiotensor.inspection import inspect
from tests.bare_peers import PATIENCE_S, inspect_patiently
from tests.cancelling import Attempt, cancel_everywhere
from tests.pairs import endpoint, pair
from verification.internals import inspectors_of
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.mark.usefixtures("link")
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


@pytest.mark.usefixtures("link")
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


@pytest.mark.usefixtures("link")
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


async def test_a_cancelled_inspection_leaves_no_connection_and_the_next_one_is_complete(address: str) -> None:
    async with TensorReceiver(address) as receiver, TensorSender(address) as sender:
        await sender.ready()

        async def attempt(attempt: Attempt) -> None:
            await attempt.start(inspect(address, patience_s=PATIENCE_S)).completed()
            [seen] = (await inspect_patiently(address)).senders
            assert seen.sender == sender.id
            await until(lambda: not inspectors_of(receiver))

        assert await cancel_everywhere(attempt, sender, receiver)
