"""Two honest ranks, with records that arrive in any interleaving."""

from collections import Counter, deque
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    ARENA,
    MAX_RECORD_BYTES,
    OUT_OF_BAND,
    VERSION,
    Attach,
    Put,
    Release,
    Taken,
)
from aiotensor.protocol.ranks import LEAST_MESSAGE_BYTES, Join, PutNone, RankConnection, counted
from aiotensor.protocol.segments import MAX_SEGMENTS
from tests.protocol.rank_ends import in_segment, inline, with_data

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


TestHonestRanks = TwoRanks.TestCase
TestHonestRanks.settings = settings(max_examples=150, stateful_step_count=60)
