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
from collections.abc import Sequence
from typing import NamedTuple

from aiotensor.errors import ProtocolError

__all__ = [
    "ACK",
    "BATCH",
    "BYE",
    "FREE",
    "MAX_BATCH",
    "OPEN",
    "OPENING",
    "RECORD",
    "STEP",
    "STEP_BYTES",
    "Ack",
    "Area",
    "Step",
    "encode_ack",
    "encode_area",
    "encode_batch",
    "encode_step",
    "read_ack",
    "read_area",
    "read_batch",
    "read_step",
]

# The kind of a message, which is its first byte.
RECORD, STEP, FREE, ACK, BYE, OPEN, BATCH = range(7)

_VERSION = 4
OPENING = bytes([OPEN, _VERSION]) + b"aiotensor"

STEP_BYTES = 1 << 20  # the maximum size of one step of a move

MAX_BATCH = 64  # messages in a batch, which is handled in one iteration of the event loop

_STEP = struct.Struct("<BBQQQQI")  # kind, whether to acknowledge, segment, block, its size, start, length
_AREA = struct.Struct("<BQQ")  # kind, segment, block
_ACK = struct.Struct("<BQQ")  # kind, bytes of steps, bytes of records
_PART = struct.Struct("<I")  # the length of a message in a batch


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
