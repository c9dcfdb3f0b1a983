"""A sender replies to requests for its statistics once the transport is writable, whatever their number."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from aiotensor import TensorSender, WouldBlockError
from aiotensor.protocol.frames import MAX_FRAMES, StatisticsReply, StatisticsRequest
from tests.bare_peers import BareReceiver, bare_receiver
from verification.internals import session_of
from verification.patterns import pattern
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@asynccontextmanager
async def clogged(address: str) -> AsyncIterator[tuple[TensorSender, BareReceiver, int]]:
    """Connect a sender to a receiver that does not read, until the sender queues frames."""
    async with bare_receiver(address) as (sender, receiver):
        sent = 0
        while True:
            try:
                sender.send_nowait(pattern(sent, 1000))
            except WouldBlockError:
                break
            sent += 1
            await asyncio.sleep(0)  # the frames of one iteration are written at its end
        yield sender, receiver, sent


class Writes:
    """Count the records that a sender writes while the block lasts."""

    def __init__(self, sender: TensorSender, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        transport = session_of(sender).transport
        write = transport.write

        def counted(data: bytes, descriptors: Sequence[int] = ()) -> None:
            self.count += 1
            write(data, descriptors)

        monkeypatch.setattr(transport, "write", counted)


async def test_requests_of_one_iteration_have_one_reply(address: str) -> None:
    async with bare_receiver(address) as (sender, receiver):
        await sender.send(pattern(0, 3))
        await receiver.say(*[StatisticsRequest()] * MAX_FRAMES)
        [reply] = await receiver.replies(1)
        assert reply.statistics.in_flight == 1
        await receiver.say(StatisticsRequest())
        assert len(await receiver.replies(1)) == 1
        with pytest.raises(BlockingIOError):
            receiver.sock.recv(1)


async def test_statistics_requests_of_a_receiver_that_does_not_read_get_one_reply(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with clogged(address) as (sender, receiver, sent):
        writes = Writes(sender, monkeypatch)
        for _ in range(20):
            await receiver.say(*[StatisticsRequest()] * MAX_FRAMES)
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert writes.count == 0
        [reply] = await receiver.replies(1)
        assert reply.statistics.in_flight == sent
        assert writes.count == 1
        with pytest.raises(BlockingIOError):
            receiver.sock.recv(1)


async def test_a_pending_reply_ends_with_its_receiver(address: str) -> None:
    async with clogged(address) as (sender, receiver, sent):
        await receiver.say(StatisticsRequest())
        receiver.sock.close()
        await until(lambda: sender.statistics().receivers_lost == 1)
        assert sender.statistics().in_flight == 0
        assert sent > 0


async def test_a_pending_reply_ends_with_its_sender(address: str) -> None:
    async with clogged(address) as (sender, receiver, _):
        await receiver.say(StatisticsRequest())
        closing = asyncio.create_task(sender.aclose())  # which waits to write its last record
        for _ in range(10):
            await asyncio.sleep(0)
        assert not closing.done()
        frames = await receiver.read_all()
        await closing
        assert not [frame for frame in frames if isinstance(frame, StatisticsReply)]
