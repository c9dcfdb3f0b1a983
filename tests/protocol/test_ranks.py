"""The connection between two ranks without sockets: its model, limits and violations."""

from collections import Counter, deque
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.protocol.connection import Close, ConnectionState
from aiotensor.protocol.frames import (
    ARENA,
    INLINE,
    MAX_FRAMES,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    OUT_OF_BAND,
    VERSION,
    Attach,
    Put,
    Release,
    Taken,
    encode_record,
)
from aiotensor.protocol.ranks import (
    FROM_RANK,
    LEAST_MESSAGE_BYTES,
    FromRank,
    Join,
    PutNone,
    RankConnection,
    counted,
)
from aiotensor.protocol.segments import LARGEST_PAGE_BYTES, MAX_SEGMENTS
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from tests.frames import put
from tests.selection import COMPLETE

OPENING, OPEN, CLOSED = ConnectionState

MAX_BYTES = 4 * LEAST_MESSAGE_BYTES
LARGEST_SEGMENT = ADDRESSES_PER_BYTE * (MAX_BYTES + LARGEST_PAGE_BYTES)


def join(max_bytes: int = MAX_BYTES, version: int = VERSION) -> Join:
    """Return the first frame of the other end."""
    return Join(version, 43, max_bytes)


def new(max_bytes: int = MAX_BYTES) -> RankConnection:
    """Return an end whose own `Join` was sent."""
    connection = RankConnection(Join(VERSION, 42, max_bytes), "rank 1")
    assert sent(connection) == [Join(VERSION, 42, max_bytes)]
    return connection


def joined(*frames: FromRank, max_bytes: int = MAX_BYTES) -> RankConnection:
    """Return an open end that has received these frames, each in its own record."""
    connection = new(max_bytes)
    for frame in (join(max_bytes), *frames):
        assert receive(connection, frame) == [frame]
    return connection


def sent(connection: RankConnection) -> list[FromRank]:
    """Return the frames that an end has to send."""
    return [frame for record in connection.data_to_send() for frame in FROM_RANK.decode(record)]


def receive(connection: RankConnection, *frames: object) -> list[FromRank]:
    """Pass a record to an end, and return the frames that it accepts."""
    return connection.receive(encode_record(frames))


def inline(message: int, nbytes: int) -> Put:
    """Return a message whose tensor is in its frame."""
    return put(message=message, shape=(nbytes,), payload=bytes(nbytes), last=True)


def in_segment(message: int, block: int = 0) -> Put:
    """Return a message whose tensor is in shared memory."""
    return put(message=message, placement=ARENA, payload=bytes(16), block=block, last=True)


def with_data(message: int) -> Put:
    """Return a message whose bytes the transport carries."""
    return put(message=message, placement=OUT_OF_BAND, payload=b"", last=True)


# The model

# As many as need several records, or only a few messages.
LIMITS = [LEAST_MESSAGE_BYTES, 4 * LEAST_MESSAGE_BYTES, 100 * LEAST_MESSAGE_BYTES]


class Written(NamedTuple):
    """A record that was written, and the number of bytes that travel with it, or None."""

    record: bytes
    nbytes: int | None = None


class End:
    """One end, with the bookkeeping of its owner.

    Attributes:
        number: the number of the next message.
        in_flight: the bytes that each message counts for, until the peer has taken it.
        blocks: the bytes that each block counts for, until the peer has released it.
        announced: the messages that were sent, in order.
        arrived: the messages of the peer that were not taken.
        leases: the blocks of the peer that are in use.
        received: the messages of the peer, in order.
        on_its_way: the records for this end.
    """

    def __init__(self, pid: int, max_bytes: int) -> None:
        self.connection = RankConnection(Join(VERSION, pid, max_bytes), f"rank {pid}")
        self.max_bytes = max_bytes
        self.number = self.segments = self.attached = 0
        self.in_flight: dict[int, int] = {}
        self.blocks: Counter[int] = Counter()
        self.announced: list[int] = []
        self.arrived: dict[int, int | None] = {}
        self.leases: list[int] = []
        self.received: list[int] = []
        self.on_its_way: deque[Written] = deque()

    def can_send(self, nbytes: int) -> bool:
        """Return whether the limit allows a message of this size now."""
        in_use = sum(self.in_flight.values()) + sum(self.blocks.values())
        return in_use + counted(nbytes) <= self.max_bytes

    def next_number(self, gap: int) -> int:
        """Number the next message, behind some that have failed."""
        number = self.number + gap
        self.number = number + 1
        self.announced.append(number)
        return number


class TwoRanks(RuleBasedStateMachine):
    """Two `RankConnection`, each of which sends messages to the other.

    An honest rank never causes a `ProtocolError`, which would fail the test. All messages arrive in the order
    in which they were sent. In the end neither rank counts a byte for them.
    """

    @initialize(max_bytes=st.sampled_from(LIMITS))
    def begin(self, max_bytes: int) -> None:
        self.ends = (End(1, max_bytes), End(2, max_bytes))
        self.is_closed = False

    def other(self, end: End) -> End:
        return self.ends[1 - self.ends.index(end)]

    def is_open(self, end: End) -> bool:
        return end.connection.peer_pid is not None and not self.is_closed

    # Commands. An owner gives them only after the `Join` of the peer.

    @rule(which=st.integers(0, 1), gap=st.integers(0, 2), nbytes=st.sampled_from([None, 0, 3, 3000, 8192]))
    def send_in_a_frame(self, which: int, gap: int, nbytes: int | None) -> None:
        end = self.ends[which]
        if self.is_open(end) and end.can_send(nbytes or 0):
            number = end.next_number(gap)
            end.in_flight[number] = counted(nbytes or 0)
            end.connection.put(PutNone(number) if nbytes is None else inline(number, nbytes))

    @rule(which=st.integers(0, 1), gap=st.integers(0, 2), nbytes=st.sampled_from([1, 5000, 100_000]))
    def send_with_data(self, which: int, gap: int, nbytes: int) -> None:
        end = self.ends[which]
        if self.is_open(end) and end.can_send(nbytes):
            number = end.next_number(gap)
            end.in_flight[number] = counted(nbytes)
            *before, last = end.connection.put_with_data(with_data(number))
            self.other(end).on_its_way += [*map(Written, before), Written(last, nbytes)]

    @rule(which=st.integers(0, 1), gap=st.integers(0, 2), block=st.integers(0, 5))
    def send_in_a_block(self, which: int, gap: int, block: int) -> None:
        end = self.ends[which]
        if self.is_open(end) and end.segments and block not in end.blocks and end.can_send(5000):
            number = end.next_number(gap)
            end.in_flight[number] = 0
            end.blocks[block] = counted(5000)
            end.connection.put(in_segment(number, block))

    @rule(which=st.integers(0, 1))
    def attach(self, which: int) -> None:
        end = self.ends[which]
        if self.is_open(end) and end.segments < MAX_SEGMENTS:
            self.write(which)
            record = end.connection.attach(end.segments, ARENA, end.max_bytes)
            self.other(end).on_its_way.append(Written(record))
            end.segments += 1

    @rule(which=st.integers(0, 1), data=st.data())
    def take(self, which: int, data: st.DataObject) -> None:
        """Take a message; copies may end in another order than messages arrive."""
        end = self.ends[which]
        if end.arrived:
            number = data.draw(st.sampled_from(list(end.arrived)))
            block = end.arrived.pop(number)
            if block is not None:
                end.leases.append(block)
            end.connection.taken(number)

    @precondition(lambda self: any(end.leases for end in self.ends))
    @rule(which=st.integers(0, 1))
    def release(self, which: int) -> None:
        end = self.ends[which]
        if end.leases:
            end.connection.release(end.leases.pop(0))

    @rule(which=st.integers(0, 1))
    def write(self, which: int) -> None:
        end = self.ends[which]
        self.other(end).on_its_way += map(Written, end.connection.data_to_send())

    @rule(which=st.integers(0, 1), is_meant=st.integers(0, 19))
    def close(self, which: int, is_meant: int) -> None:
        """Close one end; seldom, since not much happens afterwards."""
        if is_meant == 19:
            self.is_closed = True
            self.ends[which].connection.close(Close())

    # Records that arrive

    @rule(which=st.integers(0, 1), count=st.integers(1, 5))
    def deliver(self, which: int, count: int) -> None:
        end = self.ends[which]
        for _ in range(min(count, len(end.on_its_way))):
            self.deliver_one(end)

    def deliver_one(self, end: End) -> None:
        record, nbytes = end.on_its_way.popleft()
        assert len(record) <= MAX_RECORD_BYTES
        frames = end.connection.receive(record)
        out_of_band = [one for one in frames if isinstance(one, Put) and one.placement == OUT_OF_BAND]
        if frames and not self.is_closed:
            assert len(out_of_band) == (nbytes is not None)
        for frame in frames:
            match frame:
                case Put() | PutNone():
                    if isinstance(frame, Put) and frame.placement == OUT_OF_BAND and nbytes is not None:
                        end.connection.count_data(frame.message, nbytes)
                    end.received.append(frame.message)
                    end.arrived[frame.message] = frame.block if isinstance(frame, Put) else None
                case Taken():
                    for number in frame.messages:
                        del end.in_flight[number]
                case Release():
                    for block in frame.blocks:
                        del end.blocks[block]
                case Attach():
                    end.attached += 1
                case Join() | Close():
                    pass

    # Invariants, and the balance in the end

    @invariant()
    def messages_arrive_in_their_order(self) -> None:
        for end in getattr(self, "ends", ()):
            announced = self.other(end).announced
            assert end.received == announced[: len(end.received)]

    def teardown(self) -> None:
        if not hasattr(self, "ends"):
            return  # no rule has run
        self.settle()
        if self.is_closed:
            assert all(end.connection.is_closed for end in self.ends)
            return
        for end in self.ends:
            for number, block in end.arrived.items():
                end.connection.taken(number)
                if block is not None:
                    end.leases.append(block)
            for block in end.leases:
                end.connection.release(block)
        self.settle()
        for end in self.ends:
            assert end.received == self.other(end).announced
            assert end.attached == self.other(end).segments
            assert not end.in_flight
            assert not end.blocks
        for end in self.ends:  # neither rank counts a byte of the other any more
            peer, number = self.other(end).connection, end.number
            for record in end.connection.put_with_data(with_data(number)):
                peer.receive(record)
            peer.count_data(number, end.max_bytes)

    def settle(self) -> None:
        """Deliver all records until neither end has any to send."""
        for which in (0, 1):
            self.write(which)
        while any(end.on_its_way for end in self.ends):
            for which in (0, 1):
                self.deliver(which, 1)
                self.write(which)


TestHonestRanks = pytest.mark.promise(27)(TwoRanks.TestCase)
TestHonestRanks.settings = settings(max_examples=200 if COMPLETE else 30, stateful_step_count=60)


# Joining and closing


def test_the_first_record_is_the_join_alone() -> None:
    connection = RankConnection(join(), "rank 1")
    connection.put(PutNone(0))
    connection.release(0)

    first, second = connection.data_to_send()
    assert FROM_RANK.decode(first) == [join()]
    assert FROM_RANK.decode(second) == [PutNone(0), Release((0,))]


@pytest.mark.parametrize(
    ("join_of_peer", "text"),
    [
        (join(MAX_BYTES + 1), r"opened the pipe with max_bytes=16385, but this rank with 16384: pass"),
        (join(0), r"opened the pipe with max_bytes=0, but this rank with 16384: pass"),
        (
            join(1, VERSION + 1),
            rf"refused this rank: rank 1 has protocol version {VERSION + 1}, and this rank has version ",
        ),
    ],
    ids=["a higher limit", "no bytes", "another version"],
)
def test_a_peer_with_another_limit_or_version_is_refused(join_of_peer: Join, text: str) -> None:
    connection = new()
    assert connection.state is OPENING
    with pytest.raises(RefusedError, match=rf"^rank 1 \(pid 43\) {text}") as caught:
        receive(connection, join_of_peer)
    assert caught.value.pid == 43
    assert connection.state is CLOSED
    assert receive(connection, join()) == []


def test_messages_and_answers_precede_a_close_and_nothing_follows_it() -> None:
    connection = joined(PutNone(0))
    connection.taken(0)
    connection.release(3)
    connection.put(PutNone(0))
    connection.close(Close())
    assert sent(connection) == [PutNone(0), Taken((0,)), Release((3,)), Close()]
    assert receive(connection, PutNone(0)) == connection.receive(b"nonsense") == []

    connection = joined()
    assert receive(connection, PutNone(0), Close(), PutNone(0), join()) == [PutNone(0), Close()]
    connection.lost("it died", is_retried=False)
    connection.put(PutNone(0))
    assert connection.put_with_data(with_data(1)) == []
    connection.taken(0)
    connection.taken(0)
    connection.release(7)
    connection.close(Close("again"))
    assert sent(connection) == []


# Records and segments


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from([0, 3, 2048, MAX_INLINE_BYTES]), max_size=2 * MAX_FRAMES),
    st.sampled_from([0, 1, MAX_NUMBERS + 1]),
)
def test_a_message_whose_bytes_the_transport_carries_is_in_the_last_record(
    sizes: list[int], answers: int
) -> None:
    connection = joined(max_bytes=1 << 30)
    receive(connection, *map(PutNone, range(min(answers, 1))))
    messages = [inline(number, nbytes) if nbytes else PutNone(number) for number, nbytes in enumerate(sizes)]
    for message in messages:
        connection.put(message)
    for number in range(answers):
        connection.release(number)
    if answers:
        connection.taken(0)
    last = with_data(len(messages))
    records = connection.put_with_data(last)

    frames = [FROM_RANK.decode(record) for record in records]
    assert [frame for each in frames for frame in each if isinstance(frame, Put | PutNone)] == [
        *messages,
        last,
    ]
    assert last in frames[-1]
    assert all(len(each) <= MAX_FRAMES for each in frames)
    assert sent(connection) == []
    receive(connection, Taken((len(messages),)))


# The limit on bytes


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 9000), st.booleans(), st.integers(0, 3)), max_size=30))
def test_messages_are_accepted_exactly_within_the_limit(steps: list[tuple[int, bool, int]]) -> None:
    connection = joined()
    untaken: dict[int, int] = {}
    for number, (nbytes, is_data, takes) in enumerate(steps):
        for taken in list(untaken)[:takes]:
            connection.taken(taken)
            del untaken[taken]
        try:
            receive(connection, with_data(number) if is_data else inline(number, nbytes))
            if is_data:
                connection.count_data(number, nbytes)
        except ProtocolError:
            assert sum(untaken.values()) + counted(nbytes) > MAX_BYTES
            return
        untaken[number] = counted(nbytes)
        assert sum(untaken.values()) <= MAX_BYTES


# Violations

FOUR = [PutNone(number) for number in range(4)]
SEGMENTS = [Attach(number, ARENA, LARGEST_SEGMENT if number else 1) for number in range(MAX_SEGMENTS)]
VIOLATIONS: dict[str, tuple[str, list[object]]] = {
    "not a record": ("cannot be decoded", [b"\xff\x00nonsense"]),
    "a record that is too long": (f"more than {MAX_RECORD_BYTES} bytes", [inline(0, MAX_RECORD_BYTES)]),
    "a second join": ("a second hello", [join()]),
    "a second join of another version": ("a second hello", [join(version=VERSION + 1)]),
    "the same number again": ("message 3 after 3", [PutNone(3), in_segment(3)]),
    "the number of a message that was taken": ("message 0 after 0", [PutNone(0), "taken", with_data(0)]),
    "a lower number in one record": ("message 1 after 2", [encode_record([PutNone(2), inline(1, 3)])]),
    "too many messages": ("its limit of 16384 bytes", [*FOUR, PutNone(4)]),
    "too many messages in segments": ("its limit of", [*map(in_segment, range(4)), in_segment(4)]),
    "too many bytes": ("its limit of", [inline(0, MAX_BYTES - 4096), PutNone(1), PutNone(2)]),
    "a message that is too large": ("its limit of", [inline(0, MAX_BYTES + 1)]),
    "taking no message": ("took message 1, which was not sent", [Taken((1,))]),
    "taking a message twice": ("took message 0, which was not sent or", [Taken((0,)), Taken((0,))]),
    "taking a message of its own": ("took message 5, which was not sent", [PutNone(5), Taken((5,))]),
    "an unknown placement": ("the unknown placement 'inline'", [Attach(0, INLINE, 1)]),
    "a segment twice": ("attached segment 3 twice", [Attach(3, ARENA, 1), Attach(3, ARENA, 1)]),
    "too many segments": (f"than {MAX_SEGMENTS} segments", [*SEGMENTS, Attach(MAX_SEGMENTS, ARENA, 1)]),
    "a segment that is too large": ("bytes, more than", [Attach(0, ARENA, LARGEST_SEGMENT + 1)]),
}  # fmt: skip


@pytest.mark.promise(24, 26)
@pytest.mark.parametrize(("reason", "records"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_a_violation_closes_the_connection(reason: str, records: list[object]) -> None:
    connection = joined(max_bytes=MAX_BYTES if "record" not in reason else 1 << 20)
    connection.put(PutNone(0))
    *before, last = records
    for record in before:
        if record == "taken":
            connection.taken(0)
        else:
            receive(connection, record)
    with pytest.raises(ProtocolError, match=reason):
        connection.receive(last) if isinstance(last, bytes) else receive(connection, last)
    assert connection.state is CLOSED
    assert receive(connection, PutNone(100)) == []


def test_a_frame_before_the_join_is_a_violation() -> None:
    for frame in (put(), PutNone(0), Taken(()), Release((0,)), Attach(0, ARENA, 1)):
        with pytest.raises(ProtocolError, match="before its hello"):
            receive(new(), frame, join())
