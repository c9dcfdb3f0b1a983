"""Records that travel with the bytes of a tensor between machines."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from aiotensor.errors import ProtocolError
from aiotensor.protocol.moves import RecordWindow
from aiotensor.protocol.network import (
    BYE,
    DATA,
    RECORD,
    Ack,
    Area,
    Step,
    encode_ack,
    encode_data,
    encode_step,
    read_ack,
)
from aiotensor.transports.base import MAX_DATA_BYTES, Mover, Transport
from aiotensor.transports.tcp.batches import BATCH_BYTES
from aiotensor.transports.tcp.transport import TcpTransport
from tests.transports.ends import End, fill
from tests.transports.parties import connected_over
from verification.places import endpoint

# Sizes that share a message with their record, and sizes that are the next message.
_TOGETHER = [1, 7, 8, 1000, BATCH_BYTES - 1]
_NEXT = [BATCH_BYTES, BATCH_BYTES + 1, MAX_DATA_BYTES]

_MAX_RECORD_BYTES = 2000

directions = pytest.mark.parametrize("writer", ["connecting", "accepted"])


def mover_of(transport: Transport) -> Mover:
    """Return the mover of a transport between machines."""
    assert transport.mover is not None
    return transport.mover


def some_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


class Reader(End):
    """The handler of a transport that also receives data.

    Attributes:
        messages: the records, with their data or None.
    """

    def __init__(self, transport: Transport) -> None:
        self.messages: asyncio.Queue[tuple[bytes, bytes | None]] = asyncio.Queue()
        super().__init__(transport)
        mover_of(transport).receive_data(self._data_received)

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        self.messages.put_nowait((bytes(data), None))

    def _data_received(self, record: memoryview, data: memoryview) -> None:
        self.messages.put_nowait((bytes(record), bytes(data)))

    def read_all(self) -> list[tuple[bytes, bytes | None]]:
        """Return the messages that have arrived."""
        return [self.messages.get_nowait() for _ in range(self.messages.qsize())]


@asynccontextmanager
async def connected(writer: str) -> AsyncIterator[tuple[End, End]]:
    """Return the end that writes and the end that reads."""
    with endpoint("tcp") as place:
        async with connected_over(place) as (connecting, accepted):
            yield (connecting, accepted) if writer == "connecting" else (accepted, connecting)


# Two ends


@directions
async def test_data_of_all_sizes_arrives_in_order_although_its_source_changes_at_once(writer: str) -> None:
    source = random.Random(0)
    async with connected(writer) as (near, far):
        reader = Reader(far.transport)
        mover = mover_of(near.transport)
        near.transport.limit_queue(1 << 30)
        sent: list[tuple[bytes, bytes | None]] = []
        for number in range(300):
            record = number.to_bytes(4) + bytes(source.choice([0, 1, 1000, 10_000]))
            nbytes = source.choice([0, *_TOGETHER, *_TOGETHER, _NEXT[0]])
            if nbytes:
                data = bytearray(some_bytes(nbytes, number))
                sent.append((record, bytes(data)))
                mover.write_with_data(record, memoryview(data))
                data[:] = bytes(nbytes)
            else:
                sent.append((record, None))
                near.transport.write(record)
        for expected in sent:
            assert await reader.messages.get() == expected
        assert near.resumptions == 1  # some of it has waited for credit
        assert near.lost == far.lost == []


@pytest.mark.parametrize("nbytes", [1000, BATCH_BYTES])
async def test_data_without_a_function_to_receive_it_is_a_violation(nbytes: int) -> None:
    async with connected("accepted") as (near, far):
        mover_of(near.transport).write_with_data(b"a record", memoryview(bytes(nbytes)))
        near.transport.write(b"behind")
        await far.was_lost.wait()
        await near.was_lost.wait()

        assert far.lost == ["it sent the bytes of a tensor with a record"]
        assert far.arrived.empty()
        [reason] = near.lost
        assert "this side broke the protocol: it sent the bytes of a tensor" in reason


# One end, and the messages of a peer


class Sent:
    """An end, and the messages that it has sent."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.is_shut = False
        self.transport = TcpTransport(
            lambda message, copies: self.messages.append(bytes(message)),
            self._shut,
            lambda: False,
            _MAX_RECORD_BYTES,
        )

    def _shut(self) -> None:
        self.is_shut = True

    def receive(self, *messages: bytes) -> None:
        for message in messages:
            self.transport.receive(memoryview(message))


def with_data(record: bytes, data: bytes) -> bytes:
    return encode_data(record) + data


async def test_bytes_in_the_next_message_are_not_read_as_a_message() -> None:
    sent = Sent()
    reader = Reader(sent.transport)
    for data in (bytes([BYE]), bytes([RECORD]) + b"x", bytes([99]), encode_data(b"other"), b""):
        sent.receive(encode_data(b"record"), data)
        assert reader.read_all() == [(b"record", data)]
    assert reader.lost == []
    sent.transport.close()


class SlowLanding:
    """Memory that the first bytes wait for."""

    def __init__(self) -> None:
        self.resume: Callable[[str], None] | None = None

    def store(
        self, block: int, nbytes: int, start: int, data: memoryview, resume: Callable[[str], None]
    ) -> bool:
        is_first = self.resume is None
        self.resume = resume
        return not is_first

    def free(self, block: int) -> None:
        pass


async def test_data_behind_a_step_that_waits_for_memory_arrives_after_it() -> None:
    sent = Sent()
    reader = Reader(sent.transport)
    landing = SlowLanding()
    sent.transport.land(0, landing)
    sent.receive(
        encode_step(Step(Area(0, 0), 3, 0, 3, False)) + b"abc",
        with_data(b"first", b"data"),
        encode_data(b"second"),
        b"its data",
    )
    assert reader.read_all() == []
    assert landing.resume is not None
    landing.resume("")
    assert reader.read_all() == [(b"first", b"data"), (b"second", b"its data")]
    sent.transport.close()


async def test_a_wrong_record_with_data_is_a_violation() -> None:
    for message, reason in (
        (bytes([DATA]), "incomplete header of 1 bytes"),
        (encode_data(b"record")[:-1], "15 bytes of a record that ends at byte 14"),
        (
            with_data(bytes(_MAX_RECORD_BYTES + 1), b"data"),
            f"a record of more than {_MAX_RECORD_BYTES} bytes",
        ),
        (encode_data(bytes(_MAX_RECORD_BYTES + 1)), f"a record of more than {_MAX_RECORD_BYTES} bytes"),
    ):
        sent = Sent()
        reader = Reader(sent.transport)
        sent.receive(message, with_data(b"a record", b"data"))

        assert reader.read_all() == []
        assert len(reader.lost) == 1
        assert reason in reader.lost[0]
        assert sent.is_shut
        [bye] = sent.messages
        assert bye[0] == BYE
        assert f"this side broke the protocol: {reader.lost[0]}" == bye[1:].decode()


async def test_records_with_data_use_the_credit_of_records() -> None:
    sent = Sent()
    reader = Reader(sent.transport)
    sizes: list[int] = []
    while not sent.messages:
        sizes.append(len(sizes) % 10)
        sent.receive(encode_data(bytes(sizes[-1])), bytes(500))
    [acknowledgement] = sent.messages
    window = RecordWindow()
    for size in sizes:
        assert window.has_credit(size)
        window.sent(size)
    window.acknowledged(read_ack(acknowledgement).records)  # which are exactly as many as were sent
    with pytest.raises(ProtocolError):
        window.acknowledged(read_ack(acknowledgement).records + 1)
    assert len(reader.read_all()) == len(sizes)
    sent.transport.close()


def exchange(*ends: Sent) -> None:
    """Pass the messages of two ends to each other until there are none."""
    while any(end.messages for end in ends):
        for end, other in (ends, ends[::-1]):
            messages, end.messages[:] = list(end.messages), []
            other.receive(*messages)


async def test_queued_data_counts_towards_the_limit_of_the_queue() -> None:
    sent, peer = Sent(), Sent()
    writer, reader = End(sent.transport), Reader(peer.transport)
    sent.transport.limit_queue(10_000)
    for resumptions in (1, 2):
        count = fill(sent.transport)
        sent.transport.write_with_data(b"record", memoryview(bytes(5000)))
        with pytest.raises(OSError, match="does not read"):
            sent.transport.write_with_data(b"rejected", memoryview(bytes(5000)))
        exchange(sent, peer)
        assert writer.resumptions == resumptions
        assert reader.read_all()[count:] == [(b"record", bytes(5000))]
    for end in (sent, peer):
        end.transport.close()


# The end


@pytest.mark.parametrize("end", ["close", "finish", "BYE", "loss"])
async def test_data_after_the_end_has_no_effect(end: str) -> None:
    sent = Sent()
    reader = Reader(sent.transport)
    match end:
        case "close":
            sent.transport.close()
        case "finish":
            sent.transport.finish()
        case "BYE":
            sent.receive(bytes([BYE]))
        case "loss":
            sent.transport.connection_ended("it is gone")
    messages = list(sent.messages)
    for nbytes in (10, BATCH_BYTES):
        sent.transport.write_with_data(b"a record", memoryview(bytes(nbytes)))
    sent.receive(encode_ack(Ack(0, 0)))  # with which queued data would be sent
    assert sent.messages == messages
    if end != "finish":  # which ends writing only
        sent.receive(with_data(b"a record", b"data"), encode_data(b"another"), b"data")
        assert reader.read_all() == []
    sent.transport.close()
    assert sent.is_shut


async def test_finish_sends_queued_data_first() -> None:
    sent, peer = Sent(), Sent()
    reader = Reader(peer.transport)
    End(sent.transport)
    count = fill(sent.transport)
    sent.transport.write_with_data(b"record", memoryview(b"data"))
    sent.transport.finish()
    exchange(sent, peer)
    assert reader.read_all()[count:] == [(b"record", b"data")]
    assert reader.lost == ["it closed the connection"]
    sent.transport.close()
