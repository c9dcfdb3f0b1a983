"""Inspect a publisher."""

import pytest

from aiotensor import RefusedError, TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.inspection import inspect
from aiotensor.types import PublisherStatistics
from tests.broadcast.audiences import Broadcasts
from verification.patterns import BIG, pattern

PATIENCE_S = 20.0


async def test_an_inspection_has_the_statistics_of_the_publisher(address: str) -> None:
    async with Broadcasts(address).open(2, slow="drop", max_behind=2, history=1) as (
        publisher,
        [slow, quick],
    ):
        for number in range(4):
            await publisher.publish(pattern(number, BIG))
            await quick.receive()
        inspection = await inspect(address, patience_s=PATIENCE_S)
        assert (inspection.kind, inspection.id) == ("publisher", publisher.id)
        found = inspection.statistics
        assert isinstance(found, PublisherStatistics)
        assert (found.subscribers, found.published, found.history, found.max_behind) == (2, 4, 1, 2)
        assert [lag.subscriber for lag in found.lags] == [slow.id, quick.id]
        assert found.lags[0].behind == 2
        assert publisher.statistics().subscribers_refused == 0


async def test_a_sender_cannot_send_to_a_publisher(address: str) -> None:
    async with Publisher(address) as publisher, TensorSender(address) as sender:
        with pytest.raises(RefusedError, match="a Publisher listens at this address"):
            await sender.ready()
        assert publisher.statistics().subscribers_refused == 1


async def test_a_subscriber_cannot_subscribe_to_a_receiver(address: str) -> None:
    async with TensorReceiver(address) as receiver, Subscriber(address) as subscriber:
        with pytest.raises(RefusedError, match="a TensorReceiver listens at this address"):
            await subscriber.receive()
        assert receiver.statistics().senders_refused == 1
