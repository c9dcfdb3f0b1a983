"""Nearly valid conversations, in which most frames are consistent with the frames before them."""

import math
import struct

from aiotensor.protocol.frames import LEAST_FRAME_BYTES, MAX_HOLDERS, MAX_RECORD_BYTES, VERSION
from aiotensor.tensors.dtypes import DTYPES
from verification.fuzz.choosers import WILDNESS, Chooser, happens, one_of
from verification.fuzz.headers import TO_CLIENT, TO_SERVER, to_client, to_server
from verification.fuzz.steps import RIGHT, STAND_IN, Conversation, Step
from verification.fuzz.things import MEMORY_KINDS, OTHER_THINGS, SEGMENT_BYTES
from verification.fuzz.wire import BOUNDARIES, Frame, boundary, broken_frame, record_of

__all__ = ["TO_CLIENT", "TO_RECEIVER", "TO_SENDER", "TO_SERVER", "conversation"]

TO_RECEIVER = "receiver"
TO_SENDER = "sender"

ARENA = 1 << 20
ANYTHING = (*OTHER_THINGS, "itself")
WHERE = struct.Struct("<QQ")

ENVELOPES = (
    *(RIGHT, "none", "hello", "hello without a pipe", "hello with a pipe", "hello with a file"),
    *("hello with a listener", "stranger", "unknown kind"),
)

DTYPE_NAMES = ("uint8", "int64", "float32", *sorted(DTYPES))


class Talk:
    """The state of a sender, from which its next valid frame is derived."""

    def __init__(self, chooser: Chooser, one_in: int) -> None:
        self._chooser = chooser
        self._one_in = one_in
        self._next_message = 0
        self._open: dict[int, int] = {}  # how many tensors each message has
        self._segments: dict[int, int] = {}
        self._next_segment = 0
        self._next_block = 0
        self.descriptors: list[str] = []  # that travel with the record

    def hello(self) -> Frame:
        self._open.clear()
        self._segments.clear()
        permits = one_of(self._chooser, (64, 8, 1))
        return ["hello", VERSION, 1, STAND_IN, permits, ARENA, self._next_message]

    def frame(self) -> Frame:
        chooser = self._chooser
        frame = self._right_frame()
        return broken_frame(chooser, frame) if happens(chooser, self._one_in) else frame

    def _right_frame(self) -> Frame:
        chooser = self._chooser
        match chooser.number(0, 13):
            case 0 | 1:
                return self._put(self._begin(), last=True)
            case 2:
                message = self._begin()
                self._open[message] = 0
                return self._put(message, last=False)
            case 3 | 4 if self._open:
                message = one_of(chooser, list(self._open))
                return self._put(message, last=chooser.number(0, 1) == 1)
            case 5 if self._open:
                message = one_of(chooser, list(self._open))
                return ["end", message, self._open.pop(message)]
            case 6 if self._next_message:
                message = chooser.number(0, self._next_message - 1)
                self._open.pop(message, None)
                return ["discard", message]
            case 7 if self._segments:
                number = one_of(chooser, list(self._segments))
                del self._segments[number]
                return ["detach", number]
            case 8 if happens(chooser, 4):
                return ["bye", one_of(chooser, ("", "a reason")), chooser.number(0, 1) == 1]
            case 9 if happens(chooser, 4):
                return self.hello()
            case 10 | 11:
                return self.attach()
            case 12 if happens(chooser, 4):
                return self.account()
            case 13 if happens(chooser, 4):
                return ["look", VERSION, 1]
            case _:
                return self._put(self._begin(), last=True)

    def account(self) -> Frame:
        """Return an account, which is valid only as the reply to an inspector."""
        chooser = self._chooser
        numbers = [chooser.number(0, 9) for _ in range(15)]
        waits = {"bounds_s": [0.5], "counts": [chooser.number(0, 9), 1], "total_s": 0.5}
        holders = [[0, "being sent", 0, 0.5]] * one_of(chooser, (0, 1, MAX_HOLDERS, MAX_HOLDERS + 1))
        told = [*numbers[:13], waits, waits, *numbers[13:], {"OSError": 1}, holders]
        return ["account", *told, one_of(chooser, ("", STAND_IN))]

    def _begin(self) -> int:
        self._next_message += 1
        return self._next_message - 1

    def attach(self) -> Frame:
        chooser = self._chooser
        number, self._next_segment = self._next_segment, self._next_segment + 1
        nbytes = one_of(chooser, SEGMENT_BYTES)
        self._segments[number] = nbytes
        kind = f"sealed:{nbytes}"
        if happens(chooser, self._one_in):
            kind = one_of(chooser, (*(f"{kind}:{nbytes}" for kind in MEMORY_KINDS), *ANYTHING))
        if happens(chooser, self._one_in):
            kind = f"sealed:{one_of(chooser, SEGMENT_BYTES)}"
        self.descriptors += [kind] * (0 if happens(chooser, 2 * self._one_in) else 1)
        return ["attach", number, "arena", nbytes]

    def _put(self, message: int, *, last: bool) -> Frame:
        chooser = self._chooser
        tensor = self._open.get(message, 0)
        if message in self._open:
            self._open[message] += 1
            if last:
                del self._open[message]
        dtype = one_of(chooser, DTYPE_NAMES)
        itemsize = DTYPES[dtype].itemsize
        shape = [chooser.number(1, 4) for _ in range(chooser.number(0, 3))]
        in_memory = bool(self._segments) and chooser.number(0, 2) > 0
        if in_memory and happens(chooser, 3):
            shape = [chooser.number(1, min(SEGMENT_BYTES) // itemsize)]
        nbytes = math.prod(shape) * itemsize
        placement, payload, block = "inline", chooser.data(nbytes if nbytes < 300 else 0), None
        if in_memory:
            placement, payload, block = "arena", self._place(nbytes, itemsize), self._next_block
            self._next_block += 1
        if happens(chooser, 2 * self._one_in):
            shape = [boundary(chooser) for _ in range(chooser.number(0, 4))]
        frame: Frame = ["put", message, tensor, dtype, shape, "cpu", placement, payload, block, last]
        if happens(chooser, 4):
            may_require = DTYPES[dtype].is_floating_point or happens(chooser, self._one_in)
            frame += [may_require and chooser.number(0, 1) == 1, chooser.number(0, 1) == 1]
        return frame

    def _place(self, nbytes: int, alignment: int) -> bytes:
        chooser = self._chooser
        segment = one_of(chooser, list(self._segments))
        last = max(0, self._segments[segment] - nbytes) // alignment
        offset = chooser.number(0, last) * alignment
        if happens(chooser, self._one_in):
            offset = one_of(chooser, (self._segments[segment], *BOUNDARIES)) % 2**64
        if happens(chooser, 2 * self._one_in):
            segment = boundary(chooser) % 2**64
        payload = WHERE.pack(segment, offset)
        return payload[: chooser.number(0, 15)] if happens(chooser, 3 * self._one_in) else payload


def conversation(chooser: Chooser, to: str) -> Conversation:
    """Generate a conversation of a rogue with one kind of peer."""
    return Conversation(to, tuple(_STEPS[to](chooser)))


def _to_receiver(chooser: Chooser) -> list[Step]:
    one_in = one_of(chooser, WILDNESS)
    talk = Talk(chooser, one_in)
    steps: list[Step] = []
    if not happens(chooser, 20):
        hello = talk.hello()
        frames = [broken_frame(chooser, hello) if happens(chooser, one_in) else hello]
        frames += [talk.attach() for _ in range(chooser.number(0, 1))]
        steps.append(_step(chooser, talk, one_in, frames))
    for _ in range(chooser.number(1, 12)):
        if happens(chooser, 16):  # as an inspector of the other senders' accounts
            look: Frame = ["look", VERSION, 1]
            frames = [broken_frame(chooser, look) if happens(chooser, one_in) else look]
            steps.append(_step(chooser, talk, one_in, frames, connects=True))
            continue
        connects = happens(chooser, 20)
        frames = [talk.hello()] if connects else []
        frames += [talk.frame() for _ in range(chooser.number(1, 4))]
        steps.append(_step(chooser, talk, one_in, frames, connects=connects))
    return steps


def _step(chooser: Chooser, talk: Talk, one_in: int, frames: list[Frame], *, connects: bool = False) -> Step:
    record = record_of(chooser, frames, 2 * one_in)
    descriptors, talk.descriptors = talk.descriptors, []
    if happens(chooser, 2 * one_in):
        descriptors += [one_of(chooser, ANYTHING)] * one_of(chooser, (1, 7, 8, 9, 64))
    envelope = one_of(chooser, ENVELOPES) if happens(chooser, 2 * one_in) else RIGHT
    return Step(record.hex(), tuple(descriptors), envelope, connects)


def _to_sender(chooser: Chooser) -> list[Step]:
    """Generate replies to a new sender, whose messages and blocks are numbered from 0."""
    one_in = one_of(chooser, WILDNESS)
    steps: list[Step] = []
    frames: list[Frame] = []
    if not happens(chooser, 10):
        longest = one_of(chooser, (MAX_RECORD_BYTES, LEAST_FRAME_BYTES))
        frames.append(["welcome", VERSION, 1, longest, "r", not happens(chooser, 5)])
    for _ in range(chooser.number(0, 5)):
        for _ in range(chooser.number(0, 3)):
            frame = _answer(chooser, one_in)
            frames.append(broken_frame(chooser, frame) if happens(chooser, one_in) else frame)
            if happens(chooser, 4):
                frames.append(frame)  # a duplicate
        descriptors = ["pipe"] * one_of(chooser, (1, 8, 9, 64)) if happens(chooser, 10) else []
        record = record_of(chooser, frames, 2 * one_in)
        # By the third record the sender has sent tensors, so that a reply can be valid.
        steps.append(Step(record.hex(), tuple(descriptors), after=3 - chooser.number(0, 3)))
        frames = []
    return steps


def _answer(chooser: Chooser, one_in: int) -> Frame:
    tag = one_of(
        chooser, ("taken", "discarded", "taken", "discarded", "release", "welcome", "bye", "inquire")
    )
    if tag == "inquire":
        return ["inquire"]
    if tag == "bye":
        return ["bye", one_of(chooser, ("", "no room")), True, happens(chooser, 2)]
    if tag == "welcome":
        longest = one_of(chooser, (MAX_RECORD_BYTES, LEAST_FRAME_BYTES, 2**31, 2**63 - 1))
        return ["welcome", VERSION, 1, longest, "r", happens(chooser, 2)]
    numbers = [chooser.number(0, 2) for _ in range(chooser.number(1, 2))]
    if happens(chooser, one_in):
        numbers.append(boundary(chooser))
    return [tag, numbers]


_STEPS = {TO_RECEIVER: _to_receiver, TO_SENDER: _to_sender, TO_SERVER: to_server, TO_CLIENT: to_client}
