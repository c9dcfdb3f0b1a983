"""A wait for a permit, for memory or for a receiver ends after `max_wait_s`, and releases everything."""

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import torch

from aiotensor import TensorReceiver, TensorSender, WouldBlockError
from tests.cancellation.situations import clog, unread
from tests.pairs import endpoint
from verification.model.stepping import Steps
from verification.patterns import BIG, pattern
from verification.waiting import settled

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

T = TypeVar("T")

SHORT_S = 0.5  # long enough to connect, which it limits, too
LONG_S = 3600.0


@pytest.mark.promise(18)
@pytest.mark.usefixtures("link")
async def test_a_wait_for_a_permit_times_out_and_reports_the_usage() -> None:
    with endpoint() as place:
        async with TensorReceiver(place) as receiver, TensorSender(place, 1, max_wait_s=SHORT_S) as sender:
            first = await sender.send(pattern(1, BIG))
            with pytest.raises(
                WouldBlockError, match=r"no permit was free for 0.5 s \(1 of 1 messages"
            ) as no:
                await sender.send(pattern(2, BIG))
            assert "requested" not in str(no.value)  # it waits for no bytes
            assert (no.value.messages.limit, no.value.messages.in_use, no.value.messages.requested) == (
                1,
                1,
                1,
            )
            with pytest.raises(WouldBlockError, match="no permit was free"):
                async with sender.message():
                    raise AssertionError("there was no permit")
            assert sender.statistics().waiting == 0

            assert torch.equal(await receiver.receive(first), pattern(1, BIG))
            del no
            gc.collect()
            assert torch.equal(await receiver.receive(await sender.send(pattern(3, BIG))), pattern(3, BIG))
            await settled(sender)


async def test_a_wait_for_memory_times_out_and_leaves_its_message_unchanged() -> None:
    with endpoint() as place:
        async with (
            TensorReceiver(place) as receiver,
            TensorSender(place, arena_bytes=BIG * 8, max_wait_s=SHORT_S) as sender,
        ):
            held = await receiver.receive(await sender.send(pattern(1, BIG)))
            with pytest.raises(WouldBlockError, match=r"not enough shared memory was free for 0.5 s") as no:
                await sender.allocate((BIG,), torch.float64)
            assert no.value.bytes.requested == BIG * 8
            assert f", {BIG * 8} bytes requested, " in str(no.value)
            async with sender.message() as message:
                with pytest.raises(WouldBlockError, match="not enough shared memory was free"):
                    await message.send(pattern(2, BIG))
                small = await message.send(pattern(3, 5))
            assert torch.equal(await receiver.receive(small), pattern(3, 5))
            del held, no
            gc.collect()
            assert torch.equal(await receiver.receive(await sender.send(pattern(4, BIG))), pattern(4, BIG))
            await settled(sender)


@pytest.mark.parametrize("size", [5, BIG])
async def test_send_times_out_while_the_receiver_does_not_read(size: int) -> None:
    with endpoint("unix") as place, unread(place) as far:
        async with TensorSender(place, 2000, BIG * 8, max_wait_s=SHORT_S) as sender:
            sent = clog(sender)
            who = f", and no receiver has answered at {place}" if isinstance(place, str) else ""
            reason = rf"the receiver read nothing for 0.5 s{who} \({sent + 1} of 2000 messages"
            with pytest.raises(WouldBlockError, match=reason):
                await sender.send(pattern(sent, size))
            now = sender.statistics()
            assert (now.in_flight, now.bytes_in_use, now.waiting) == (sent, 0, 0)
            async with asyncio.timeout(30):
                while True:
                    far.read()
                    try:
                        await sender.send(pattern(sent, size))
                        break
                    except WouldBlockError:
                        continue


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_send_succeeds_if_a_receiver_is_found_in_the_iteration_of_the_timeout(kind: str) -> None:
    steps = Steps(kind)

    def finish(call: Coroutine[Any, Any, T]) -> T:
        task = steps.start(call)
        while not task.done():
            steps.turn()
        return task.result()

    with endpoint("unix") as place:
        sender = finish(TensorSender(place, max_wait_s=1).__aenter__())
        sending = steps.start(sender.send(pattern(1, 5)))
        while not sender.statistics().in_flight:
            steps.turn()
        with unread(place):
            steps.pass_time(1.5)  # the next look for a receiver is due, and then the end of the wait
            steps.turn()
            while not sending.done():
                steps.turn()
            assert sending.result().sender == sender.id
            finish(sender.aclose())
    steps.close()
