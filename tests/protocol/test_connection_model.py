"""Two honest ends of a connection, with records that arrive in any interleaving."""

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    LEAST_FRAME_BYTES,
    MAX_RECORD_BYTES,
    OPENING,
    VERSION,
    Attach,
    Discard,
    Discarded,
    End,
    Hello,
    Put,
    Release,
    Taken,
    Welcome,
    decode,
)
from aiotensor.protocol.receiver import ReceiverConnection
from aiotensor.protocol.sender import SenderConnection
from tests.frames import hello, put
from tests.selection import COMPLETE

SEGMENT_BYTES = 1 << 20

blocks = st.none() | st.integers(0, 3)
sizes = st.sampled_from([0, 3, 3000, 8192])


class Sent:
    """A message of the sender that has not ended."""

    def __init__(self) -> None:
        self.count = 0
        self.is_whole = False


class Arrived:
    """A message that has begun to arrive at the receiver."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.is_whole = False


class TwoEnds(RuleBasedStateMachine):
    """A `SenderConnection` and a `ReceiverConnection`, with the bookkeeping of their owners.

    An honest side never causes a `ProtocolError`, which would fail the test. In the end, when all records
    have arrived and the receiver has released everything, the sender holds no permit and no block.
    """

    @initialize(
        limit=st.integers(1, 4),
        first=st.sampled_from([0, 7]),
        longest=st.sampled_from([LEAST_FRAME_BYTES, MAX_RECORD_BYTES]),
    )
    def begin(self, limit: int, first: int, longest: int) -> None:
        self.limit = limit
        self.longest = longest
        self.sender = SenderConnection(hello(max_concurrent_videos=limit, first_message=first))
        self.receiver: ReceiverConnection | None = None
        self.to_receiver: deque[bytes] = deque()
        self.to_sender: deque[bytes] = deque()
        # The sender's books: messages with a permit, and announced tensors by blocks.
        self.sent: dict[int, Sent] = {}
        self.pins: Counter[int] = Counter()
        self.segments = 0
        # The receiver's books: messages, living tensors by blocks, and messages discarded before they came.
        self.arrived: dict[int, Arrived] = {}
        self.leases: list[int] = []
        self.unwanted: set[int] = set()
        self.next_arrival = first

    @property
    def is_open(self) -> bool:
        """Whether both sides can still act; before the hello has arrived, only the sender can."""
        return not (self.sender.is_closed or (self.receiver is not None and self.receiver.is_closed))

    # Commands of the sender

    @precondition(lambda self: len(self.sent) < self.limit)
    @rule(block=blocks, nbytes=sizes, last=st.booleans())
    def announce_a_message(self, block: int | None, nbytes: int, last: bool) -> None:
        number = self.sender.next_message
        self.sent[number] = Sent()
        self.announce(number, block, nbytes, last)

    @precondition(lambda self: len(self.sent) < self.limit)
    @rule()
    def begin_a_message(self) -> None:
        self.sent[self.sender.begin()] = Sent()

    @precondition(lambda self: self.open_messages)
    @rule(data=st.data(), block=blocks, nbytes=sizes, last=st.booleans())
    def announce_another_tensor(
        self, data: st.DataObject, block: int | None, nbytes: int, last: bool
    ) -> None:
        self.announce(data.draw(st.sampled_from(self.open_messages)), block, nbytes, last)

    def announce(self, number: int, block: int | None, nbytes: int, last: bool) -> None:
        message = self.sent[number]
        tensor, message.count, message.is_whole = message.count, message.count + 1, last
        if block is not None and not self.sender.is_closed:
            self.pins[block] += 1
        payload = bytes(nbytes)
        self.sender.put(put(message=number, tensor=tensor, payload=payload, block=block, last=last))

    @property
    def open_messages(self) -> list[int]:
        return [number for number, message in self.sent.items() if not message.is_whole]

    @property
    def with_tensors(self) -> list[int]:
        return [number for number in self.open_messages if self.sent[number].count]

    @precondition(lambda self: self.with_tensors)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.with_tensors))
        self.sender.end(number)
        self.sent[number].is_whole = True

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.sent)))
        self.sender.discard(number)
        del self.sent[number]

    @precondition(lambda self: self.segments < 3 and self.is_open)
    @rule()
    def attach(self) -> None:
        self.flush_sender()
        self.to_receiver.append(self.sender.attach(self.segments, "arena", 4096))
        self.segments += 1

    @rule()
    def flush_sender(self) -> None:
        self.to_receiver += self.sender.data_to_send()

    # Commands of the receiver

    @property
    def whole(self) -> list[int]:
        return [number for number, message in self.arrived.items() if message.is_whole]

    @precondition(lambda self: self.whole)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        assert self.receiver is not None
        number = data.draw(st.sampled_from(self.whole))
        self.leases += self.arrived.pop(number).blocks
        self.receiver.taken(number)

    @precondition(lambda self: self.receiver is not None)
    @rule(ahead=st.integers(-3, 3))
    def discard(self, ahead: int) -> None:
        """Discard a message that arrived, that is still to come, or that has ended."""
        assert self.receiver is not None
        number = max(0, self.next_arrival + ahead)
        if number in self.arrived:
            self.release_all(self.arrived.pop(number).blocks)
        self.unwanted.add(number)
        self.receiver.discard(number)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.leases))
        self.leases.remove(block)
        self.release_all([block])

    def release_all(self, released: list[int]) -> None:
        assert self.receiver is not None
        for block in released:
            self.receiver.release(block)

    @precondition(lambda self: self.receiver is not None)
    @rule()
    def flush_receiver(self) -> None:
        assert self.receiver is not None
        self.to_sender += self.receiver.data_to_send()

    # The last frames; seldom, since not much happens after them

    @precondition(lambda self: self.is_open)
    @rule(is_meant=st.integers(0, 9), is_sender=st.booleans())
    def close(self, is_meant: int, is_sender: bool) -> None:
        if is_meant < 9:
            return
        if is_sender:
            self.sender.close(Close(uses_memory=False))
        elif self.receiver is not None:
            self.receiver.close(Close())

    # Records that arrive

    @precondition(lambda self: self.to_receiver)
    @rule()
    def deliver_to_receiver(self) -> None:
        record = self.to_receiver.popleft()
        if self.receiver is None:
            [opening] = decode(OPENING, record)
            assert isinstance(opening, Hello)
            welcome = Welcome(VERSION, 43, self.longest, "r", is_admitted=True)
            self.receiver = ReceiverConnection(opening, welcome, SEGMENT_BYTES)
            self.receiver.admit()
            return
        assert len(record) <= self.longest
        for frame in self.receiver.receive(record):
            match frame:
                case Put():
                    self.store(self.receiver, frame)
                case End():
                    if frame.message in self.arrived:
                        self.arrived[frame.message].is_whole = True
                case Discard():
                    message = self.arrived.pop(frame.message, None)
                    if message is not None:
                        self.release_all(message.blocks)
                    self.unwanted.add(frame.message)
                case Attach() | Close():
                    pass

    def store(self, receiver: ReceiverConnection, frame: Put) -> None:
        self.next_arrival = max(self.next_arrival, frame.message + 1)
        held = [] if frame.block is None else [frame.block]
        if frame.message in self.unwanted:
            receiver.discard(frame.message)
            self.release_all(held)
            return
        message = self.arrived.setdefault(frame.message, Arrived())
        message.blocks += held
        message.is_whole = frame.last

    @precondition(lambda self: self.to_sender)
    @rule()
    def deliver_to_sender(self) -> None:
        for frame in self.sender.receive(self.to_sender.popleft()):
            match frame:
                case Taken() | Discarded():
                    for number in frame.messages:
                        self.sent.pop(number, None)
                case Release():
                    for block in frame.blocks:
                        self.pins[block] -= 1
                        assert self.pins[block] >= 0, "a block was released more often than it was announced"
                case Welcome() | Close():
                    pass

    # Invariants, and the balance in the end

    @invariant()
    def messages_in_flight_stay_within_the_limit(self) -> None:
        if self.receiver is not None:
            assert self.receiver.in_flight <= self.limit

    def teardown(self) -> None:
        if not hasattr(self, "sender"):
            return  # no rule has run
        for number in self.open_messages:
            if self.sent[number].count:
                self.sender.end(number)
            else:
                self.sender.discard(number)
                del self.sent[number]
        self.settle()
        if self.receiver is None or not self.is_open:
            return
        for number in self.whole:
            self.leases += self.arrived.pop(number).blocks
            self.receiver.taken(number)
        self.release_all(self.leases)
        self.settle()
        assert not self.arrived
        assert not self.sent, "a permit was lost"
        assert not +self.pins, "a block was lost"
        assert self.receiver.in_flight == 0
        assert len(self.receiver.segments) == self.segments

    def settle(self) -> None:
        """Deliver all records until neither side has any to send."""
        self.flush_both()
        while self.to_receiver or self.to_sender:
            if self.to_receiver:
                self.deliver_to_receiver()
            if self.to_sender:
                self.deliver_to_sender()
            self.flush_both()

    def flush_both(self) -> None:
        self.flush_sender()
        if self.receiver is not None:
            self.flush_receiver()


TestHonestEnds = pytest.mark.promise(27)(TwoEnds.TestCase)
TestHonestEnds.settings = settings(max_examples=200 if COMPLETE else 40, stateful_step_count=50)
