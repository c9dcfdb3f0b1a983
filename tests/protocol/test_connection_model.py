"""Two honest ends of a connection, which both send and answer; records arrive in any interleaving."""

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aiotensor.protocol.connection import MAX_SEGMENTS, Connection
from aiotensor.protocol.frames import (
    ARENA,
    INLINE,
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Begin,
    Close,
    Detach,
    Discard,
    Discarded,
    End,
    Hello,
    Message,
    Put,
    Release,
    Taken,
    decode_hello,
    encode,
)
from tests.frames import publish, put
from tests.selection import COMPLETE

sides = st.integers(0, 1)
blocks = st.none() | st.integers(0, 3)
sizes = st.sampled_from([0, 3, 3000, 8192])


class Sent:
    """A message that was begun, and has a permit.

    Attributes:
        count: the number of its tensors.
        is_whole: whether all of them were announced.
        block: the block of a publication, until the other end has answered.
        is_withdrawn: whether this publication was withdrawn.
    """

    def __init__(self, *, is_publication: bool = False, block: int | None = None) -> None:
        self.count = 0
        self.is_whole = self.is_publication = is_publication
        self.block = block
        self.is_withdrawn = False


class Arrived:
    """A message of the other end that has begun to arrive."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.is_whole = False
        self.is_publication = False


class Party:
    """One end, with the bookkeeping of its owner.

    Attributes:
        opened: the end; None before the first record has arrived.
        sent: its messages that have permits.
        pins: the announcements in each of its blocks that were not released.
        segments: the segments that it has attached.
        announced: the numbers of all its messages, in order.
        arrived: the messages of the other end that were neither taken nor discarded.
        seen: the numbers of all messages of the other end, in order.
        unwanted: the messages of the other end that this owner has discarded.
        leases: the blocks of the other end that are in use here.
        on_its_way: the records for this end.
    """

    def __init__(self, role: str, limit: int, first: int) -> None:
        self.hello = Hello(VERSION, 42, role, role[0], limit, 1 << 20, first)
        self.opened: Connection | None = None
        self.sent: dict[int, Sent] = {}
        self.pins: Counter[int] = Counter()
        self.segments: set[int] = set()
        self.attached = 0
        self.announced: list[int] = []
        self.arrived: dict[int, Arrived] = {}
        self.seen: list[int] = []
        self.unwanted: set[int] = set()
        self.leases: list[int] = []
        self.on_its_way: deque[bytes] = deque()

    @property
    def connection(self) -> Connection:
        assert self.opened is not None
        return self.opened

    def that_can(self, action: str) -> list[int]:
        """List the messages that this owner can end, withdraw or take."""
        match action:
            case "end":
                return [number for number, message in self.sent.items() if not message.is_whole]
            case "withdraw":
                return [number for number, message in self.sent.items() if not message.is_withdrawn]
        return [number for number, message in self.arrived.items() if message.is_whole]

    # Commands to send

    def put(self, number: int, block: int | None, nbytes: int, last: bool) -> None:
        message = self.sent.get(number)
        if message is None:
            message = self.sent[number] = Sent()
            self.announced.append(number)
        if block is not None:
            self.pins[block] += 1
        payload = bytes(nbytes)
        self.connection.put(
            put(message=number, tensor=message.count, payload=payload, block=block, last=last)
        )
        message.count += 1
        message.is_whole = last

    def begin(self) -> None:
        number = self.connection.begin()
        self.sent[number] = Sent()
        self.announced.append(number)

    def end(self, number: int) -> None:
        if number not in self.sent:
            self.sent[number] = Sent()
            self.announced.append(number)
        self.connection.end(number)
        self.sent[number].is_whole = True

    def publish(self, number: int, block: int | None) -> None:
        if block is not None:
            self.pins[block] += 1
        placement = INLINE if block is None else ARENA
        self.connection.publish(number, encode(publish(number, placement=placement, block=block)))
        self.sent[number] = Sent(is_publication=True, block=block)
        self.announced.append(number)

    def withdraw(self, number: int) -> None:
        self.connection.discard(number)
        if self.sent[number].is_publication:
            self.sent[number].is_withdrawn = True  # its block is in use until the other end has answered
        else:
            del self.sent[number]

    # Commands to answer

    def take(self, number: int) -> None:
        self.leases += self.arrived.pop(number).blocks
        self.connection.taken(number)

    def discard(self, number: int) -> None:
        """Discard a message that has arrived, that is still to come, or that has ended."""
        message = self.arrived.pop(number, None)
        if message is not None and not message.is_publication:
            self.release(message.blocks)
        self.unwanted.add(number)
        self.connection.discarded(number)

    def release(self, released: list[int]) -> None:
        for block in released:
            self.connection.release(block)

    # Frames

    def receive(self, record: bytes) -> None:
        assert len(record) <= MAX_RECORD_BYTES
        if self.opened is None:
            self.opened = Connection(self.hello, "the other end", decode_hello(record))
            self.opened.admit(self.hello.first)
            return
        for frame in self.connection.receive(record):
            match frame:
                case Put():
                    held = [] if frame.block is None else [frame.block]
                    self.store(frame.message, held, is_whole=frame.last)
                case Begin():
                    self.store(frame.message, [], is_whole=False)
                case End():
                    self.store(frame.message, [], is_whole=True)
                case Message():
                    held = [] if frame.block is None else [frame.block]
                    self.store(frame.message, held, is_whole=True, is_publication=True)
                case Discard():
                    self.withdrawn(frame.message)
                case Taken():
                    for number in frame.messages:
                        self.sent.pop(number, None)
                case Discarded():
                    for number in frame.messages:
                        message = self.sent.pop(number, None)
                        if message is not None and message.block is not None:
                            self.unpin(message.block)
                case Release():
                    for block in frame.blocks:
                        self.unpin(block)
                case Attach():
                    self.attached += 1
                case Detach():
                    self.attached -= 1

    def store(self, number: int, held: list[int], *, is_whole: bool, is_publication: bool = False) -> None:
        if not self.seen or number > self.seen[-1]:
            self.seen.append(number)
        if number in self.unwanted:
            self.connection.discarded(number)
            if not is_publication:
                self.release(held)
            return
        message = self.arrived.setdefault(number, Arrived())
        message.blocks += held
        message.is_whole, message.is_publication = is_whole, is_publication

    def withdrawn(self, number: int) -> None:
        message = self.arrived.pop(number, None)
        if message is None:
            return
        self.unwanted.add(number)
        if message.is_publication:
            self.connection.discarded(number, confirms=True)
        else:
            self.release(message.blocks)

    def unpin(self, block: int) -> None:
        self.pins[block] -= 1
        assert self.pins[block] >= 0, "a block was released more often than it was announced"


class TwoEnds(RuleBasedStateMachine):
    """Two ends of a connection, each of which sends messages to the other.

    An honest end never causes a `ProtocolError`, which would fail the test. Messages arrive in the order in
    which they were begun. In the end, when all records have arrived and everything was answered, no end holds
    a permit or a block.
    """

    @initialize(limits=st.tuples(st.integers(1, 4), st.integers(0, 4)), first=st.sampled_from([0, 7]))
    def begin(self, limits: tuple[int, int], first: int) -> None:
        near, far = Party("sender", limits[0], first), Party("receiver", limits[1], 3)
        near.opened = Connection(near.hello, "the other end")
        self.parties = (near, far)
        self.is_closed = False

    def other(self, party: Party) -> Party:
        return self.parties[1 - self.parties.index(party)]

    def can_act(self, party: Party) -> bool:
        return party.opened is not None and not self.is_closed

    def can_announce(self, party: Party) -> bool:
        return self.can_act(party) and len(party.sent) < party.hello.max_messages

    # Messages and answers

    @rule(which=sides, block=blocks, nbytes=sizes, last=st.booleans())
    def announce_a_message(self, which: int, block: int | None, nbytes: int, last: bool) -> None:
        party = self.parties[which]
        if self.can_announce(party):
            party.put(party.connection.next_message, block, nbytes, last)

    @rule(which=sides, block=blocks, kind=st.sampled_from(["begun", "empty", "publication"]))
    def announce_another_message(self, which: int, block: int | None, kind: str) -> None:
        party = self.parties[which]
        if not self.can_announce(party):
            return
        match kind:
            case "begun":
                party.begin()
            case "empty":
                party.end(party.connection.next_message)
            case "publication":
                party.publish(party.connection.next_message, block)

    @rule(which=sides, data=st.data(), block=blocks, nbytes=sizes, last=st.booleans())
    def announce_another_tensor(
        self, which: int, data: st.DataObject, block: int | None, nbytes: int, last: bool
    ) -> None:
        party = self.parties[which]
        if not self.is_closed and (numbers := party.that_can("end")):
            party.put(data.draw(st.sampled_from(numbers)), block, nbytes, last)

    @rule(which=sides, action=st.sampled_from(["end", "withdraw", "take"]), data=st.data())
    def act(self, which: int, action: str, data: st.DataObject) -> None:
        party = self.parties[which]
        if not self.is_closed and (numbers := party.that_can(action)):
            getattr(party, action)(data.draw(st.sampled_from(numbers)))

    @rule(which=sides, ahead=st.integers(-3, 3))
    def discard(self, which: int, ahead: int) -> None:
        party = self.parties[which]
        if self.can_act(party):
            party.discard(max(0, party.connection.messages + ahead))

    @rule(which=sides)
    def release(self, which: int) -> None:
        party = self.parties[which]
        if party.leases and not self.is_closed:
            party.release([party.leases.pop(0)])

    # Segments, records, and the last frames

    @rule(which=sides, data=st.data())
    def attach_or_detach(self, which: int, data: st.DataObject) -> None:
        party = self.parties[which]
        if not self.can_act(party):
            return
        number = data.draw(st.integers(0, MAX_SEGMENTS - 1))
        if number in party.segments:
            party.segments.remove(number)
            party.connection.detach(number)
        else:
            party.segments.add(number)
            self.write(which)
            self.other(party).on_its_way.append(encode(Attach(number, ARENA, 4096)))

    @rule(which=sides)
    def write(self, which: int) -> None:
        party = self.parties[which]
        if party.opened is not None:
            self.other(party).on_its_way += party.connection.data_to_send()

    @rule(which=sides, count=st.integers(1, 5))
    def deliver(self, which: int, count: int) -> None:
        party = self.parties[which]
        for _ in range(min(count, len(party.on_its_way))):
            party.receive(party.on_its_way.popleft())

    @rule(which=sides, is_meant=st.integers(0, 29))
    def close(self, which: int, is_meant: int) -> None:
        """Close one end; seldom, since not much happens afterwards."""
        party = self.parties[which]
        if is_meant == 29 and party.opened is not None:
            self.is_closed = True
            party.connection.close(Close())

    # Invariants, and the balance in the end

    @invariant()
    def messages_arrive_in_order_and_within_the_limit(self) -> None:
        for party in getattr(self, "parties", ()):
            other = self.other(party)
            assert party.seen == other.announced[: len(party.seen)]
            assert party.opened is None or party.opened.in_flight <= other.hello.max_messages

    def teardown(self) -> None:
        if not hasattr(self, "parties"):
            return  # no rule has run
        self.settle()
        if self.is_closed:
            assert all(one.connection.is_closed for one in self.parties)
            return
        for party in self.parties:
            for number in party.that_can("end"):
                party.end(number)
        self.settle()
        for party in self.parties:
            for number in party.that_can("take"):
                party.take(number)
            party.release(party.leases)
        self.settle()
        for party in self.parties:
            assert party.seen == self.other(party).announced
            assert not party.arrived
            assert not party.sent, "a permit was lost"
            assert not +party.pins, "a block was lost"
            assert party.connection.in_flight == 0
            assert party.attached == len(party.connection.segments) == len(self.other(party).segments)

    def settle(self) -> None:
        """Deliver all records until neither end has any to send."""
        for which in (0, 1):
            self.write(which)
        while any(party.on_its_way for party in self.parties):
            for which in (0, 1):
                self.deliver(which, 1)
                self.write(which)


TestHonestEnds = pytest.mark.promise(27)(TwoEnds.TestCase)
TestHonestEnds.settings = settings(max_examples=200 if COMPLETE else 50, stateful_step_count=60)
