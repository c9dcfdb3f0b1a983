"""A peer cannot exhaust the memory, descriptors, mappings or loop time of a receiver, nor delay others."""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from aiotensor import PeerLostError, RefusedError, TensorHandle, TensorQueue, TensorReceiver, TensorSender
from aiotensor.protocol.frames import (
    MAX_FRAMES,
    MAX_HELLO_BYTES,
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Detach,
    Discard,
    Hello,
    Put,
    ToReceiver,
    Welcome,
    encode,
)
from aiotensor.receiving.incoming import MAX_UNIDENTIFIED
from aiotensor.tensors.arena import _WHERE
from aiotensor.transports import queue, unix
from aiotensor.transports.endpoints import Endpoint
from aiotensor.transports.records import RecordSocket
from tests.frames import put
from tests.pairs import endpoint, pair
from tests.transports.unwritable import Unwritable
from verification.fuzz.listening import waiting_at
from verification.fuzz.speaking import Road, heard, road_to
from verification.fuzz.steps import RIGHT, STAND_IN, Step
from verification.fuzz.things import MEMORY_NAME, Things
from verification.patterns import BIG, pattern
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("link", "nothing_left_behind")

_PAGE = 4096


class Rogue:
    """A sender that writes arbitrary records, and reads nothing."""

    def __init__(self, road: Road) -> None:
        self.id = secrets.token_hex(16)
        self._road = road

    async def knock(self) -> None:
        """Connect, and send no hello."""
        await self._road.connect()
        await self.say()

    async def connect(self, first_message: int = 0) -> None:
        await self._road.connect()
        await self.say(Hello(VERSION, 1, STAND_IN, 4, 64 * _PAGE, first_message))

    async def say(self, *frames: ToReceiver, beside: Sequence[str] = ()) -> bool:
        return await self.say_bytes(encode(*frames), beside)

    async def say_bytes(self, record: bytes, beside: Sequence[str] = (), envelope: str = RIGHT) -> bool:
        return await self._road.say(Step(record.hex(), tuple(beside), envelope), self.id.encode())

    async def attach(self, segment: int = 0) -> None:
        await self.say(Attach(segment, "arena", _PAGE), beside=[f"sealed:{_PAGE}"])


@asynccontextmanager
async def _among_the_honest(
    **limits: int,
) -> AsyncIterator[tuple[TensorReceiver, Rogue, Endpoint, Things]]:
    """Open a receiver and a rogue, and check that an honest sender is served before and after the block."""
    with endpoint() as place, Things() as things:
        async with TensorReceiver(place, **limits) as receiver, TensorSender(place, 2) as honest:
            before = await honest.send(pattern(1, BIG))
            with road_to(place, things) as road:
                yield receiver, Rogue(road), place, things
            for seed, sent in ((1, before), (2, await honest.send(pattern(2, BIG)))):
                assert torch.equal(await receiver.receive(sent), pattern(seed, BIG))
            assert honest.statistics().receivers_lost == 0


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count(f"/memfd:{MEMORY_NAME} ")


def _is_lost(receiver: TensorReceiver, rogue: Rogue) -> bool:
    return receiver._incoming.link_of(rogue.id) is None and receiver.statistics().senders_lost == 1


def _there(message: int, segment: int = 0, **changes: object) -> Put:
    where = _WHERE.pack(segment, 0)
    return put(message=message, placement="arena", payload=where, block=message, last=True, **changes)


async def test_an_empty_record_breaks_the_protocol_and_is_no_end(caplog: pytest.LogCaptureFixture) -> None:
    async with _among_the_honest() as (receiver, rogue, _, _):
        await rogue.connect()
        await rogue.say_bytes(b"")
        await until(lambda: _is_lost(receiver, rogue))
        assert "broke the protocol" in caplog.text


@pytest.mark.parametrize("what", ["no prefix", "a pipe", "a file", "a listener", "nothing"])
async def test_a_record_that_is_no_introduction_on_a_queue_harms_nobody(what: str) -> None:
    envelope = {"no prefix": "none", "nothing": "hello without a pipe"}.get(what, f"hello with {what}")
    async with _among_the_honest() as (receiver, rogue, place, things):
        if isinstance(place, TensorQueue):  # elsewhere a record has no envelope
            await rogue.say_bytes(b"", envelope=envelope)
            await rogue.say_bytes(b"nonsense", envelope=envelope)
            await heard(place, things)
        assert receiver._incoming.link_of(rogue.id) is None


async def test_a_sender_that_does_not_read_its_answers_is_cut_off_at_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for links in (unix, queue):
        monkeypatch.setattr(links, "MAX_UNREAD_BYTES", 1 << 20)
    again = [put(block=2**63 - 1)] * MAX_FRAMES  # each is answered, since the message was discarded
    async with _among_the_honest() as (receiver, rogue, _, _):
        await rogue.connect()
        await rogue.say(put(), Discard(0))
        said = 0
        while not _is_lost(receiver, rogue):
            await rogue.say(*again)
            said += 1
            await asyncio.sleep(0)
        # Each frame has 11 bytes; a waiting record also counts with some overhead.
        assert said * MAX_FRAMES * 11 > 1 << 19, "it was cut off long before the limit"
        assert said * MAX_FRAMES < 300_000
        assert "does not read" in caplog.text
        with pytest.raises(PeerLostError, match="does not read"):
            await receiver.receive(TensorHandle(rogue.id, 1, 0, "uint8", (3,), "cpu"))


async def test_what_a_broken_link_had_mapped_is_unmapped_though_its_loss_is_remembered() -> None:
    async with _among_the_honest() as (receiver, rogue, place, things):
        await rogue.connect()
        await rogue.attach()
        await rogue.say(_there(0))
        await until(lambda: receiver.statistics().unclaimed_tensors == 2)
        assert _mapped() == 1
        await rogue.say(_there(1, shape=(_PAGE + 1,)))
        await until(lambda: _is_lost(receiver, rogue))
        await heard(place, things)
        await receiver._incoming.mappings.settle()
        assert _mapped() == 0
        with pytest.raises(PeerLostError) as caught:
            await receiver.receive(TensorHandle(rogue.id, 0, 0, "uint8", (3,), "cpu"))
        assert caught.value.__cause__ is not None
        assert caught.value.__cause__.__traceback__ is None


async def test_segments_that_are_detached_count_for_as_long_as_a_tensor_keeps_them() -> None:
    async with _among_the_honest() as (receiver, rogue, _, _):
        await rogue.connect()
        kept = []
        for number in range(8):
            await rogue.attach(number)
            await rogue.say(_there(number, number), Detach(number))
            kept.append(await receiver.receive(TensorHandle(rogue.id, number, 0, "uint8", (3,), "cpu")))
        assert _mapped() == 8
        kept.pop()
        await until(lambda: _mapped() == 7)
        await rogue.attach(8)  # one more mapping is allowed again
        await rogue.say(_there(8, 8), Detach(8))
        kept.append(await receiver.receive(TensorHandle(rogue.id, 8, 0, "uint8", (3,), "cpu")))
        await rogue.attach(9)
        await until(lambda: _is_lost(receiver, rogue))
        assert _mapped() == 8
        kept.clear()
        await until(lambda: receiver._incoming.mappings.lingering_bytes == 0)


async def test_memory_for_a_placement_that_is_unknown_is_refused() -> None:
    async with _among_the_honest() as (receiver, rogue, _, _):
        await rogue.connect()
        await rogue.say(Attach(0, "carrier pigeon", _PAGE), beside=[f"sealed:{_PAGE}"])
        await until(lambda: _is_lost(receiver, rogue))


async def test_messages_that_closed_senders_left_count_against_the_limit() -> None:
    with endpoint() as place:
        async with TensorReceiver(place, max_unclaimed_messages=4) as receiver:
            sent: list[TensorHandle] = []
            for _ in range(2):
                async with TensorSender(place, 2) as short:
                    sent += [await short.send(pattern(0, 3)) for _ in range(2)]
            await until(lambda: receiver.statistics().unclaimed_tensors == 4)
            await until(lambda: receiver.statistics().senders == 0)
            assert receiver.statistics().promised_messages == 4
            async with TensorSender(place, 1) as refused:
                with pytest.raises(RefusedError, match="max_unclaimed_messages=4"):
                    await _lost(refused)
            await receiver.receive(sent.pop())
            async with TensorSender(place, 1) as admitted:
                sent.append(await admitted.send(pattern(0, 3)))
                for handle in sent:
                    await receiver.receive(handle)
                await admitted.drain()


async def _lost(sender: TensorSender) -> None:
    """Send until the receiver has refused."""
    while True:
        await sender.send(pattern(0, 3))


async def test_who_says_nothing_takes_nobodys_place() -> None:
    async with _among_the_honest(max_senders=2) as (receiver, _, place, _):
        if isinstance(place, TensorQueue):
            return  # a queue's reader does not know a sender before its first record
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(place.removeprefix("unix://"))
            async with TensorSender(place) as second:
                assert torch.equal(await receiver.receive(await second.send(pattern(0, 3))), pattern(0, 3))
                assert receiver.statistics().senders_refused == 0


async def test_who_connects_without_end_leaves_the_loop_to_others() -> None:
    async with _among_the_honest() as (receiver, _, place, _):
        if isinstance(place, TensorQueue):
            return  # its reader counts records, including those of other senders
        path = place.removeprefix("unix://")
        knocking = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(100)]
        for sock in knocking:
            sock.connect(path)
        before = len(receiver._incoming._peers)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(receiver._incoming._peers) - before < 50
        await until(lambda: receiver.statistics().senders_refused == 100 - MAX_UNIDENTIFIED)
        for sock in knocking:
            sock.close()


async def test_silent_connections_take_no_senders_place() -> None:
    async with _among_the_honest() as (receiver, _, place, things):
        await until(lambda: receiver.statistics().senders == 1)
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(road_to(place, things)) for _ in range(MAX_UNIDENTIFIED + 10)]
            for road in silent:
                await Rogue(road).knock()
            told = [asyncio.create_task(road.answered()) for road in silent]
            await until(lambda: sum(task.done() for task in told) == 10)
            assert all(task.done() for task in told[:10])  # the oldest
            async with TensorSender(place) as sender:
                assert torch.equal(
                    await receiver.receive(await sender.send(pattern(3, BIG))), pattern(3, BIG)
                )
                assert sender.statistics().receivers_lost == 0
            for task in told:
                task.cancel()
            await asyncio.wait(told)


async def test_a_long_record_of_an_unidentified_connection_is_not_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _among_the_honest() as (receiver, rogue, _, _):
        await until(lambda: receiver.statistics().senders == 1)
        await rogue.knock()
        hello = Hello(VERSION, 1, STAND_IN, 4, 64 * _PAGE)
        await rogue.say(hello, put(payload=bytes(MAX_HELLO_BYTES), shape=(MAX_HELLO_BYTES,)))
        await until(lambda: bool(caplog.records))
        assert f"a record of more than {MAX_HELLO_BYTES} bytes" in caplog.text
        assert receiver.statistics().senders == 1


async def test_a_receiver_cannot_make_a_sender_write_longer_records_than_its_socket_takes() -> None:
    async with pair(max_concurrent_videos=200) as (sender, receiver):
        await sender.send(pattern(0, 3))
        await until(lambda: receiver.statistics().unclaimed_tensors == 1)
        link = receiver._incoming.link_of(sender.id)
        assert link is not None
        link.write(encode(Welcome(VERSION, os.getpid(), 2**63 - 1)))
        await receiver.receive(await sender.send(pattern(0, 3)))  # and the earlier record has been read
        await asyncio.gather(*(sender.send(pattern(seed, 1000)) for seed in range(100)))
        for _ in range(101):
            await anext(receiver)
        await settled(sender)
        assert sender.statistics().receivers_lost == 0


async def test_an_error_that_tells_of_a_broken_protocol_keeps_nothing_of_the_record() -> None:
    async with pair() as (sender, receiver):
        await sender.send(pattern(0, 3))
        await until(lambda: receiver.statistics().senders == 1)
        link = receiver._incoming.link_of(sender.id)
        assert link is not None
        link.write(b"nonsense")
        with pytest.raises(PeerLostError) as caught:
            await sender.drain()
        assert caught.value.__cause__ is not None
        assert caught.value.__cause__.__traceback__ is None


async def test_a_receiver_that_does_not_read_makes_a_sender_wait_and_not_grow() -> None:
    with endpoint() as place:
        if isinstance(place, TensorQueue):
            await _send_to_nobody(place)  # the queue can be read, by us, and is not
        else:
            with waiting_at(place):
                await _send_to_nobody(place)


async def _send_to_nobody(place: Endpoint) -> None:
    """Send much more than the kernel buffers, then give up."""
    sender = await TensorSender(place, 2000).__aenter__()
    link = sender._outgoing._link
    sending = [asyncio.create_task(sender.send(pattern(seed, 1000))) for seed in range(1000)]
    await until(lambda: not link.is_ready)
    for _ in range(100):
        await asyncio.sleep(0)
    sock = link._queue if isinstance(link, queue.QueueSenderLink) else link._sock  # type: ignore[attr-defined]
    assert isinstance(sock, RecordSocket)
    assert 0 < sock._unsent_bytes <= 2 * MAX_RECORD_BYTES
    assert sum(task.done() for task in sending) < 100
    for task in sending:
        task.cancel()
    ended = await asyncio.gather(*sending, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError | TensorHandle) for end in ended)
    assert sock._unsent_bytes <= 3 * MAX_RECORD_BYTES
    closing = asyncio.create_task(sender.aclose())  # waits to send its closing record
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])


async def test_a_sender_that_cannot_be_welcomed_takes_nobodys_place() -> None:
    async with _among_the_honest() as (receiver, _, _, _):
        await until(lambda: receiver.statistics().senders == 1)
        link = Unwritable(receiver)
        receiver._incoming.link_opened(link)
        receiver._incoming.record_arrived(link, encode(Hello(VERSION, 1, "s", 4, _PAGE)), [])
        assert receiver.statistics().senders == 1
        assert receiver.statistics().promised_messages == 2
