"""Nearly valid conversations with a peer of any role, in which most frames follow from those before them.

One talker generates them all. Its state is that of one end of a connection: its segments and messages, and
the messages and blocks of the peer that it has not answered. The role of the talker decides which frames
are usual. Occasionally, it sends a frame of another role.
"""

import msgspec
from msgspec.structs import replace

from aiotensor.protocol.connection import MAX_SEGMENTS
from aiotensor.protocol.frames import MAX_NUMBERS, MAX_TEXT, VERSION
from aiotensor.protocol.network import Area
from verification.fuzz.bodies import body_of
from verification.fuzz.moving import Movement, any_opening
from verification.fuzz.placing import ANYTHING, Segments, attributes, with_trace
from verification.fuzz.steps import FIRST_BLOCK, FIRST_NUMBER, PEER, PID, STAND_IN, Conversation, Step
from verification.fuzz.things import CONTENT, GUARD, IMAGE, WHERE
from verification.fuzz.wire import Chooser, Frame, boundary, bytes_or_fault, frame_or_fault, record_of

TO_RECEIVER, TO_SENDER = "receiver", "sender"
TO_PUBLISHER, TO_SUBSCRIBER = "publisher", "subscriber"
TO_SERVER, TO_CLIENT = "server", "client"

MOST_READ = 4  # messages of the peer that a rogue reads on one connection

_ARENA_BYTES = 1 << 20
_WITH_BODIES = ("publisher", "client", "server")

# The role of the rogue that talks to each peer, and the frames that it usually sends; see `Talker`.
ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    TO_RECEIVER: (
        "sender",
        ("put", "put", "begin", "more", "more", "end", "discard", "attach", "detach", "close"),
    ),
    TO_SENDER: ("receiver", ("taken", "discarded", "taken", "release", "close")),
    TO_PUBLISHER: ("subscriber", ("taken", "release", "taken", "discarded", "close")),
    TO_SUBSCRIBER: ("publisher", ("message", "message", "attach", "message", "discard", "detach", "close")),
    TO_SERVER: (
        "client",
        ("message", "message", "attach", "message", "message", "discard", "release", "detach", "close"),
    ),
    TO_CLIENT: (
        "server",
        ("answer", "answer", "taken", "attach", "answer", "failure", "release", "taken", "close"),
    ),
}

# The peers whose rogues connect, and may do so several times.
LISTENERS = (TO_RECEIVER, TO_PUBLISHER, TO_SERVER)


class Talker:
    """One end of a connection, from whose state its next valid frame is derived.

    Args:
        chooser: decides.
        one_in: how seldom something is wrong.
        to: the role of the peer, one of `ROLES`.

    Attributes:
        read: the number of messages of the peer that are read before the next record.
        segments: the segments of this end.
    """

    def __init__(self, chooser: Chooser, one_in: int, to: str) -> None:
        self.read = 0
        self._chooser = chooser
        self._one_in = one_in
        self._role, self._usual = ROLES[to]
        self._hears = to not in (TO_RECEIVER, TO_SUBSCRIBER)
        self._next_message = chooser.one_of((0, 7, 2**32)) if to == TO_SUBSCRIBER else 0
        self._makers = {
            "hello": self.hello,
            "attach": self._attach,
            "detach": self._detach,
            "begin": lambda: self._new_message(["begin", self._next_message]),
            "put": self._put_whole,
            "more": self._more,
            "none": lambda: self._new_message(["end", self._next_message, 0]),
            "end": self._end,
            "message": self._message,
            "answer": self._answer_with_message,
            "failure": self._fail,
            "discard": self._discard,
            "taken": lambda: self._return("taken", self._untaken, FIRST_NUMBER),
            "discarded": lambda: self._return("discarded", self._untaken, FIRST_NUMBER),
            "release": lambda: self._return("release", self._blocks, FIRST_BLOCK),
            "close": self._close,
        }
        self._begin()

    def _begin(self) -> None:
        """Forget the state of an earlier connection."""
        chooser, one_in = self._chooser, self._one_in
        self.read = 0
        self.segments = Segments(chooser, one_in)
        image = IMAGE if self._role in _WITH_BODIES else GUARD
        self._movement = Movement(chooser, one_in, self.segments, image)
        self._permits = 0
        self._in_flight: list[int] = []  # and not discarded; this end does not know which were taken
        self._open: dict[int, int] = {}  # how many tensors each message has
        self._untaken: list[int] = []  # messages of the peer
        self._unanswered: list[int] = []
        self._blocks: list[int] = []  # of messages that this end has taken
        self._has_content = self._has_moved_content = False  # in segment 0

    def opening(self, role: str = "") -> Step:
        """Return the first record of a connection, in which one frame is valid."""
        chooser, one_in = self._chooser, self._one_in
        frame = self.hello(role)
        frames = [frame_or_fault(chooser, one_in, frame)]
        frames += [self.frame()] if chooser.happens(2 * one_in) else []
        return replace(self._step(frames), after=0, opening=any_opening(chooser, one_in))

    def step(self) -> Step:
        """Return the next record, with the messages before it."""
        moves = self._moves()
        if self._hears and self._chooser.happens(2):
            self._hear()
        frames = [self.frame() for _ in range(self._chooser.number(1, 4))]
        return replace(self._step(frames), moves=moves)

    def _hear(self) -> None:
        """Read a message of the peer before the next record."""
        if self.read < MOST_READ:
            self._untaken.append(self.read)
            self._unanswered.append(self.read)
            self.read += 1

    def _step(self, frames: list[Frame]) -> Step:
        chooser, one_in = self._chooser, self._one_in
        descriptors = self.segments.taken_descriptors()
        if chooser.happens(3 * one_in):
            descriptors += [chooser.one_of(ANYTHING)] * chooser.one_of((1, 7, 8, 9, 64))
        return Step(record_of(chooser, frames, 2 * one_in).hex(), tuple(descriptors), after=self.read)

    def _moves(self) -> tuple[str, ...]:
        """Return the messages before the next record; usually, the content is moved first."""
        first: tuple[str, ...] = ()
        if self._has_content and not self._has_moved_content:
            self._has_moved_content = True
            if not self._chooser.happens(self._one_in):
                first = (self._movement.whole(Area(0, 0), len(CONTENT)),)
        return first + self._movement.messages()

    def frame(self) -> Frame:
        """Return the next frame."""
        chooser = self._chooser
        kind = chooser.one_of(self._usual)
        if chooser.happens(4 * self._one_in):
            kind = chooser.one_of(list(self._makers))
        if kind == "close" and not chooser.happens(4):
            kind = self._usual[0]
        frame = self._makers[kind]()
        return frame_or_fault(chooser, self._one_in, frame)

    # Frames

    def hello(self, role: str = "") -> Frame:
        """Begin a connection, usually in the role of this talker."""
        chooser = self._chooser
        self._begin()
        role = role or self._role
        sends = role in ("sender", *_WITH_BODIES)
        self._permits = chooser.one_of((64, 8, 1)) if sends else 0
        arena_bytes = _ARENA_BYTES if sends else 0
        if chooser.happens(3 * self._one_in):
            arena_bytes = chooser.one_of((0, 1, 4096, 64 << 20, 2**62, 2**63 - 1))
        version = chooser.one_of((VERSION + 1, 0)) if chooser.happens(4 * self._one_in) else VERSION
        identity = "" if role == "inspector" else STAND_IN
        usage = [self._permits, arena_bytes, self._next_message]
        frame: Frame = ["hello", version, PID, role, identity, *usage, not chooser.happens(16)]
        withdraws = role == "publisher" and chooser.happens(2)
        known: Frame = ["", 0]
        if role == "subscriber" and chooser.happens(3):
            next_numbers = (0, FIRST_NUMBER, FIRST_NUMBER + 2)
            known = [chooser.one_of((PEER, "", "another")), chooser.one_of(next_numbers)]
        limits = [chooser.one_of((64, 4, 64, 0)), chooser.one_of((None, 1 << 16, None, 64))]
        return [*frame, withdraws, *known, *limits]

    def _attach(self) -> Frame:
        if len(self.segments.sizes) >= MAX_SEGMENTS and not self._chooser.happens(self._one_in):
            return self._detach()
        is_content = self._role in _WITH_BODIES and not self.segments.sizes
        self._has_content |= is_content
        return self.segments.attach("content" if is_content else "sealed")

    def _detach(self) -> Frame:
        chooser = self._chooser
        if not self.segments.sizes:
            return ["detach", 0] if chooser.happens(self._one_in) else self._attach()
        number = chooser.one_of(list(self.segments.sizes))
        del self.segments.sizes[number]
        self._has_content &= number != 0
        return ["detach", number]

    def _new_message(self, frame: Frame) -> Frame:
        """Begin a message, or discard the oldest one if as many are in flight as the hello stated."""
        is_full = len(self._in_flight) >= self._permits
        if is_full and self._in_flight and not self._chooser.happens(self._one_in):
            return self._discard(self._in_flight[0])
        self._in_flight.append(self._next_message)
        if frame[0] == "begin" or (frame[0] == "put" and not frame[9]):
            self._open[self._next_message] = int(frame[0] == "put")
        steps = (1, 1, 1, 4) if self._role == "publisher" else (1,)
        self._next_message += self._chooser.one_of(steps)
        return frame

    def _put_whole(self) -> Frame:
        is_whole = not self._chooser.happens(3)
        return self._new_message(self._put(self._next_message, 0, last=is_whole))

    def _more(self) -> Frame:
        if not self._open:
            return self._put_whole()
        message = self._chooser.one_of(list(self._open))
        tensor = self._open[message]
        self._open[message] += 1
        is_last = self._chooser.happens(2)
        if is_last:
            del self._open[message]
        return self._put(message, tensor, last=is_last)

    def _put(self, message: int, tensor: int, *, last: bool) -> Frame:
        chooser = self._chooser
        is_inline = not self.segments.sizes or chooser.number(0, 2) == 0
        dtype, shape, placement, payload, block = self.segments.tensor(is_inline=is_inline)
        frame: Frame = ["put", message, tensor, dtype, shape, "cpu", placement, payload, block, last]
        if chooser.happens(4):
            frame.append(attributes(chooser, self._one_in, dtype, len(shape)))
        return with_trace(chooser, self._one_in, frame, 11)

    def _end(self) -> Frame:
        whole = {message: count for message, count in self._open.items() if count}
        if not whole:
            return self._more()
        message = self._chooser.one_of(list(whole))
        return ["end", message, self._open.pop(message)]

    def _message(self) -> Frame:
        asks = self._role == "client" and not self._chooser.happens(4)
        return self._new_message(self._whole_message(asks=asks))

    def _answer_with_message(self) -> Frame:
        question = self._question()
        if question is None:
            return self._attach()
        frame = self._whole_message(answers=FIRST_NUMBER + question)
        self._next_message += 1
        return frame

    def _fail(self) -> Frame:
        question = self._question()
        if question is None:
            return self._attach()
        text = self._chooser.one_of(("a reason", "", "x" * MAX_TEXT))
        return ["failure", FIRST_NUMBER + question, "ValueError", text, self._chooser.happens(4)]

    def _question(self) -> int | None:
        """Return the number of a message of the peer, usually an unanswered one; None if there is none."""
        if not self._unanswered:
            self._hear()
        if self._chooser.happens(self._one_in):
            return self._chooser.number(0, MOST_READ)
        return self._unanswered.pop(0) if self._unanswered else None

    def _whole_message(self, *, asks: bool = False, answers: int | None = None) -> Frame:
        chooser, one_in, number = self._chooser, self._one_in, self._next_message
        if not chooser.happens(4) or not self.segments.sizes:
            content = _content(chooser, one_in, self.segments)
            nbytes = boundary(chooser) if chooser.happens(2 * one_in) else len(content)
            frame: Frame = ["message", number, "inline", content, nbytes, None]
        else:
            payload, nbytes = WHERE.pack(0, 0), len(CONTENT)
            if chooser.happens(one_in) or not self._has_content:
                nbytes = chooser.one_of((0, 64, 4096, boundary(chooser)))
                payload = self.segments.place(64, 1)
            frame = ["message", number, "arena", payload, nbytes, self.segments.block()]
        frame = with_trace(chooser, one_in, frame, 6)
        return [*frame, *[None] * (7 - len(frame)), asks, answers]

    def _discard(self, message: int | None = None) -> Frame:
        if message is None:
            if not self._in_flight:
                return self._makers[self._usual[0]]()
            message = self._chooser.one_of(self._in_flight)
        self._in_flight.remove(message)
        self._open.pop(message, None)
        return ["discard", message]

    def _return(self, tag: str, left: list[int], first: int) -> Frame:
        """Return some numbers, the oldest first; add a wrong number now and then."""
        chooser = self._chooser
        count = chooser.number(1, len(left)) if left else 0
        some = left[:count]
        del left[:count]
        if tag == "taken":
            self._blocks += some
        numbers = [first + number for number in some]
        if chooser.happens(self._one_in):
            wrong = chooser.one_of((FIRST_NUMBER, FIRST_BLOCK)) + chooser.number(0, 9)
            numbers.append(chooser.one_of((wrong, boundary(chooser))))
        if chooser.happens(2 * self._one_in):
            numbers = (numbers or [first])[:1] * chooser.one_of((2, MAX_NUMBERS, MAX_NUMBERS + 1))
        return [tag, numbers]

    def _close(self) -> Frame:
        chooser = self._chooser
        return ["close", chooser.one_of(("", "a reason")), *(chooser.happens(4) for _ in range(3))]


def _content(chooser: Chooser, one_in: int, segments: Segments) -> bytes:
    """Generate the content of a message."""
    tensors: list[Frame] = []
    for _ in range(chooser.number(0, 2) if segments.sizes else 0):
        tensor: Frame = [*segments.tensor(is_inline=False)]
        if chooser.happens(4):
            tensor.append(attributes(chooser, one_in, str(tensor[0]), len(tensor[1])))  # type: ignore[arg-type]
        tensors.append(frame_or_fault(chooser, one_in, tensor))
    content = frame_or_fault(chooser, 2 * one_in, [body_of(chooser, one_in, len(tensors)), tensors])
    return bytes_or_fault(chooser, 2 * one_in, msgspec.msgpack.encode(content))


def any_content(chooser: Chooser) -> bytes:
    """Generate the content of a message whose tensors are in two segments."""
    one_in = chooser.one_in()
    segments = Segments(chooser, one_in)
    segments.attach("sealed")
    segments.attach("sealed")
    return _content(chooser, one_in, segments)


def conversation(chooser: Chooser, to: str) -> Conversation:
    """Generate a conversation of a rogue with a peer of a role."""
    talker = Talker(chooser, chooser.one_in(), to)
    steps: list[Step] = []
    if not chooser.happens(20):
        steps.append(talker.opening())
    for _ in range(chooser.number(1, 10)):
        if to in LISTENERS:
            if chooser.happens(16):
                # In another role, all its further frames are invalid.
                role = chooser.one_of(("", "", "inspector", "sender", "subscriber", "client", "rank"))
                steps.append(replace(talker.opening(role), connects=True))
            elif chooser.happens(10):
                steps.append(_beside(chooser, to))
        steps.append(talker.step())
    return Conversation(to, tuple(steps))


def _beside(chooser: Chooser, to: str) -> Step:
    """Return the first record of a further connection, usually that of an inspector."""
    other = Talker(chooser, chooser.one_in(), to)
    if chooser.happens(4):
        frame = other.frame()
        return Step(msgspec.msgpack.encode([frame]).hex(), beside=True)
    return replace(other.opening("inspector"), beside=True, descriptors=(), opening=None)
