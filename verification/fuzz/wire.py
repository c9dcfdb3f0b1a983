"""Faults in the encoding of a record, independent of the meaning of its frames."""

from typing import get_args

import msgspec

from aiotensor.protocol.broadcast import FromSubscriber, ToSubscriber
from aiotensor.protocol.frames import (
    MAX_FRAMES,
    MAX_HELLO_BYTES,
    MAX_RECORD_BYTES,
    FromSender,
    Opening,
    ToInspector,
    ToSender,
)
from aiotensor.protocol.ranks import FromRank
from verification.fuzz.choosers import Chooser, happens, one_of

__all__ = ["BOUNDARIES", "Frame", "Scalar", "boundary", "broken_bytes", "broken_frame", "record_of"]

Scalar = object
Frame = list[Scalar]

BOUNDARIES = (
    *(0, 1, 2, 63, 64, 65, 1023, 1024, 4095, 4096, 4097, 2**16, 2**31 - 1, 2**31, 2**32),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)),
)

# The frames of the protocols of tensors, of broadcast and of ranks, by their tags.
_KINDS = {
    str(kind.__struct_config__.tag): kind
    for kind in get_args(
        Opening | FromSender | ToSender | ToInspector | FromSubscriber | ToSubscriber | FromRank
    )
}

TAGS = (
    *_KINDS,
    *("", "nonsense"),
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

# Headers of arrays, maps, bytes and texts without the announced contents.
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
    ["close"],
    ["end", 0, 0],
    ["taken", []],
    ["release", []],
    [],
]


def boundary(chooser: Chooser) -> int:
    """Choose a number at the edge of a range."""
    return one_of(chooser, BOUNDARIES)


def broken_frame(chooser: Chooser, frame: Frame) -> Frame:
    """Introduce one fault into a frame, or into one of the maps and arrays in it."""
    frame = list(frame)
    where = chooser.number(0, len(frame) - 1)
    inner = frame[where]
    if isinstance(inner, dict | list) and inner and happens(chooser, 2):
        frame[where] = (
            _broken_map(chooser, inner) if isinstance(inner, dict) else broken_frame(chooser, inner)
        )
        return frame
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


def _broken_map(chooser: Chooser, fields: dict[str, Scalar]) -> Scalar:
    """Introduce one fault into a map, in the same way as into an array of its values or keys."""
    names = list(fields)
    if happens(chooser, 8):
        names = [name if isinstance(name, str) else "" for name in broken_frame(chooser, [*names])]
    return dict(zip(names, broken_frame(chooser, [*fields.values()]), strict=False))


def record_of(chooser: Chooser, frames: list[Frame], one_in: int) -> bytes:
    """Encode frames as a record, which is invalid once in `one_in` times."""
    if not happens(chooser, one_in):
        return msgspec.msgpack.encode(frames)
    return _broken_record(chooser, frames)


def _broken_record(chooser: Chooser, frames: list[Frame]) -> bytes:
    match chooser.number(0, 9):
        case 0:
            tiny = one_of(chooser, TINY)
            return msgspec.msgpack.encode([tiny] * one_of(chooser, (1, MAX_FRAMES, MAX_FRAMES + 1, 8000)))
        case 1:
            # An ignored field, which makes the record exactly as long as allowed, or one byte longer.
            longest = one_of(chooser, (MAX_RECORD_BYTES, MAX_HELLO_BYTES))
            first, *others = frames or [["close"]]
            return _padded(first, others, longest + one_of(chooser, (0, 1, -1, 30_000)))
        case _:
            return broken_bytes(chooser, msgspec.msgpack.encode(frames))


def broken_bytes(chooser: Chooser, record: bytes) -> bytes:
    """Introduce one fault into the bytes of an object in msgpack."""
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
    """Lengthen a record to a number of bytes, with an extra field in its first frame."""
    kind = _KINDS.get(str(first[0])) if first else None
    if kind is not None:  # every optional field has to precede the extra one
        missing = len(kind.__struct_fields__) - len(first) + 1
        first = [*first, *kind.__struct_defaults__[-missing:]] if missing > 0 else first
    record = msgspec.msgpack.encode([[*first, b""], *others])
    missing = length - len(record)
    for header in (3, 1, 0):  # bytes in addition to the header of an empty field
        record = msgspec.msgpack.encode([[*first, bytes(max(0, missing - header))], *others])
        if len(record) == length:
            break
    return record
