"""At the end of a server, the receiver has a limited time to take sent messages; no end raises an error."""

import asyncio
import logging

import pytest

from aiotensor import TensorReceiver, TensorSender
from aiotensor.integrations.serving import serving
from tests.pairs import endpoint
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

NAMES = ("TensorLifespan", "MessageLifespan")


async def test_a_receiver_lost_while_a_server_ends_is_neither_logged_nor_awaited(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with endpoint() as place:
        async with (
            TensorReceiver(place) as receiver,
            serving(lambda: TensorSender(place), 3600.0, *NAMES) as sender,
        ):
            await sender.send(pattern(1, 5))
            await until(lambda: receiver.statistics().unclaimed_tensors == 1)
            closing = asyncio.create_task(receiver.aclose())
        await closing
    told = [record for record in caplog.records if record.name == "aiotensor.integrations"]
    assert told == []


async def test_a_sender_that_its_application_has_closed_ends_without_an_error() -> None:
    with endpoint() as place:
        async with serving(lambda: TensorSender(place), 3600.0, *NAMES) as sender:
            await sender.aclose()


async def test_messages_not_taken_within_the_drain_time_are_discarded_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with endpoint() as place:
        async with TensorReceiver(place) as receiver:
            async with serving(lambda: TensorSender(place), 0.01, *NAMES) as sender:
                for seed in range(3):
                    await sender.send(pattern(seed, 5))
                await until(lambda: receiver.statistics().unclaimed_tensors == 3)
            await until(lambda: receiver.statistics().messages_discarded == 3)
    [record] = [record for record in caplog.records if record.name == "aiotensor.integrations"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("3 messages were not taken within 0.01 s")
