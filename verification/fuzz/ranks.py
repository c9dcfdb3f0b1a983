"""Nearly valid conversations with a rank of a group."""

import math

from msgspec.msgpack import encode

from aiotensor.protocol.frames import MAX_NUMBERS, OUT_OF_BAND, VERSION
from aiotensor.protocol.segments import MAX_SEGMENTS
from aiotensor.tensors.dtypes import DTYPES
from verification.fuzz.broadcasts import SUBSCRIBE
from verification.fuzz.choosers import WILDNESS, Chooser, happens, one_of
from verification.fuzz.inspecting import INSPECT
from verification.fuzz.moving import Movement, any_opening
from verification.fuzz.placing import (
    ANYTHING,
    BLOCK,
    DTYPE_NAMES,
    Segments,
    attributes,
    put_frame,
    small_shape,
)
from verification.fuzz.steps import STAND_IN, Step
from verification.fuzz.things import GUARD
from verification.fuzz.wire import Frame, Scalar, boundary, broken_frame, record_of

__all__ = ["BLOCKS", "MAX_BYTES", "MESSAGES", "TO_RANK", "to_rank"]

TO_RANK = "rank"

MAX_BYTES = 64 << 10  # of the pipe: 16 small messages

# The messages that the other end sends, numbered from 0, and the blocks in which it places some of them.
MESSAGES, BLOCKS = 4, 2

_MOST_CARRIED = 20_000  # the maximum bytes of a tensor that travel with a record

_HELLO: Frame = ["hello", VERSION, 1, STAND_IN, 8, 1 << 20]
_MISPLACED: tuple[Frame, ...] = (INSPECT, SUBSCRIBE, _HELLO, ["discard", 0], ["end", 0, 1])

# The records of further connections, none of which is the `Join` of the other rank.
_BESIDE: tuple[list[Frame], ...] = ([], [["put none", 0]], [["taken", []]], [["close"]], [_HELLO], [INSPECT])


class _Rank:
    """The state of a rank, from which its next valid frame is derived."""

    def __init__(self, chooser: Chooser, one_in: int) -> None:
        self.segments = Segments(chooser, one_in)
        self.movement = Movement(chooser, one_in, self.segments)
        self.awaited = 1  # records of the other end, before the next step
        self._chooser = chooser
        self._one_in = one_in
        self._next_message = self._next_block = 0
        self._untaken = list(range(MESSAGES))
        self._unreleased = list(range(BLOCKS))

    def join(self) -> Frame:
        """Return the first frame."""
        chooser = self._chooser
        version, max_bytes = VERSION, MAX_BYTES
        if happens(chooser, 4 * self._one_in):
            version = one_of(chooser, (VERSION + 1, 0))
        if happens(chooser, 2 * self._one_in):
            max_bytes = one_of(chooser, (MAX_BYTES + 1, boundary(chooser)))
        frame: Frame = ["join", version, 1, max_bytes]
        return broken_frame(chooser, frame) if happens(chooser, self._one_in) else frame

    def frame(self) -> Frame:
        """Return a frame of a record that travels alone."""
        chooser = self._chooser
        if happens(chooser, 4 * self._one_in):
            return one_of(chooser, (self.join(), *_MISPLACED))
        frame = self._right_frame()
        return broken_frame(chooser, frame) if happens(chooser, self._one_in) else frame

    def _right_frame(self) -> Frame:
        chooser = self._chooser
        match chooser.number(0, 11):
            case 0 | 1:
                return ["put none", self._number()]
            case 2 | 3:
                return self._answer("taken", self._untaken)
            case 4 if len(self._untaken) < MESSAGES:
                return self._answer("release", self._unreleased)
            case 5 | 6 if len(self.segments.sizes) < MAX_SEGMENTS or happens(chooser, self._one_in):
                return self.segments.attach()
            case 7 if happens(chooser, 6):
                return ["close", one_of(chooser, ("", "a reason")), *(happens(chooser, 4) for _ in range(3))]
        names = (self._number(), 0)
        frame = put_frame(chooser, self._one_in, self.segments, names, self._next_block, last=True)
        self._next_block += frame[BLOCK] is not None
        return frame

    def carried(self) -> tuple[list[Frame], bytes]:
        """Return the frames of a record, and the bytes of a tensor that travel with it."""
        chooser = self._chooser
        frames: list[Frame] = [["put none", self._number()]] if happens(chooser, 3) else []
        frame, data = self._carried_tensor()
        if happens(chooser, 2 * self._one_in):  # with none, or with two of them
            return one_of(chooser, (frames, [*frames, frame, self._carried_tensor()[0]])), data
        return [*frames, frame], data

    def _carried_tensor(self) -> tuple[Frame, bytes]:
        chooser = self._chooser
        dtype = one_of(chooser, DTYPE_NAMES)
        itemsize = DTYPES[dtype].itemsize
        shape = (
            [chooser.number(1, _MOST_CARRIED) // itemsize] if happens(chooser, 2) else small_shape(chooser)
        )
        data = GUARD[: math.prod(shape) * itemsize]
        if happens(chooser, 2 * self._one_in):
            data = one_of(chooser, (data[1:], data + b"x", b""))
        payload = b"x" if happens(chooser, 2 * self._one_in) else b""
        frame: Frame = ["put", self._number(), 0, dtype, shape, "cpu", OUT_OF_BAND, payload, None, True]
        if happens(chooser, 4):
            frame.append(attributes(chooser, self._one_in, dtype, len(shape)))
        return broken_frame(chooser, frame) if happens(chooser, self._one_in) else frame, data

    def _number(self) -> int:
        """Return the number of the next message; a lower one now and then."""
        chooser = self._chooser
        number = self._next_message + one_of(chooser, (0, 0, 0, 1, 7))
        if happens(chooser, 2 * self._one_in):
            return one_of(chooser, (max(0, self._next_message - 1), 0, 2**63 - 1))
        self._next_message = number + 1
        return number

    def _answer(self, tag: str, left: list[int]) -> Frame:
        chooser = self._chooser
        # Only a rank that answers everything lets the other end continue.
        count = len(left) if happens(chooser, 2) else chooser.number(0, len(left))
        numbers: list[Scalar] = [*left[:count]]
        del left[:count]
        if tag == "taken" and numbers:
            # It has sent them in records of their own, after its `Join`, and perhaps after a segment.
            self.awaited = 2 + MESSAGES - len(left)
        if happens(chooser, self._one_in):
            numbers.append(one_of(chooser, (chooser.number(0, MESSAGES), boundary(chooser))))
        if happens(chooser, 2 * self._one_in):
            numbers = (numbers or [0])[:1] * one_of(chooser, (2, MAX_NUMBERS, MAX_NUMBERS + 1))
        return [tag, numbers]


def to_rank(chooser: Chooser) -> list[Step]:
    """Generate the records of a rank, after those of other processes that connect to the same rank."""
    one_in = one_of(chooser, WILDNESS)
    rank = _Rank(chooser, one_in)
    steps: list[Step] = []
    while happens(chooser, 12) and len(steps) < 3:
        steps.append(Step(encode(one_of(chooser, _BESIDE)).hex(), beside=True))
    frames = [] if happens(chooser, 20) else [rank.join()]
    if frames:
        frames += [rank.frame()] if happens(chooser, 2 * one_in) else []
        record = record_of(chooser, frames, 2 * one_in)
        steps.append(Step(record.hex(), opening=any_opening(chooser, one_in)))
    for _ in range(chooser.number(1, 8)):
        steps.append(_step(chooser, rank, one_in))
    return steps


def _step(chooser: Chooser, rank: _Rank, one_in: int) -> Step:
    moves = rank.movement.messages()
    descriptors: list[str] = []
    carried, is_apart = None, False
    if happens(chooser, 3):
        frames, data = rank.carried()
        carried, is_apart = data.hex(), happens(chooser, 2)
    else:
        frames = [rank.frame() for _ in range(chooser.number(1, 4))]
        descriptors = rank.segments.taken_descriptors()
        if happens(chooser, 4 * one_in):
            descriptors += [one_of(chooser, ANYTHING)] * one_of(chooser, (1, 7, 8, 9, 64))
    after = 0 if happens(chooser, 8) else rank.awaited
    record = record_of(chooser, frames, 2 * one_in)
    return Step(
        record.hex(), tuple(descriptors), after=after, moves=moves, carried=carried, is_apart=is_apart
    )
