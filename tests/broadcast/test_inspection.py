"""Inspect a publisher: by `inspect`, and by `aiotensor top`."""

import asyncio
import io
import json
import socket
import sys
from typing import Any

import pytest
from rich.console import Console

from aiotensor import RefusedError, TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, Subscriber, SubscriberLag
from aiotensor.cli.top import publishers
from aiotensor.inspection import PublisherInspection, inspect
from tests.broadcast.audiences import Broadcasts
from verification.patterns import BIG, pattern

PATIENCE_S = 20.0


async def top(*arguments: str) -> str:
    """Run `aiotensor top`, and return its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aiotensor", "top", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_an_inspection_has_the_statistics_of_the_publisher(address: str) -> None:
    async with Broadcasts(address).open(2, slow="drop", max_behind=2, history=1) as (
        publisher,
        [slow, quick],
    ):
        for number in range(4):
            await publisher.publish(pattern(number, BIG))
            await quick.receive()
        inspection = await inspect(address, patience_s=PATIENCE_S)
        assert isinstance(inspection, PublisherInspection)
        assert inspection.publisher == publisher.id
        found = inspection.statistics
        assert (found.subscribers, found.published, found.history, found.max_behind) == (2, 4, 1, 2)
        assert [lag.subscriber for lag in found.lags] == [slow.id, quick.id]
        assert found.lags[0].behind == 2
        assert publisher.statistics().subscribers_refused == 0


async def test_top_writes_a_line_for_each_subscriber(address: str) -> None:
    async with Broadcasts(address).open(2, max_behind=4) as (publisher, [slow, quick]):
        for number in range(3):
            await publisher.publish(pattern(number, BIG))
            await quick.receive()
        first, second, third = (await top(address)).splitlines()
        assert f"at {address}: 2 of 64 subscribers, " in first
        assert "no call waits, 3 publications (2.3 MiB), 0 kept, 0 dropped, 0 lost, 0 refused" in first
        assert f"({slow.id[:6]}): 3 of 4 behind for " in second
        assert f"({quick.id[:6]}): 0 of 4 behind, " in third
        assert third.endswith("3 delivered, 0 dropped")


async def test_top_writes_json_with_rates(address: str) -> None:
    async with Broadcasts(address).open(1, slow="drop") as (publisher, [subscriber]):

        async def publish() -> None:
            while True:
                await publisher.publish(b"x")
                await asyncio.sleep(0.01)

        publishing = asyncio.create_task(publish())
        try:
            found: dict[str, Any] = json.loads(await top(address, "--json", "--interval", "0.2"))
        finally:
            publishing.cancel()
        assert found["address"] == address
        assert found["publisher"] == publisher.id
        assert found["published"]["publications_per_s"] > 0
        assert found["statistics"]["lags"][0]["subscriber"] == subscriber.id


def inspection(lags: tuple[SubscriberLag, ...], at: float = 1.0, published: int = 10) -> PublisherInspection:
    statistics = Publisher("unix:///nowhere/s").statistics()
    fields = {name: getattr(statistics, name) for name in statistics.__struct_fields__}
    fields |= {"lags": lags, "subscribers": len(lags), "published": published}
    return PublisherInspection("p" * 32, 7, type(statistics)(**fields), at)


def drawn(now: PublisherInspection, before: PublisherInspection | None = None, height: int = 20) -> list[str]:
    console = Console(width=100, height=height, record=True, file=io.StringIO())
    console.print(publishers.as_screen("unix:///a", before, now, height))
    return console.export_text().splitlines()


def test_the_screen_has_a_row_for_each_subscriber_that_fits() -> None:
    lags = tuple(SubscriberLag(f"{number:032}", 100 + number, 3, 1.5, 1 << 20, 5, 2) for number in range(30))
    lines = drawn(inspection(lags), inspection((), 0.5, 5))
    assert lines[0].startswith("publisher pid 7  unix:///a")
    assert "published/s 10.0" in lines[1]
    assert lines[3].split() == ["pid", "subscriber", "behind", "for", "memory", "delivered", "dropped"]
    assert lines[4].split() == ["100", "000000", "3/8", "1.5", "s", "1.0M", "5", "2"]
    assert len(lines) <= 20
    assert lines[-1].startswith("and 16 more")
    assert "no subscriber is connected" in drawn(inspection(()))[-1]


def test_rates_need_two_inspections_of_one_publisher() -> None:
    first, second = inspection((), 1.0, 10), inspection((), 3.0, 30)
    assert publishers.rate(None, second) is None
    assert publishers.rate(second, first) is None
    rate = publishers.rate(first, second)
    assert rate is not None
    assert rate.publications_per_s == 10


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


async def test_an_unidentified_connection_does_not_affect_subscribers(address: str) -> None:
    async with Broadcasts(address).open(1) as (publisher, [subscriber]):
        for record in (b"\x91\x90", b"0" * 5000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rogue:
                rogue.connect(address.removeprefix("unix://"))
                rogue.send(record)
        await publisher.publish(b"fine")
        assert (await subscriber.receive()).message == b"fine"
