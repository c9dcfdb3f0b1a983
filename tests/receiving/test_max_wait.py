"""A wait for a tensor by its handle ends after the receiver's `max_wait_s`, and its error names the cause."""

import asyncio

import pytest
import torch

from aiotensor import TensorHandle, TensorReceiver, TensorSender, WouldBlockError
from tests.pairs import beyond, endpoint
from verification.patterns import BIG, pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02
LONG_S = 3600.0

UNKNOWN = TensorHandle("f" * 32, 3, 1, "int64", (3,), "cpu")


@pytest.mark.promise(10)
@pytest.mark.usefixtures("link")
async def test_a_wait_for_a_handle_of_an_unknown_sender_times_out() -> None:
    with endpoint() as here:
        async with TensorReceiver(here, max_wait_s=SHORT_S) as receiver:
            for waiting in (
                receiver.receive(UNKNOWN),
                receiver.receive(UNKNOWN, copy=True),
                receiver.arrived(UNKNOWN),
            ):
                with pytest.raises(
                    WouldBlockError,
                    match=r"tensor 1 of message 3 of sender f{32} has not arrived within 0\.02 s: no sender",
                ) as no:
                    await waiting
                assert no.value.messages.requested == 1
            assert receiver.statistics().waiting == 0
            assert receiver.statistics().errors == {"WouldBlockError": 3}
            async with TensorSender(here) as sender:
                first = await sender.send(pattern(0, BIG))
                with pytest.raises(WouldBlockError, match="its sender is connected, but has not sent"):
                    await receiver.receive(beyond(first))
                # The ended wait left no claim: an iteration receives all tensors.
                assert torch.equal((await anext(receiver)).tensor, pattern(0, BIG))


async def test_max_wait_s_limits_waits_for_handles_but_not_iteration() -> None:
    with endpoint("unix") as here:
        async with (
            TensorReceiver(here, max_wait_s=SHORT_S) as impatient,
            TensorSender(here) as sender,
        ):
            iterating = asyncio.create_task(anext(impatient))
            with pytest.raises(WouldBlockError):
                await impatient.receive(UNKNOWN)
            assert not iterating.done()
            await sender.send(pattern(0, 3))
            assert torch.equal((await iterating).tensor, pattern(0, 3))
    with endpoint("unix") as here:
        async with TensorReceiver(here, max_wait_s=LONG_S) as receiver, TensorSender(here) as sender:
            coming = TensorHandle(sender.id, 0, 0, "int64", (3,), "cpu")
            arriving = asyncio.create_task(receiver.arrived(coming))
            waiting = asyncio.create_task(receiver.receive(coming))
            await until(lambda: receiver.statistics().waiting == 2)
            await sender.send(pattern(1, 3))
            await arriving
            assert torch.equal(await waiting, pattern(1, 3))


async def test_a_tensor_that_arrives_in_the_iteration_of_the_timeout_is_received() -> None:
    with endpoint("unix") as here:
        async with TensorReceiver(here, max_wait_s=SHORT_S) as receiver, TensorSender(here) as sender:
            await sender.ready()
            coming = TensorHandle(sender.id, 0, 0, "int64", (3,), "cpu")
            loop = asyncio.get_running_loop()

            def send_and_hold_up() -> None:
                assert receiver.statistics().waiting == 1
                over = loop.time() + SHORT_S
                sender.send_nowait(pattern(0, 3))  # it is on the socket, still unread
                while loop.time() < over + SHORT_S:
                    pass  # the loop finds the record and the end of the time at once

            waiting = asyncio.create_task(receiver.receive(coming))
            loop.call_soon(send_and_hold_up)  # in the turn in which the wait begins: it is not over then
            assert torch.equal(await waiting, pattern(0, 3))
