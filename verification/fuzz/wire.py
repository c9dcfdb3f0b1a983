"""The choices of a generator, and faults in the encoding of a record, whatever its frames mean.

The source of all choices is a string of bytes, which are random, or which a fuzzer mutates.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar, get_args

from msgspec.msgpack import Ext, encode

from aiotensor.protocol import frames as protocol
from aiotensor.protocol.frames import MAX_FRAMES, MAX_HELLO_BYTES, MAX_RECORD_BYTES

T = TypeVar("T")
Scalar: TypeAlias = object
Frame: TypeAlias = list[Scalar]

BOUNDARIES = (
    *(0, 1, 2, 63, 64, 65, 1023, 1024, 4095, 4096, 4097, 2**16, 2**31 - 1, 2**31, 2**32),
    *(2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)),
)

_TAGS = (
    *(str(kind.__struct_config__.tag) for kind in get_args(protocol.Frame)),
    *("in", "by", "at", "as", "", "nonsense"),
)

_OF_ANOTHER_TYPE: tuple[Scalar, ...] = (
    *(None, True, 1.5, float("nan"), "", "text", "x" * 64, "x" * 65, "\0", "\u202etxet", b"", b"bytes"),
    *([], [0], [1] * 64, [1] * 65, [2**62] * 3, [2**63 - 1] * 64, [0, 2**62, 2**62], [-1], [[]]),
    *([0] * 4096, [0] * 4097, {}, {"a": 1}, Ext(5, b"ext")),
)

# Headers of arrays, maps, bytes and texts without the announced contents.
_ENDLESS = ("ddffffffff", "dd0fffffff", "dcffff", "dfffffffff", "c6ffffffff", "dbffffffff", "c9ffffffff05")

_TINY: tuple[Frame, ...] = (["discard", 0], ["close"], ["end", 0, 0], ["taken", []], ["release", []], [])
_CLOSE: Frame = ["close", "", False, False, True]


class Chooser:
    """Derive choices from a string of bytes; after its end, every choice is the lowest and plainest one."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._position = 0

    def number(self, low: int, high: int) -> int:
        """Choose a number between two bounds, which are included."""
        width = ((high - low).bit_length() + 7) // 8
        return low + int.from_bytes(self._take(width)) % (high - low + 1)

    def data(self, length: int) -> bytes:
        """Choose bytes."""
        return self._take(length).ljust(length, b"\0")

    def one_of(self, options: Sequence[T]) -> T:
        """Choose an option; the first one is the plainest."""
        return options[self.number(0, len(options) - 1)]

    def happens(self, one_in: int) -> bool:
        """Decide whether to do something unusual, once in `one_in` times."""
        return self.number(0, one_in - 1) == one_in - 1

    def one_in(self) -> int:
        """Choose how seldom something is invalid: some conversations have a single fault, and others many."""
        return self.one_of((100, 20, 5))

    def _take(self, count: int) -> bytes:
        taken = self._source[self._position : self._position + count]
        self._position += count
        return taken


def boundary(chooser: Chooser) -> int:
    """Choose a number at the edge of a range."""
    return chooser.one_of(BOUNDARIES)


def broken_frame(chooser: Chooser, frame: Frame) -> Frame:
    """Introduce one fault into a frame, or into one of the maps and arrays in it."""
    frame = list(frame)
    where = chooser.number(0, len(frame) - 1)
    inner = frame[where]
    match chooser.number(0, 6):
        case even if isinstance(inner, list) and inner and even % 2 == 0:
            frame[where] = broken_frame(chooser, inner)
        case even if isinstance(inner, dict) and inner and even % 2 == 0:
            frame[where] = _broken_map(chooser, inner)
        case 0:
            frame[where] = boundary(chooser)
        case 1:
            frame[where] = chooser.one_of(_OF_ANOTHER_TYPE)
        case 2:
            del frame[where:]
        case 3:
            frame.append(chooser.one_of(_OF_ANOTHER_TYPE))
        case 4:
            del frame[where]
        case 5:
            frame.insert(where, boundary(chooser))
        case _:
            frame[0] = chooser.one_of(_TAGS)
    return frame


def frame_or_fault(chooser: Chooser, one_in: int, frame: Frame) -> Frame:
    """Introduce one fault into a frame, once in `one_in` times."""
    return broken_frame(chooser, frame) if chooser.happens(one_in) else frame


def bytes_or_fault(chooser: Chooser, one_in: int, data: bytes) -> bytes:
    """Introduce one fault into bytes, once in `one_in` times."""
    return broken_bytes(chooser, data) if chooser.happens(one_in) else data


def _broken_map(chooser: Chooser, fields: dict[str, Scalar]) -> Scalar:
    """Introduce one fault into a map, in the same way as into an array of its values or keys."""
    names = list(fields)
    if chooser.happens(8):
        names = [name if isinstance(name, str) else "" for name in broken_frame(chooser, [*names])]
    return dict(zip(names, broken_frame(chooser, [*fields.values()]), strict=False))


def record_of(chooser: Chooser, frames: list[Frame], one_in: int) -> bytes:
    """Encode frames as a record, which is invalid once in `one_in` times."""
    if not chooser.happens(one_in):
        return encode(frames)
    match chooser.number(0, 9):
        case 0:
            count = chooser.one_of((1, MAX_FRAMES, MAX_FRAMES + 1, 8000))
            return encode([chooser.one_of(_TINY)] * count)
        case 1:
            longest = chooser.one_of((MAX_RECORD_BYTES, MAX_HELLO_BYTES))
            return _padded(frames, longest + chooser.one_of((0, 1, -1, 30_000)))
    return broken_bytes(chooser, encode(frames))


def _padded(frames: list[Frame], length: int) -> bytes:
    """Lengthen a record to a number of bytes, with an extra field that is ignored in its first frame."""
    first, *others = frames if frames and frames[0][:1] == ["hello"] else [_CLOSE]
    missing = length - len(encode([[*first, b""], *others]))
    return encode([[*first, bytes(max(0, missing - (1 if missing <= 1 << 16 else 3)))], *others])


def broken_bytes(chooser: Chooser, record: bytes) -> bytes:
    """Introduce one fault into the bytes of an object in msgpack."""
    match chooser.number(0, 7):
        case 0:
            return record[: chooser.number(0, max(0, len(record) - 1))]
        case 1 if record:
            flipped = bytearray(record)
            for _ in range(chooser.number(1, 4)):
                flipped[chooser.number(0, len(flipped) - 1)] ^= 1 << chooser.number(0, 7)
            return bytes(flipped)
        case 2:
            return record + record
        case 3:
            return record + chooser.data(chooser.number(1, 20))
        case 4:
            return chooser.data(chooser.number(0, 60))
        case 5:
            depth = chooser.one_of((10, 1000, 60_000))
            nest = chooser.one_of((b"\x91", b"\x81\x00", b"\x92\xc0"))
            return record[:-1] + nest * (depth // len(nest))
        case 6:
            where = chooser.number(0, len(record))
            return record[:where] + bytes.fromhex(chooser.one_of(_ENDLESS)) + record[where:]
    return b""
