"""Nearly valid conversations, in which most frames are consistent with the frames before them."""

import msgspec

from aiotensor.protocol.frames import LEAST_FRAME_BYTES, MAX_NUMBERS, MAX_RECORD_BYTES, VERSION
from aiotensor.protocol.segments import MAX_SEGMENTS
from verification.fuzz.broadcasts import SUBSCRIBE, TO_PUBLISHER, TO_SUBSCRIBER, to_publisher, to_subscriber
from verification.fuzz.choosers import WILDNESS, Chooser, happens, one_of
from verification.fuzz.headers import TO_CLIENT, TO_SERVER, to_client, to_server
from verification.fuzz.inspecting import INSPECT, TO_INSPECTOR, to_inspector
from verification.fuzz.moving import Movement, any_opening
from verification.fuzz.placing import ANYTHING, BLOCK, Segments, put_frame
from verification.fuzz.ranks import TO_RANK, to_rank
from verification.fuzz.steps import STAND_IN, Conversation, Step
from verification.fuzz.wire import Frame, boundary, broken_frame, record_of

__all__ = [
    "TO_CLIENT",
    "TO_INSPECTOR",
    "TO_PUBLISHER",
    "TO_RANK",
    "TO_RECEIVER",
    "TO_SENDER",
    "TO_SERVER",
    "TO_SUBSCRIBER",
    "conversation",
]

TO_RECEIVER = "receiver"
TO_SENDER = "sender"

ARENA = 1 << 20


class Talk:
    """The state of a sender, from which its next valid frame is derived."""

    def __init__(self, chooser: Chooser, one_in: int) -> None:
        self._chooser = chooser
        self._one_in = one_in
        self._next_message = 0
        self._permits = 64
        self._in_flight: list[int] = []  # and not discarded; this side does not know which were taken
        self._open: dict[int, int] = {}  # how many tensors each message has
        self.segments = Segments(chooser, one_in)
        self.movement = Movement(chooser, one_in, self.segments)
        self._next_block = 0

    def hello(self) -> Frame:
        self._open.clear()
        self._in_flight.clear()
        self.segments.sizes.clear()
        self.movement.begin()
        self._permits = one_of(self._chooser, (64, 8, 1))
        return ["hello", VERSION, 1, STAND_IN, self._permits, ARENA, self._next_message]

    def frame(self) -> Frame:
        chooser = self._chooser
        frame = self._misplaced() if happens(chooser, 4 * self._one_in) else self._right_frame()
        return broken_frame(chooser, frame) if happens(chooser, self._one_in) else frame

    def _misplaced(self) -> Frame:
        """Return a frame that is valid elsewhere."""
        return one_of(self._chooser, (self.hello(), INSPECT, SUBSCRIBE))

    def _right_frame(self) -> Frame:
        chooser = self._chooser
        match chooser.number(0, 12):
            case 0 | 1:
                return self._new_message(last=True)
            case 2:
                return self._new_message(last=False)
            case 3 | 4 if self._open:
                message = one_of(chooser, list(self._open))
                return self._put(message, last=chooser.number(0, 1) == 1)
            case 5 if self._open:
                message = one_of(chooser, list(self._open))
                return ["end", message, self._open.pop(message)]
            case 6 if self._in_flight:
                return self._discard(one_of(chooser, self._in_flight))
            case 7 if happens(chooser, 8):
                reason = one_of(chooser, ("", "a reason"))
                return ["close", reason, happens(chooser, 4), happens(chooser, 4), happens(chooser, 2)]
            case 8 | 9 if len(self.segments.sizes) < MAX_SEGMENTS or happens(chooser, self._one_in):
                return self.segments.attach()
            case 12:
                return self._new_message(last=False, has_tensor=False)
            case _:
                return self._new_message(last=True)

    def _new_message(self, *, last: bool, has_tensor: bool = True) -> Frame:
        """Begin a message, or discard the oldest one if as many are in flight as the hello stated."""
        if len(self._in_flight) >= self._permits and not happens(self._chooser, self._one_in):
            return self._discard(self._in_flight[0])
        message = self._begin()
        if not last:
            self._open[message] = 0
        return self._put(message, last=last) if has_tensor else ["begin", message]

    def _discard(self, message: int) -> Frame:
        self._in_flight.remove(message)
        self._open.pop(message, None)
        return ["discard", message]

    def _begin(self) -> int:
        self._next_message += 1
        self._in_flight.append(self._next_message - 1)
        return self._next_message - 1

    def _put(self, message: int, *, last: bool) -> Frame:
        chooser = self._chooser
        tensor = self._open.get(message, 0)
        if message in self._open:
            self._open[message] += 1
            if last:
                del self._open[message]
        frame = put_frame(
            chooser, self._one_in, self.segments, (message, tensor), self._next_block, last=last
        )
        self._next_block += frame[BLOCK] is not None
        return frame


def conversation(chooser: Chooser, to: str) -> Conversation:
    """Generate a conversation of a rogue with one kind of peer."""
    return Conversation(to, tuple(_STEPS[to](chooser)))


def _to_receiver(chooser: Chooser) -> list[Step]:
    one_in = one_of(chooser, WILDNESS)
    talk = Talk(chooser, one_in)
    steps: list[Step] = []
    if not happens(chooser, 20):
        steps.append(_opening(chooser, talk, one_in, talk.hello()))
    for _ in range(chooser.number(1, 12)):
        if happens(chooser, 20):
            steps.append(_opening(chooser, talk, one_in, talk.hello()))
        if happens(chooser, 40):  # its further frames are all invalid
            steps.append(_opening(chooser, talk, one_in, one_of(chooser, (INSPECT, SUBSCRIBE))))
        elif happens(chooser, 8):
            inspect = broken_frame(chooser, INSPECT) if happens(chooser, one_in) else INSPECT
            steps.append(Step(msgspec.msgpack.encode([inspect]).hex(), beside=True))
        moves = talk.movement.messages()
        frames = [talk.frame() for _ in range(chooser.number(1, 4))]
        steps.append(msgspec.structs.replace(_step(chooser, talk, one_in, frames), moves=moves))
    return steps


def _opening(chooser: Chooser, talk: Talk, one_in: int, frame: Frame) -> Step:
    """Return the first record of a connection, in which one frame is valid."""
    frames = [broken_frame(chooser, frame) if happens(chooser, one_in) else frame]
    frames += [talk.frame()] if happens(chooser, 2 * one_in) else []
    step = _step(chooser, talk, one_in, frames, connects=True)
    return msgspec.structs.replace(step, opening=any_opening(chooser, one_in))


def _step(chooser: Chooser, talk: Talk, one_in: int, frames: list[Frame], *, connects: bool = False) -> Step:
    record = record_of(chooser, frames, 2 * one_in)
    descriptors = talk.segments.taken_descriptors()
    if happens(chooser, 2 * one_in):
        descriptors += [one_of(chooser, ANYTHING)] * one_of(chooser, (1, 7, 8, 9, 64))
    return Step(record.hex(), tuple(descriptors), connects)


def _to_sender(chooser: Chooser) -> list[Step]:
    """Generate replies to a new sender, whose messages and blocks are numbered from 0."""
    one_in = one_of(chooser, WILDNESS)
    movement = Movement(chooser, one_in, Segments(chooser, one_in))
    steps: list[Step] = []
    frames: list[Frame] = []
    if not happens(chooser, 10):
        longest = one_of(chooser, (MAX_RECORD_BYTES, LEAST_FRAME_BYTES))
        frames.append(["welcome", VERSION, 1, longest, "r", not happens(chooser, 8)])
    for _ in range(chooser.number(0, 5)):
        for _ in range(chooser.number(0, 3)):
            frame = _answer(chooser, one_in)
            frames.append(broken_frame(chooser, frame) if happens(chooser, one_in) else frame)
            if happens(chooser, 8):
                frames.append(frame)  # a duplicate
        descriptors = ["pipe"] * one_of(chooser, (1, 8, 9, 64)) if happens(chooser, 10) else []
        record = record_of(chooser, frames, 2 * one_in)
        # By the third record the sender has sent tensors, so that a reply can be valid.
        after = 3 - chooser.number(0, 3)
        steps.append(Step(record.hex(), tuple(descriptors), after=after, moves=movement.messages()))
        frames = []
    return steps


def _answer(chooser: Chooser, one_in: int) -> Frame:
    tag = one_of(chooser, ("taken", "discarded", "taken", "discarded", "release"))
    if happens(chooser, 16):
        return ["close", one_of(chooser, ("", "no room")), *(happens(chooser, 2) for _ in range(3))]
    if happens(chooser, 4 * one_in):  # a second one, unless it is the first frame
        longest = one_of(chooser, (MAX_RECORD_BYTES, LEAST_FRAME_BYTES, 2**31, 2**63 - 1))
        return ["welcome", VERSION, 1, longest, "r", happens(chooser, 2)]
    numbers = [chooser.number(0, 2) for _ in range(chooser.number(1, 2))]
    if happens(chooser, one_in):
        numbers.append(boundary(chooser))
    if happens(chooser, one_in):
        numbers = numbers[:1] * one_of(chooser, (MAX_NUMBERS, MAX_NUMBERS + 1))
    return [tag, numbers]


_STEPS = {
    TO_RECEIVER: _to_receiver,
    TO_SENDER: _to_sender,
    TO_INSPECTOR: to_inspector,
    TO_SERVER: to_server,
    TO_CLIENT: to_client,
    TO_PUBLISHER: to_publisher,
    TO_RANK: to_rank,
    TO_SUBSCRIBER: to_subscriber,
}
