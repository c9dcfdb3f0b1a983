"""Without a receiver, calls wait at most for the grace period, and then fail at once."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from aiotensor import ClosedError, TensorReceiver, TensorSender, UnavailableError
from tests.pairs import endpoint
from verification.patterns import BIG, pattern
from verification.waiting import settled

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

SHORT_S = 0.02


async def _in_message(sender: TensorSender) -> None:
    async with sender.message() as message:
        await message.send(pattern(0, 3))


CALLS: dict[str, Callable[[TensorSender], Awaitable[object]]] = {
    "send": lambda sender: sender.send(pattern(0, 3)),
    "send of a large tensor": lambda sender: sender.send(pattern(0, BIG)),
    "message": _in_message,
}


@pytest.mark.usefixtures("link")
@pytest.mark.parametrize(
    "link", ["unix", "tcp"], indirect=True
)  # a queue accepts messages without a receiver
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_without_a_receiver_raises_unavailable_error_after_the_grace_period(call: str) -> None:
    with endpoint() as place:
        async with TensorSender(place, grace_s=SHORT_S) as sender:
            for _ in range(2):  # the second one at once
                text = rf"^no receiver is connected at {place}, and none has been for the .* 0\.02 s \("
                with pytest.raises(UnavailableError, match=text):
                    await CALLS[call](sender)
            await settled(sender)


async def test_without_a_grace_period_no_call_waits_for_a_receiver_but_ready_does() -> None:
    with endpoint("unix") as place:
        async with TensorSender(place, grace_s=0) as sender:
            for call in CALLS.values():
                async with asyncio.timeout(0):
                    with pytest.raises(UnavailableError, match="no receiver is connected"):
                        await call(sender)
            waiting = asyncio.create_task(sender.ready())
            async with TensorReceiver(place):
                await waiting


async def test_a_wait_that_exceeds_max_wait_s_without_a_receiver_raises_unavailable_error() -> None:
    with endpoint("unix") as place:
        async with TensorSender(place, 1, max_wait_s=SHORT_S) as sender:
            sending = [asyncio.create_task(sender.send(pattern(seed, 3))) for seed in range(2)]
            for error in await asyncio.gather(*sending, return_exceptions=True):
                assert isinstance(error, UnavailableError)
            for send in (sender.send_nowait, sender.post):
                with pytest.raises(UnavailableError, match=f"^no receiver is connected at {place} "):
                    send(pattern(0, 3))


async def test_a_call_without_a_permit_or_memory_names_the_address_that_has_not_answered() -> None:
    with endpoint("unix") as place:
        more = rf" for 0\.02 s, and no receiver has answered at {place} \("
        async with TensorSender(place, 1, 8192, max_wait_s=SHORT_S) as sender:
            kept = await sender.allocate((8192,), torch.uint8)
            with pytest.raises(UnavailableError, match=f"^not enough shared memory was free{more}"):
                await sender.allocate((8192,), torch.uint8)
            del kept
            async with sender.message():
                with pytest.raises(UnavailableError, match=f"^no permit was free{more}"):
                    await sender.message().__aenter__()


async def test_an_invalid_grace_period_and_a_closed_sender_raise_other_errors() -> None:
    with endpoint("unix") as place:
        for grace_s in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="grace_s must be at least 0"):
                TensorSender(place, grace_s=grace_s)
        async with TensorSender(place, grace_s=0) as sender:
            pass
        with pytest.raises(ClosedError):
            await sender.send(pattern(0, 3))
