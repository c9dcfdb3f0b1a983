"""What can be wrong with a record, whatever the frames in it mean."""

import msgspec

from aiotensor.protocol.frames import MAX_RECORD_BYTES
from tests.fuzz.choosers import Chooser, happens, one_of

__all__ = ["BOUNDARIES", "Frame", "Scalar", "boundary", "broken_bytes", "broken_frame", "record_of"]

Scalar = object
Frame = list[Scalar]

BOUNDARIES = (
    *(0, 1, 2, 63, 64, 65, 1023, 1024, 4095, 4096, 4097, 2**16, 2**31 - 1, 2**31, 2**32),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)),
)

TAGS = (
    *("hello", "attach", "detach", "put", "end", "discard", "bye"),
    *("welcome", "taken", "discarded", "release", "", "nonsense"),
    *("look", "account", "inquire", "report"),
    *("client", "ask", "cancel", "server", "answer", "failure", "close", "credit", "in", "by", "at"),
)

OF_ANOTHER_TYPE: tuple[Scalar, ...] = (
    None,
    True,
    1.5,
    float("nan"),
    "",
    "text",
    "x" * 64,
    "x" * 65,
    "\0",
    "\u202etxet",
    b"",
    b"bytes",
    [],
    [0],
    [1] * 64,
    [1] * 65,
    [2**62] * 3,
    [2**63 - 1] * 64,
    [0, 2**62, 2**62],
    [-1],
    [[]],
    [0] * 4096,
    [0] * 4097,
    {},
    {"a": 1},
    msgspec.msgpack.Ext(5, b"ext"),
)

# Lengths that nothing follows: of an array, a map, bytes, text.
ENDLESS = tuple(
    head + length
    for head, length in (
        (b"\xdd", b"\xff\xff\xff\xff"),
        (b"\xdd", b"\x0f\xff\xff\xff"),
        (b"\xdc", b"\xff\xff"),
        (b"\xdf", b"\xff\xff\xff\xff"),
        (b"\xc6", b"\xff\xff\xff\xff"),
        (b"\xdb", b"\xff\xff\xff\xff"),
        (b"\xc9", b"\xff\xff\xff\xff\x05"),
    )
)

TINY = [
    ["discard", 0],
    ["detach", 0],
    ["bye"],
    ["end", 0, 0],
    ["taken", []],
    ["release", []],
    ["inquire"],
    [],
]


def boundary(chooser: Chooser) -> int:
    """Choose a number at the edge of something."""
    return one_of(chooser, BOUNDARIES)


def broken_frame(chooser: Chooser, frame: Frame) -> Frame:
    """Break one thing in a frame."""
    frame = list(frame)
    where = chooser.number(0, len(frame) - 1)
    match chooser.number(0, 6):
        case 0:
            frame[where] = boundary(chooser)
        case 1:
            frame[where] = one_of(chooser, OF_ANOTHER_TYPE)
        case 2:
            del frame[where:]
        case 3:
            frame.append(one_of(chooser, OF_ANOTHER_TYPE))
        case 4:
            del frame[where]
        case 5:
            frame.insert(where, boundary(chooser))
        case _:
            frame[0] = one_of(chooser, TAGS)
    return frame


def record_of(chooser: Chooser, frames: list[Frame], one_in: int) -> bytes:
    """Encode frames as a record, which one in so many times is none."""
    if not happens(chooser, one_in):
        return msgspec.msgpack.encode(frames)
    return _broken_record(chooser, frames)


def _broken_record(chooser: Chooser, frames: list[Frame]) -> bytes:
    match chooser.number(0, 9):
        case 0:
            tiny = one_of(chooser, TINY)
            return msgspec.msgpack.encode([tiny] * chooser.number(1, 8000))
        case 1:
            # In a field that is ignored: of right length, and one byte more than any may have.
            length = MAX_RECORD_BYTES + one_of(chooser, (0, 1, -1, 30_000))
            first, *others = frames or [["bye", ""]]
            return _padded(first, others, length)
        case _:
            return broken_bytes(chooser, msgspec.msgpack.encode(frames))


def broken_bytes(chooser: Chooser, record: bytes) -> bytes:
    """Break the bytes of anything in msgpack."""
    match chooser.number(0, 7):
        case 0:
            return record[: chooser.number(0, max(0, len(record) - 1))]
        case 1 if record:
            return _flipped(chooser, record)
        case 2:
            return record + record
        case 3:
            return record + chooser.data(chooser.number(1, 20))
        case 4:
            return chooser.data(chooser.number(0, 60))
        case 5:
            depth = one_of(chooser, (10, 1000, 60_000))
            nest = one_of(chooser, (b"\x91", b"\x81\x00", b"\x92\xc0"))
            return record[:-1] + nest * (depth // len(nest))
        case 6:
            where = chooser.number(0, len(record))
            return record[:where] + one_of(chooser, ENDLESS) + record[where:]
        case _:
            return b""


def _flipped(chooser: Chooser, record: bytes) -> bytes:
    flipped = bytearray(record)
    for _ in range(chooser.number(1, 4)):
        flipped[chooser.number(0, len(flipped) - 1)] ^= 1 << chooser.number(0, 7)
    return bytes(flipped)


def _padded(first: Frame, others: list[Frame], length: int) -> bytes:
    """Lengthen a record by bytes behind its first frame's fields."""
    record = msgspec.msgpack.encode([[*first, b""], *others])
    missing = length - len(record)
    for header in (3, 1, 0):  # how much longer than that of no bytes
        record = msgspec.msgpack.encode([[*first, bytes(max(0, missing - header))], *others])
        if len(record) == length:
            break
    return record
