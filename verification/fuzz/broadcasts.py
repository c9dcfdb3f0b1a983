"""Nearly valid conversations with a publisher and with a subscriber."""

import math
from collections.abc import Callable

import msgspec

from aiotensor.protocol.frames import LEAST_FRAME_BYTES, MAX_NUMBERS, VERSION
from aiotensor.protocol.network import Area
from aiotensor.protocol.segments import MAX_SEGMENTS
from aiotensor.tensors.dtypes import DTYPES
from verification.fuzz.choosers import WILDNESS, Chooser, happens, one_of
from verification.fuzz.headers import body_of
from verification.fuzz.inspecting import INSPECT
from verification.fuzz.moving import Movement, any_opening
from verification.fuzz.placing import ANYTHING, DTYPE_NAMES, Segments
from verification.fuzz.steps import (
    FIRST_BLOCK,
    FIRST_NUMBER,
    PID,
    PUBLISHER,
    STAND_IN,
    Step,
)
from verification.fuzz.things import CONTENT, IMAGE, WHERE
from verification.fuzz.traces import with_trace
from verification.fuzz.wire import Frame, Scalar, boundary, broken_bytes, broken_frame, record_of

__all__ = [
    "MOST_READ",
    "SUBSCRIBE",
    "TO_PUBLISHER",
    "TO_SUBSCRIBER",
    "any_content",
    "to_publisher",
    "to_subscriber",
]

TO_PUBLISHER = "publisher"
TO_SUBSCRIBER = "subscriber"

SUBSCRIBE: Frame = ["subscribe", VERSION, PID, STAND_IN]

MOST_READ = 4  # publications that a rogue reads on one connection

_ARENA_BYTES = 1 << 20


class _Reading:
    """The state of a subscriber, from which its next valid frame is derived."""

    def __init__(self, chooser: Chooser, one_in: int) -> None:
        self._chooser = chooser
        self._one_in = one_in
        self.read = 0  # publications, on this connection
        self._unanswered: list[int] = []
        self._blocks: list[int] = []

    def subscribe(self) -> Frame:
        chooser = self._chooser
        self.read = 0
        self._unanswered.clear()
        self._blocks.clear()
        if not happens(chooser, 3):
            return [*SUBSCRIBE]
        following = one_of(chooser, (0, FIRST_NUMBER, FIRST_NUMBER + 2))
        return [*SUBSCRIBE, one_of(chooser, (PUBLISHER, "", "another")), following]

    def frame(self) -> Frame:
        chooser = self._chooser
        if happens(chooser, 4 * self._one_in):  # which is valid elsewhere
            return one_of(chooser, (self.subscribe(), INSPECT, ["discard", FIRST_NUMBER], ["detach", 0]))
        frame = self._right_frame()
        if len(frame) > 1 and isinstance(frame[1], list):
            frame[1] = self._numbers(frame[1])
        return broken_frame(chooser, frame) if happens(chooser, self._one_in) else frame

    def _right_frame(self) -> Frame:
        chooser = self._chooser
        if self.read < MOST_READ and happens(chooser, 2):
            self._unanswered.append(self.read)
            self.read += 1
        match chooser.number(0, 7):
            case 0 | 1 | 2 if self._unanswered:
                taken = self._some(self._unanswered)
                self._blocks += taken
                return ["taken", [FIRST_NUMBER + number for number in taken]]
            case 3 if self._unanswered:
                return ["discarded", [FIRST_NUMBER + number for number in self._some(self._unanswered)]]
            case 4 | 5 | 6 if self._blocks:
                return ["release", [FIRST_BLOCK + number for number in self._some(self._blocks)]]
            case 7 if happens(chooser, 4):
                return ["close", one_of(chooser, ("", "a reason")), *(happens(chooser, 4) for _ in range(3))]
        return [one_of(chooser, ("taken", "discarded", "release")), []]

    def _some(self, numbers: list[int]) -> list[int]:
        """Remove some numbers from the front of a list, and return them."""
        count = self._chooser.number(1, len(numbers))
        some = numbers[:count]
        del numbers[:count]
        return some

    def _numbers(self, numbers: list[Scalar]) -> list[Scalar]:
        """Add a wrong number now and then."""
        chooser = self._chooser
        if happens(chooser, self._one_in):
            first = one_of(chooser, (FIRST_NUMBER, FIRST_BLOCK))
            numbers = [*numbers, one_of(chooser, (first + chooser.number(0, 9), boundary(chooser)))]
        if happens(chooser, self._one_in):
            numbers = numbers[:1] * one_of(chooser, (2, MAX_NUMBERS, MAX_NUMBERS + 1))
        return numbers


def to_publisher(chooser: Chooser) -> list[Step]:
    """Generate the records of a subscriber."""
    one_in = one_of(chooser, WILDNESS)
    reading = _Reading(chooser, one_in)
    movement = Movement(chooser, one_in, Segments(chooser, one_in))  # mostly acknowledgements
    steps: list[Step] = []
    if not happens(chooser, 20):
        steps.append(_opening(chooser, reading, one_in, reading.subscribe()))
    for _ in range(chooser.number(1, 8)):
        if happens(chooser, 12):
            steps.append(_opening(chooser, reading, one_in, reading.subscribe()))
        if happens(chooser, 30):  # its further frames are all invalid
            hello = ["hello", VERSION, 1, STAND_IN, 8, _ARENA_BYTES]
            steps.append(_opening(chooser, reading, one_in, one_of(chooser, (INSPECT, hello))))
        elif happens(chooser, 10):
            inspect = broken_frame(chooser, INSPECT) if happens(chooser, one_in) else INSPECT
            steps.append(Step(msgspec.msgpack.encode([inspect]).hex(), beside=True))
        frames = [reading.frame() for _ in range(chooser.number(1, 3))]
        step = _step(chooser, reading, one_in, frames)
        steps.append(msgspec.structs.replace(step, moves=movement.messages()))
    return steps


def _opening(chooser: Chooser, reading: _Reading, one_in: int, frame: Frame) -> Step:
    """Return the first record of a connection, in which one frame is valid."""
    frames = [broken_frame(chooser, frame) if happens(chooser, one_in) else frame]
    frames += [reading.frame()] if happens(chooser, 2 * one_in) else []
    reading.read = 0
    step = _step(chooser, reading, one_in, frames, connects=True)
    return msgspec.structs.replace(step, opening=any_opening(chooser, one_in))


def _step(
    chooser: Chooser, reading: _Reading, one_in: int, frames: list[Frame], *, connects: bool = False
) -> Step:
    record = record_of(chooser, frames, 2 * one_in)
    descriptors = []
    if happens(chooser, 4 * one_in):
        descriptors = [one_of(chooser, ANYTHING)] * one_of(chooser, (1, 7, 8, 9, 64))
    return Step(record.hex(), tuple(descriptors), connects, after=0 if connects else reading.read)


class _Publishing:
    """The state of a publisher, from which its next valid frame is derived."""

    def __init__(self, chooser: Chooser, one_in: int) -> None:
        self.segments = Segments(chooser, one_in)
        self._movement = Movement(chooser, one_in, self.segments, IMAGE)
        self._chooser = chooser
        self._one_in = one_in
        self._next = one_of(chooser, (0, 7, 2**32))
        self._next_block = 0
        self._has_content = False  # in segment 0
        self._has_moved_content = False  # there

    def moves(self) -> tuple[str, ...]:
        """Return the messages before the next record; usually the content is moved first."""
        first: tuple[str, ...] = ()
        if self._has_content and not self._has_moved_content:
            self._has_moved_content = True
            if not happens(self._chooser, self._one_in):
                first = (self._movement.whole(Area(0, 0), len(CONTENT)),)
        return first + self._movement.messages()

    def opening(self) -> list[Frame]:
        chooser = self._chooser
        max_behind = one_of(chooser, (64, 1, 8))
        arena_bytes = _ARENA_BYTES
        if happens(chooser, 2 * self._one_in):
            arena_bytes = one_of(chooser, (0, 1, 4096, 64 << 20, 2**62, 2**63 - 1))
        return [
            ["welcome", VERSION, 1, LEAST_FRAME_BYTES, one_of(chooser, ("p", "")), not happens(chooser, 12)],
            ["admit", arena_bytes, max_behind, self._next, happens(chooser, 2)],
        ]

    def frame(self) -> Frame:
        chooser = self._chooser
        if happens(chooser, 4 * self._one_in):  # which is valid elsewhere
            return one_of(chooser, (*self.opening(), ["taken", [0]], INSPECT))
        frame = self._right_frame()
        return broken_frame(chooser, frame) if happens(chooser, self._one_in) else frame

    def _right_frame(self) -> Frame:
        chooser = self._chooser
        segments = self.segments.sizes
        match chooser.number(0, 9):
            case 0 if self._next:
                return ["discard", self._next - chooser.number(1, min(self._next, 3))]
            case 1 if len(segments) > 1:
                number = one_of(chooser, list(segments))
                del segments[number]
                self._has_content &= number != 0
                return ["detach", number]
            case 2 if happens(chooser, 6):
                return ["close", one_of(chooser, ("", "a reason")), *(happens(chooser, 3) for _ in range(3))]
            case 3 | 4 if len(segments) < MAX_SEGMENTS or happens(chooser, self._one_in):
                self._has_content |= not segments
                return self.segments.attach("sealed" if segments else "content")
        return self._publish()

    def _publish(self) -> Frame:
        chooser = self._chooser
        number, self._next = self._next, self._next + one_of(chooser, (1, 1, 1, 4))
        if happens(chooser, 4) and self.segments.sizes:
            payload, nbytes = WHERE.pack(0, 0), len(CONTENT)
            if happens(chooser, self._one_in) or not self._has_content:
                nbytes = one_of(chooser, (0, 64, 4096, boundary(chooser)))
                payload = self.segments.place(64, 1)
            frame: Frame = ["publish", number, "arena", payload, nbytes, self._block()]
            return with_trace(chooser, self._one_in, frame, 6)
        content = _content(chooser, self._one_in, self.segments, self._block)
        nbytes = boundary(chooser) if happens(chooser, 2 * self._one_in) else len(content)
        return ["publish", number, "inline", content, nbytes]

    def _block(self) -> int:
        self._next_block += 1
        return self._next_block


def _content(chooser: Chooser, one_in: int, segments: Segments, block: Callable[[], int]) -> bytes:
    """Generate the content of a publication.

    Args:
        chooser: decides.
        one_in: how seldom something is wrong.
        segments: those in which the tensors are placed.
        block: returns the number of a block.
    """
    tensors: list[Scalar] = []
    for _ in range(chooser.number(0, 2) if segments.sizes else 0):
        dtype = one_of(chooser, DTYPE_NAMES)
        itemsize = DTYPES[dtype].itemsize
        shape: list[int] = segments.shape(itemsize)
        where = segments.place(math.prod(shape) * itemsize, itemsize)
        if happens(chooser, 2 * one_in):
            shape = [boundary(chooser) for _ in range(chooser.number(0, 4))]
        tensor: Frame = [dtype, shape, "arena", where, block()]
        if happens(chooser, 4):
            may_require = DTYPES[dtype].is_floating_point or happens(chooser, one_in)
            tensor += [may_require and happens(chooser, 2), happens(chooser, 2)]
        tensors.append(broken_frame(chooser, tensor) if happens(chooser, one_in) else tensor)
    content: Frame = [body_of(chooser, one_in, len(tensors)), tensors]
    if happens(chooser, 2 * one_in):
        content = broken_frame(chooser, content)
    data = msgspec.msgpack.encode(content)
    return broken_bytes(chooser, data) if happens(chooser, 2 * one_in) else data


def any_content(chooser: Chooser) -> bytes:
    """Generate the content of a publication whose tensors are in two segments."""
    one_in = one_of(chooser, WILDNESS)
    segments = Segments(chooser, one_in)
    segments.attach()
    segments.attach()
    return _content(chooser, one_in, segments, lambda: chooser.number(0, 9))


def to_subscriber(chooser: Chooser) -> list[Step]:
    """Generate the records of a publisher."""
    one_in = one_of(chooser, WILDNESS)
    publishing = _Publishing(chooser, one_in)
    frames = [] if happens(chooser, 20) else publishing.opening()
    if happens(chooser, 2 * one_in) and frames:
        del frames[chooser.number(0, 1)]
    steps: list[Step] = []
    for _ in range(chooser.number(1, 8)):
        moves = publishing.moves()
        frames += [publishing.frame() for _ in range(chooser.number(0, 4))]
        descriptors = publishing.segments.taken_descriptors()
        if happens(chooser, 2 * one_in):
            descriptors += ["pipe"] * one_of(chooser, (1, 8, 9, 64))
        record = record_of(chooser, frames, 2 * one_in)
        after = 0 if happens(chooser, 4) else 1
        opening = None if steps else any_opening(chooser, one_in)
        steps.append(Step(record.hex(), tuple(descriptors), after=after, moves=moves, opening=opening))
        frames = []
    return steps
