"""Messages between machines: records, and bytes that are moved to the memory of the peer.

On one machine, a descriptor shares a segment, and a record announces the position of a tensor in it. Between
machines, the reader of a segment creates memory of the same size, the *landing segment*, and the writer moves
the bytes of each block to the same offset in it, before it sends the record that announces them:

    connecting side                                               listening side
      | OPEN version                                                |   the first message of each side; a
      | <---------------------------------------------------------> |   closing listener does not answer it

    writer                                                        reader
      | RECORD frames                                               |   as on one machine
      | STEP segment, block, range, then its bytes                  |   one for each MiB of a block
      | FREE segment, block                                         |   the block is no longer used
      | ----------------------------------------------------------> |
      |       ACK bytes of steps, bytes of records, since the start |
      | <---------------------------------------------------------- |
      | BYE reason, either way                                      |   the last message, answered by a BYE

Both ends of a connection may write. The steps of several blocks take turns, and records are sent between
steps, so no record waits for longer than one step takes. Credit limits the bytes of steps and of records that
may be under way. The bytes of a large STEP are a separate message, so that they need not be copied to
their header; the bytes of a small one follow its header. Small messages may share a BATCH.

Each message is a ZeroMQ message with one part: if a connection ends between two parts, libzmq may abort the
process (https://github.com/zeromq/libzmq/issues/3442).
"""

import struct
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from aiotensor.errors import ProtocolError

# The kind of a message, which is its first byte.
RECORD, STEP, FREE, ACK, BYE, OPEN, BATCH = range(7)

_VERSION = 4
OPENING = bytes([OPEN, _VERSION]) + b"aiotensor"

STEP_BYTES = 1 << 20  # the maximum size of one step of a move

# The maximum bytes of steps that may be under way. Two steps are not enough for full speed, since one is
# acknowledged while the other is sent.
WINDOW_BYTES = 4 * STEP_BYTES

# The maximum bytes of records that may be under way, and the overhead that is counted for each record. Both
# roughly match the send buffer of a local socket.
_RECORD_WINDOW_BYTES = 256 << 10
_RECORD_OVERHEAD_BYTES = 512

MAX_BATCH = 64  # messages in a batch, which is handled in one iteration of the event loop

_STEP = struct.Struct("<BBQQQQI")  # kind, whether to acknowledge, segment, block, its size, start, length
_AREA = struct.Struct("<BQQ")  # kind, segment, block
_ACK = struct.Struct("<BQQ")  # kind, bytes of steps, bytes of records
_PART = struct.Struct("<I")  # the length of a message in a batch

Source = TypeVar("Source")

_last = attrgetter("last")


class Area(NamedTuple):
    """The segment and the offset of a block."""

    segment: int
    block: int


class Step(NamedTuple):
    """A part of a block that is moved.

    Attributes:
        area: the block.
        nbytes: the size of the block in bytes.
        start: the position of the first byte to move, counted from the beginning of the segment.
        length: the number of bytes to move.
        wants_ack: whether the reader acknowledges the step at once.
    """

    area: Area
    nbytes: int
    start: int
    length: int
    wants_ack: bool


class Ack(NamedTuple):
    """The bytes of steps and of records that were received since the connection began."""

    steps: int
    records: int


def encode_step(step: Step) -> bytes:
    """Encode the header of a step."""
    (segment, block), nbytes, start, length, wants_ack = step
    return _STEP.pack(STEP, wants_ack, segment, block, nbytes, start, length)


def read_step(data: bytes | memoryview) -> tuple[Step, memoryview]:
    """Decode a step, and return it with its bytes, which are empty if they are the next message.

    Raises:
        ProtocolError: the message is too short, its range is not within the block, or it contains a different
            number of bytes than it states.
    """
    rest = memoryview(data)[_STEP.size :]
    if len(data) < _STEP.size:
        raise ProtocolError(f"it sent a step with an incomplete header of {len(data)} bytes")
    _, wants_ack, segment, block, nbytes, start, length = _STEP.unpack_from(data)
    step = Step(Area(segment, block), nbytes, start, length, bool(wants_ack))
    if not 0 < length <= STEP_BYTES or not block <= start <= start + length <= block + nbytes:
        raise ProtocolError(f"it moved bytes {start} to {start + length} of a block at {block} of {nbytes}")
    if rest and len(rest) != length:
        raise ProtocolError(f"it sent {len(rest)} bytes in a step of {length}")
    return step, rest


def encode_area(area: Area) -> bytes:
    """Encode the FREE message of a block."""
    return _AREA.pack(FREE, area.segment, area.block)


def read_area(data: bytes | memoryview) -> Area:
    """Decode a FREE message, and return its block.

    Raises:
        ProtocolError: the message has a wrong size.
    """
    if len(data) != _AREA.size:
        raise ProtocolError(f"it freed a block in a message of {len(data)} bytes")
    _, segment, block = _AREA.unpack(data)
    return Area(segment, block)


def encode_ack(ack: Ack) -> bytes:
    """Encode an acknowledgement."""
    return _ACK.pack(ACK, ack.steps, ack.records)


def read_ack(data: bytes | memoryview) -> Ack:
    """Decode an acknowledgement.

    Raises:
        ProtocolError: the message has a wrong size.
    """
    if len(data) != _ACK.size:
        raise ProtocolError(f"it sent an acknowledgement of {len(data)} bytes")
    _, steps, records = _ACK.unpack(data)
    return Ack(steps, records)


def encode_batch(messages: Sequence[bytes | memoryview]) -> bytes:
    """Encode at most `MAX_BATCH` messages as one message."""
    parts: list[bytes | memoryview] = [bytes([BATCH])]
    for message in messages:
        parts += (_PART.pack(len(message)), message)
    return b"".join(parts)


def read_batch(data: memoryview) -> list[memoryview]:
    """Return the messages of a batch.

    Raises:
        ProtocolError: a message is incomplete or is itself a batch, or there are too many messages.
    """
    messages: list[memoryview] = []
    position = 1
    while position < len(data):
        start = position + _PART.size
        if start > len(data):
            raise ProtocolError("it sent a batch that ends within a length")
        (length,) = _PART.unpack_from(data, position)
        position = start + length
        message = data[start:position]
        if len(message) != length or message[:1] == bytes([BATCH]):
            raise ProtocolError(f"it sent a batch with an invalid message of {length} bytes")
        messages.append(message)
        if len(messages) > MAX_BATCH:
            raise ProtocolError(f"it sent a batch of more than {MAX_BATCH} messages")
    return messages


# Moves, and the credit for steps and records


class Move(Generic[Source]):
    """Bytes of a block that are moved to the peer.

    Args:
        area: the block.
        nbytes: the size of the block in bytes.
        start: the position of the first byte to move, counted from the beginning of the segment.
        source: the bytes to move.
        length: the number of bytes to move.
        ended: called with True once the peer has all bytes or a copy of them was sent, or with False if the
            move was cancelled or the connection has ended.
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
        self.sent = 0  # bytes of this move
        self.last = 0  # the bytes sent by all moves, up to the last step of this one
        self.is_cancelled = False

    @property
    def is_copied(self) -> bool:
        """Whether the move is a single step, which is copied, so that the source may change afterwards."""
        return self.length <= STEP_BYTES


class OutgoingMoves(Generic[Source]):
    """The moves of one end, which take turns: each turn sends one step, if the window has credit for it.

    waiting for its turn --last step sent--> under way --acknowledged--> ended
       |                                                                  ^
       '--cancelled--> (its steps are under way) --acknowledged-----------'

    A move that is copied ends when its step is sent, and a move that is cancelled before its first step ends
    at once.
    """

    def __init__(self) -> None:
        self._turns: deque[Move[Source]] = deque()
        self._under_way: list[Move[Source]] = []  # by the positions of their last steps
        self._sent = self._acknowledged = self._wanted = 0

    @property
    def has_turns(self) -> bool:
        """Whether a move has steps to send."""
        return bool(self._turns)

    def begin(self, move: Move[Source]) -> None:
        """Add a move, which has its first turn after the others."""
        self._turns.append(move)

    def cancel(self, move: Move[Source]) -> bool:
        """Send no more steps of a move; return True if it ends now, because none of its steps was sent."""
        if move not in self._turns:
            return False  # it has ended, or all its steps are under way
        self._turns.remove(move)
        if not move.sent:
            return True
        move.is_cancelled = True
        # Sorted by its own last step: the steps after that may be small ones, which are not acknowledged.
        insort(self._under_way, move, key=_last)
        return False

    def next_step(self) -> tuple[Move[Source], Step] | None:
        """Return the next step to send, with its move; None if there is no step or no credit.

        If the move is copied, this was its only step, and the caller ends it.
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

    def _has_credit(self, length: int) -> bool:
        return self._sent + length <= self._acknowledged + WINDOW_BYTES

    def _step(self, area: Area, nbytes: int, start: int, length: int, wants_ack: bool) -> Step:
        """Count and return a step; it requests an acknowledgement if `wants_ack`, and once for each MiB."""
        self._sent += length
        if self._sent - self._wanted >= STEP_BYTES:
            wants_ack = True
        if wants_ack:
            self._wanted = self._sent
        return Step(area, nbytes, start, length, wants_ack)

    def acknowledged(self, total: int) -> list[Move[Source]]:
        """Record an acknowledgement, and return the moves that have ended.

        Args:
            total: the bytes of steps that the peer has received since the connection began.

        Raises:
            ProtocolError: the total is less than before, or more than was sent.
        """
        if not self._acknowledged <= total <= self._sent:
            raise ProtocolError(f"it acknowledged {total} bytes, but {self._sent} were sent")
        self._acknowledged = total
        count = bisect_right(self._under_way, total, key=_last)
        ended = self._under_way[:count]
        del self._under_way[:count]
        return ended

    def clear(self) -> list[Move[Source]]:
        """Remove and return all moves, because the connection has ended."""
        left = [*self._turns, *self._under_way]
        self._turns.clear()
        self._under_way.clear()
        return left


class RecordWindow:
    """The credit of one end for its records."""

    def __init__(self) -> None:
        self._sent = self._acknowledged = 0

    def has_credit(self, nbytes: int) -> bool:
        """Return whether a record of this size in bytes may be sent."""
        return self._sent + nbytes + _RECORD_OVERHEAD_BYTES <= self._acknowledged + _RECORD_WINDOW_BYTES

    def sent(self, nbytes: int) -> None:
        """Count a sent record."""
        self._sent += nbytes + _RECORD_OVERHEAD_BYTES

    def acknowledged(self, total: int) -> None:
        """Record an acknowledgement.

        Args:
            total: the bytes of records, with their overhead, that the peer has received since the connection
                began.

        Raises:
            ProtocolError: the total is less than before, or more than was sent.
        """
        if not self._acknowledged <= total <= self._sent:
            raise ProtocolError(f"it acknowledged {total} bytes of records, but {self._sent} were sent")
        self._acknowledged = total


class ReceivedBytes:
    """Count the bytes that arrive at one end, and decide when to acknowledge them."""

    def __init__(self) -> None:
        self._steps = self._records = 0
        self._reported = Ack(0, 0)

    def record(self, nbytes: int) -> bool:
        """Count a received record, and return whether an acknowledgement is due.

        Raises:
            ProtocolError: the record exceeds the credit of the peer.
        """
        self._records += nbytes + _RECORD_OVERHEAD_BYTES
        unreported = self._records - self._reported.records
        if unreported > _RECORD_WINDOW_BYTES:
            raise ProtocolError("it sent records without credit")
        return unreported > _RECORD_WINDOW_BYTES // 2

    def step(self, step: Step) -> bool:
        """Count a received step, and return whether an acknowledgement is due.

        Raises:
            ProtocolError: the step exceeds the credit of the peer.
        """
        self._steps += step.length
        if self._steps - self._reported.steps > WINDOW_BYTES:
            raise ProtocolError("it moved bytes without credit")
        return step.wants_ack

    def ack(self) -> bytes:
        """Return the message that acknowledges all bytes received so far."""
        self._reported = Ack(self._steps, self._records)
        return encode_ack(self._reported)
