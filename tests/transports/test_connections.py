"""Connections over every transport: records and descriptors in both directions, and their end."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import MAX_UNREAD_BYTES
from aiotensor.transports.endpoints import Endpoint
from tests import selection
from tests.transports.ends import End, fill, is_open, turns
from tests.transports.parties import connected_over
from verification.places import LINKS

_NUMBER_BYTES = 4  # of a record that `fill` writes


@pytest.fixture(params=selection.LINKS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    with LINKS[request.param].place() as place:
        yield place.endpoint


@asynccontextmanager
async def both_ways(endpoint: Endpoint, writer: str) -> AsyncIterator[tuple[End, End]]:
    """Return the end that writes and the end that reads."""
    async with connected_over(endpoint) as (connecting, accepted):
        yield (connecting, accepted) if writer == "connecting" else (accepted, connecting)


on_one_machine = pytest.mark.parametrize("endpoint", selection.LOCAL_LINKS, indirect=True)
directions = pytest.mark.parametrize("writer", ["connecting", "accepted"])


@on_one_machine
@directions
async def test_queued_records_arrive_in_order_with_copies_of_their_descriptors(
    writer: str, endpoint: Endpoint
) -> None:
    async with both_ways(endpoint, writer) as (near, far):
        count = fill(near.transport)
        reading_end, writing_end = os.pipe()
        near.transport.write(count.to_bytes(_NUMBER_BYTES), [writing_end])
        os.close(writing_end)
        await near.resumed.wait()
        records = [await far.arrived.get() for _ in range(count + 1)]

        assert [int.from_bytes(data[:_NUMBER_BYTES]) for data, _ in records] == list(range(count + 1))
        assert [len(descriptors) for _, descriptors in records] == [0] * count + [1]
        assert not os.get_inheritable(records[-1][1][0])
        close_all(records[-1][1])
        assert os.read(reading_end, 1) == b"", "the copies are closed"
        os.close(reading_end)
        assert near.resumptions == 1


@directions
async def test_the_last_records_arrive_before_the_end_is_reported(writer: str, endpoint: Endpoint) -> None:
    async with both_ways(endpoint, writer) as (near, far):
        for number in range(20):
            near.transport.write(bytes([number]))
        near.transport.close()
        await far.was_lost.wait()

        assert [await far.read() for _ in range(far.arrived.qsize())] == [bytes([n]) for n in range(20)]
        assert far.transport.is_closed
        assert len(far.lost) == 1
        assert near.lost == []


@directions
async def test_a_full_connection_whose_peer_closes_ends_once_and_closes_queued_descriptors(
    writer: str, endpoint: Endpoint
) -> None:
    async with both_ways(endpoint, writer) as (near, far):
        fill(near.transport)
        reading_end, writing_end = os.pipe()
        near.transport.write(b"queued", [writing_end])
        os.close(writing_end)
        far.transport.close()
        await near.was_lost.wait()

        assert os.read(reading_end, 1) == b""
        os.close(reading_end)
        near.transport.write(b"too late")
        await turns()
        assert len(near.lost) == 1


@directions
async def test_nothing_has_an_effect_after_closing(writer: str, endpoint: Endpoint) -> None:
    async with both_ways(endpoint, writer) as (near, far):
        reading_end, writing_end = os.pipe()
        near.transport.close()
        near.transport.close()
        near.transport.write(b"too late", [writing_end])
        near.transport.start(near)
        near.transport.read_now()
        far.transport.write(b"to nobody")
        await far.was_lost.wait()

        assert near.transport.is_closed
        assert is_open(writing_end)
        assert (near.arrived.qsize(), near.lost, near.resumptions) == (0, [], 0)
        close_all([reading_end, writing_end])


@directions
async def test_each_side_queues_a_limited_number_of_bytes(writer: str, endpoint: Endpoint) -> None:
    record = bytes(1 << 15)
    async with both_ways(endpoint, writer) as (near, far):
        near.transport.limit_queue(2 * MAX_UNREAD_BYTES)
        count = fill(near.transport)
        for _ in range(MAX_UNREAD_BYTES // len(record) + 1):
            near.transport.write(record)
        near.transport.limit_queue(MAX_UNREAD_BYTES)
        with pytest.raises(OSError, match="does not read"):
            near.transport.write(record)
        await asyncio.wait_for(near.resumed.wait(), 20)
        numbers = [int.from_bytes((await far.read())[:_NUMBER_BYTES]) for _ in range(count)]
        assert numbers == list(range(count))
        assert far.lost == near.lost == []
