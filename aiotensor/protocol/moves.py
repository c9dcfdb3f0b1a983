"""Messages between machines: records, and bytes that are moved into the memory of the peer.

On one machine, a descriptor shares a segment, and a record announces the position of a tensor in it. Between
machines the reader of a segment creates memory of the same size, the *landing segment*, and the writer moves
the bytes of each block to the same offset there, before the record that announces them:

    connecting side                                               listening side
      | OPEN version                                                |   the first message; a listener that is
      | <---------------------------------------------------------> |   closing does not answer it

    writer                                                        reader
      | RECORD frames                                               |   as on one machine
      | DATA frames, then the bytes of a tensor                     |   up to a MiB, with the record about it
      | STEP segment, block, range, then its bytes                  |   one for each MiB of a block
      | FREE segment, block                                         |   the block is used no more
      | ----------------------------------------------------------> |
      |        ACK bytes of steps, bytes of records, since the start |
      | <---------------------------------------------------------- |
      | BYE reason, either way                                      |   the last message, answered by another

Both ends of a connection may write. Steps of several blocks take turns, and records are sent between them. So
no record waits for longer than a step. Credit limits how much of both may be under way. The bytes of a large
step, and of DATA, are a message of their own, which need no copy; small ones share one with their header.
Small messages may share a BATCH.

Each is a message of ZeroMQ with one part: if a connection ends between two parts, libzmq may abort the
process (https://github.com/zeromq/libzmq/issues/3442).
"""

import struct
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from aiotensor.errors import ProtocolError

__all__ = [
    "ACK",
    "BATCH",
    "BYE",
    "DATA",
    "FREE",
    "MAX_BATCH",
    "OPEN",
    "OPENING",
    "RECORD",
    "STEP",
    "STEP_BYTES",
    "WINDOW_BYTES",
    "Ack",
    "Area",
    "Move",
    "OutgoingMoves",
    "ReceivedBytes",
    "RecordWindow",
    "Step",
    "encode_ack",
    "encode_area",
    "encode_batch",
    "encode_data",
    "encode_step",
    "read_ack",
    "read_area",
    "read_batch",
    "read_data",
    "read_step",
]

# The first byte of a message.
RECORD, STEP, FREE, ACK, BYE, OPEN, BATCH, DATA = range(8)

_VERSION = 2
OPENING = bytes([OPEN, _VERSION]) + b"aiotensor"

# One step of a move, and the steps that may be under way: two do not suffice for the full speed, since one
# is acknowledged while the other is sent.
STEP_BYTES = 1 << 20
WINDOW_BYTES = 4 * STEP_BYTES

MAX_BATCH = 64  # messages, which are read in one iteration of the event loop

# The records that may be under way, and the overhead of each, both about as in the buffer of a local socket.
_RECORD_WINDOW_BYTES = 256 << 10
_RECORD_OVERHEAD_BYTES = 512

_STEP = struct.Struct("<BBQQQQI")  # kind, whether to acknowledge, segment, block, its bytes, start, length
_AREA = struct.Struct("<BQQ")  # kind, segment, block
_ACK = struct.Struct("<BQQ")  # kind, bytes of steps, bytes of records
_PART = struct.Struct("<I")  # the length of a message in a batch
_DATA = struct.Struct("<BxxxI")  # kind, length of the record; the bytes follow at the next multiple of 8

Source = TypeVar("Source")

_last = attrgetter("last")


class Area(NamedTuple):
    """A block of a segment, by its offset."""

    segment: int
    block: int


class Step(NamedTuple):
    """A part of a block that is moved.

    Attributes:
        area: the block.
        nbytes: the size of the block.
        start: the position of the first byte, counted from the beginning of the segment.
        length: the number of bytes.
        wants_ack: whether the reader acknowledges it at once.
    """

    area: Area
    nbytes: int
    start: int
    length: int
    wants_ack: bool


class Ack(NamedTuple):
    """The bytes that were received since the connection began."""

    steps: int
    records: int


def encode_step(step: Step) -> bytes:
    """Encode the header of a step."""
    (segment, block), nbytes, start, length, wants_ack = step
    return _STEP.pack(STEP, wants_ack, segment, block, nbytes, start, length)


def read_step(data: bytes | memoryview) -> tuple[Step, memoryview]:
    """Return a step, and its bytes, which are empty if they follow in another message.

    Raises:
        ProtocolError: the message is too short, or has other bytes than it states.
    """
    rest = memoryview(data)[_STEP.size :]
    if len(data) < _STEP.size:
        raise ProtocolError(f"it sent a step of {len(data)} bytes")
    _, wants_ack, segment, block, nbytes, start, length = _STEP.unpack_from(data)
    step = Step(Area(segment, block), nbytes, start, length, bool(wants_ack))
    if not 0 < length <= STEP_BYTES or not block <= start <= start + length <= block + nbytes:
        raise ProtocolError(f"it moved bytes {start} to {start + length} of a block at {block} of {nbytes}")
    if rest and len(rest) != length:
        raise ProtocolError(f"it sent {len(rest)} bytes in a step of {length}")
    return step, rest


def encode_area(area: Area) -> bytes:
    """Encode the message that a block is used no more."""
    return _AREA.pack(FREE, area.segment, area.block)


def read_area(data: bytes | memoryview) -> Area:
    """Return the block of a FREE message.

    Raises:
        ProtocolError: the message has another size.
    """
    if len(data) != _AREA.size:
        raise ProtocolError(f"it freed a block in {len(data)} bytes")
    _, segment, block = _AREA.unpack(data)
    return Area(segment, block)


def encode_ack(ack: Ack) -> bytes:
    """Encode an acknowledgement."""
    return _ACK.pack(ACK, ack.steps, ack.records)


def read_ack(data: bytes | memoryview) -> Ack:
    """Return an acknowledgement.

    Raises:
        ProtocolError: the message has another size.
    """
    if len(data) != _ACK.size:
        raise ProtocolError(f"it acknowledged in {len(data)} bytes")
    _, steps, records = _ACK.unpack(data)
    return Ack(steps, records)


def encode_batch(messages: Sequence[bytes | memoryview]) -> bytes:
    """Encode at most `MAX_BATCH` messages as one."""
    parts: list[bytes | memoryview] = [bytes([BATCH])]
    for message in messages:
        parts += (_PART.pack(len(message)), message)
    return b"".join(parts)


def read_batch(data: memoryview) -> list[memoryview]:
    """Return the messages of a batch.

    Raises:
        ProtocolError: a message is incomplete, or is a batch, or there are too many.
    """
    messages: list[memoryview] = []
    position = 1
    while position < len(data):
        start = position + _PART.size
        if start > len(data):
            raise ProtocolError("it sent a batch that ends in a length")
        (length,) = _PART.unpack_from(data, position)
        position = start + length
        message = data[start:position]
        if len(message) != length or message[:1] == bytes([BATCH]):
            raise ProtocolError(f"it sent a batch with an invalid message of {length} bytes")
        messages.append(message)
        if len(messages) > MAX_BATCH:
            raise ProtocolError(f"it sent a batch of more than {MAX_BATCH} messages")
    return messages


def encode_data(record: bytes) -> bytes:
    """Encode the message before the bytes of a tensor, which follow it, or are the next message.

    Args:
        record: the record about the tensor.
    """
    return _DATA.pack(DATA, len(record)) + record + bytes(-len(record) % _DATA.size)


def read_data(data: memoryview) -> tuple[memoryview, memoryview]:
    """Return a record, and the bytes after it, which are empty if they are the next message.

    Raises:
        ProtocolError: the message is shorter than it states.
    """
    if len(data) < _DATA.size:
        raise ProtocolError(f"it sent data in {len(data)} bytes")
    _, length = _DATA.unpack_from(data)
    stop = _DATA.size + length
    if len(data) < stop + -length % _DATA.size:
        raise ProtocolError(f"it sent a record of {len(data)} bytes that has {stop}")
    return data[_DATA.size : stop], data[stop + -length % _DATA.size :]


class Move(Generic[Source]):
    """Bytes of a block that are moved to the peer.

    Args:
        area: the block.
        nbytes: the size of the block.
        start: the position of the first byte to move, counted from the beginning of the segment.
        source: the bytes.
        length: their number.
        ended: called once the peer has all bytes, or no step is under way any more; with whether it has them.
    """

    __slots__ = ("area", "ended", "is_cancelled", "last", "length", "nbytes", "sent", "source", "start")

    def __init__(
        self,
        area: Area,
        nbytes: int,
        start: int,
        source: Source,
        length: int,
        ended: Callable[[bool], object],
    ) -> None:
        self.area = area
        self.nbytes = nbytes
        self.start = start
        self.source = source
        self.length = length
        self.ended = ended
        self.sent = 0
        self.last = 0  # the bytes of all moves up to its last step
        self.is_cancelled = False

    @property
    def is_copied(self) -> bool:
        """Whether it is one step, which is copied, so that the source may change at once."""
        return self.length <= STEP_BYTES


class OutgoingMoves(Generic[Source]):
    """The moves of one end: one step of each in turn, as far as the window allows.

    waiting for its turn --last step sent--> under way --acknowledged--> ended
       |                                                                  ^
       '--cancelled--> (its steps are under way) --acknowledged-----------'
    """

    def __init__(self) -> None:
        self._turns: deque[Move[Source]] = deque()
        self._under_way: list[Move[Source]] = []  # by the positions of their last steps
        self._sent = self._acknowledged = self._wanted = 0

    @property
    def is_idle(self) -> bool:
        """Whether no move waits or is under way."""
        return not (self._turns or self._under_way)

    @property
    def has_turns(self) -> bool:
        """Whether a move has steps to send."""
        return bool(self._turns)

    def begin(self, move: Move[Source]) -> None:
        """Add a move, which gets its turn after the others."""
        self._turns.append(move)

    def cancel(self, move: Move[Source]) -> bool:
        """Send no more steps of a move, and return whether it has ended: no step of it is under way."""
        if move not in self._turns:
            return False  # it has ended, or all its steps are under way
        self._turns.remove(move)
        if not move.sent:
            return True
        move.is_cancelled = True
        # Its last step may be followed by small steps of others, which are not acknowledged.
        insort(self._under_way, move, key=_last)
        return False

    def next_step(self) -> tuple[Move[Source], Step] | None:
        """Return the next step and its move, which the caller sends; None if there is none.

        The caller ends the move if it is copied: this was its only step.
        """
        if not self._turns:
            return None
        move = self._turns[0]
        length = min(STEP_BYTES, move.length - move.sent)
        if not self._has_credit(length):
            return None
        start = move.start + move.sent
        move.sent += length
        is_last = move.sent == move.length
        step = self._step(move.area, move.nbytes, start, length, is_last and not move.is_copied)
        move.last = self._sent
        self._turns.popleft()
        if not is_last:
            self._turns.append(move)
        elif not move.is_copied:
            self._under_way.append(move)
        return move, step

    def step_now(self, area: Area, nbytes: int, start: int, length: int) -> Step | None:
        """Return the only step of a move that is copied; None if it cannot be sent at once."""
        if self._turns or length > STEP_BYTES or not self._has_credit(length):
            return None
        return self._step(area, nbytes, start, length, wants_ack=False)

    def _has_credit(self, length: int) -> bool:
        return self._sent + length <= self._acknowledged + WINDOW_BYTES

    def _step(self, area: Area, nbytes: int, start: int, length: int, wants_ack: bool) -> Step:
        """Count a step; an acknowledgement is also wanted for each MiB."""
        self._sent += length
        if self._sent - self._wanted >= STEP_BYTES:
            wants_ack = True
        if wants_ack:
            self._wanted = self._sent
        return Step(area, nbytes, start, length, wants_ack)

    def acknowledged(self, total: int) -> list[Move[Source]]:
        """Handle an acknowledgement, and return the moves that have ended.

        Raises:
            ProtocolError: the total is less than before, or more than was sent.
        """
        if not self._acknowledged <= total <= self._sent:
            raise ProtocolError(f"it acknowledged {total} bytes, of {self._sent} that were sent")
        self._acknowledged = total
        count = bisect_right(self._under_way, total, key=_last)
        ended = self._under_way[:count]
        del self._under_way[:count]
        return ended

    def clear(self) -> list[Move[Source]]:
        """Return all moves, because the connection has ended."""
        left = [*self._turns, *self._under_way]
        self._turns.clear()
        self._under_way.clear()
        return left


class RecordWindow:
    """The credit of one end for its records."""

    def __init__(self) -> None:
        self._sent = self._acknowledged = 0

    def has_credit(self, nbytes: int) -> bool:
        """Return whether a record of this size may be sent."""
        return self._sent + nbytes + _RECORD_OVERHEAD_BYTES <= self._acknowledged + _RECORD_WINDOW_BYTES

    def sent(self, nbytes: int) -> None:
        """Count a record."""
        self._sent += nbytes + _RECORD_OVERHEAD_BYTES

    def acknowledged(self, total: int) -> None:
        """Handle an acknowledgement.

        Raises:
            ProtocolError: the total is less than before, or more than was sent.
        """
        if not self._acknowledged <= total <= self._sent:
            raise ProtocolError(f"it acknowledged {total} bytes of records, of {self._sent} that were sent")
        self._acknowledged = total


class ReceivedBytes:
    """Count the bytes that arrive at one end, and decide when to acknowledge them."""

    def __init__(self) -> None:
        self._steps = self._records = 0
        self._reported = Ack(0, 0)

    def record(self, nbytes: int) -> bool:
        """Count a record, and return whether an acknowledgement is due.

        Raises:
            ProtocolError: it exceeds the credit of the peer.
        """
        self._records += nbytes + _RECORD_OVERHEAD_BYTES
        unreported = self._records - self._reported.records
        if unreported > _RECORD_WINDOW_BYTES:
            raise ProtocolError("it sent records without credit")
        return unreported > _RECORD_WINDOW_BYTES // 2

    def step(self, step: Step) -> bool:
        """Count a step, and return whether an acknowledgement is due.

        Raises:
            ProtocolError: it exceeds the credit of the peer.
        """
        self._steps += step.length
        if self._steps - self._reported.steps > WINDOW_BYTES:
            raise ProtocolError("it moved bytes without credit")
        return step.wants_ack

    def ack(self) -> bytes:
        """Return the acknowledgement of all bytes."""
        self._reported = Ack(self._steps, self._records)
        return encode_ack(self._reported)
