"""One end of a connection; both ends follow the same rules, whatever their roles.

A `Connection` performs no I/O: received bytes produce validated frames, which serve as events, and commands
produce records to write. The owner of the object passes the bytes between it and a socket, and closes the
socket when the state is CLOSED.

    OPENING --hellos of both ends, accepted--> OPEN --Close, violation, refusal, loss--> CLOSED
       |                                                                                   ^
       '--Close, violation, refusal, loss--------------------------------------------------'

Either end may commit a violation or refuse the other; a loss is the end of the socket. The connecting end
sends its hello first, and may announce messages before the hello of the accepting end. Nothing follows a
`Close`: commands have no effect on a closed connection, and records of the peer are ignored.

A message, in either direction, is numbered by its first frame, and numbers increase:

    --Begin or Put--> begun --End, or the last Put--> whole --Taken--> (ended)
                        |                               |
                        '-------------------------------'--Discard, or Discarded by the other end--> (ended)

Publishers skip the numbers of messages that they do not send. They send each message in one frame, and never
return to an earlier number. Senders may continue a message before they learn that the other
end has discarded it; the owner of the connection ignores such frames, as it ignores answers to messages that
it has discarded.
"""

import enum
from typing import NamedTuple

from msgspec.structs import replace

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.protocol.frames import (
    ARENA,
    DECODE_ERRORS,
    FORWARDED,
    INLINE,
    MAX_FRAMES,
    MAX_NUMBERS,
    MAX_RECORD_BYTES,
    MAX_TENSORS,
    VERSION,
    Attach,
    Begin,
    Close,
    Detach,
    Discard,
    Discarded,
    End,
    Failure,
    Frame,
    Hello,
    Message,
    Put,
    Release,
    Taken,
    decode_record,
    encode,
    encode_record,
)
from aiotensor.types import MAX_NUMBER

# The maximum number of segments of one end, half of which may be forwarded. Without a limit, it could attach
# single pages until the other process has no mappings left (65530 by default on Linux).
MAX_SEGMENTS = 16

# The largest page size of a peer, which rounds the size of its arena up to whole pages.
_LARGEST_PAGE_BYTES = 64 * 1024

# The bytes that are counted for each frame in addition to its payload, so that no record has more than
# `MAX_FRAMES` frames. Nearly all frames are shorter than this.
_FRAME_BYTES = MAX_RECORD_BYTES // MAX_FRAMES

# The maximum of counted bytes in a record. The rest is for the answers, of which there are three kinds.
_SPACE = MAX_RECORD_BYTES - 3 * _FRAME_BYTES

_WHOLE = -1


class ConnectionState(enum.Enum):
    """The state of a connection object."""

    OPENING = "waiting for the hello of the peer"
    OPEN = "open"
    CLOSED = "closed"


# Module variables, since each frame is checked against the state, and looking up a member of an enum is slow.
OPENING, OPEN, CLOSED = ConnectionState


class Loss(NamedTuple):
    """The end of a connection.

    Attributes:
        error: the error to raise in calls that wait for the peer.
        is_retried: whether to connect again automatically.
        reason: the text of the error without the name of the peer, for logs.
        is_clean: whether the peer has closed.
        is_last: whether the last frame of the peer has ended the connection, so that none is missing.
    """

    error: PeerLostError | RefusedError
    is_retried: bool
    reason: str = ""
    is_clean: bool = False
    is_last: bool = False


def mismatch(theirs: int, ours: int, peer: str, this: str) -> str | None:
    """Return the reason to refuse a peer because of its version; None if both sides have the same one.

    Args:
        theirs: the version of the peer.
        ours: the version of this side.
        peer: the name of the peer, which both sides understand, since the peer also gets the reason.
        this: the name of this side, as above.
    """
    if theirs == ours:
        return None
    return (
        f"{peer} has protocol version {theirs}, and {this} has version {ours}: install the same version of "
        "aiotensor on both sides"
    )


class Connection:
    """One end of a connection.

    Args:
        hello: the hello of this end.
        peer: the name of the other end for error messages, such as ``"the receiver"``.
        theirs: the hello of the other end, if that end has connected. Otherwise, this end connects: it sends
            its hello first, and the first frame of the other end is the answer.

    Attributes:
        state: the state of the connection.
        peer_pid: the process id that the peer stated; None before its hello.
        hello: the hello of this end.
        theirs: the hello of the other end; None before it has arrived.
        mismatch: the reason to refuse the other end because of its version; None if there is none.
        next_message: the number of the next message of this end, on this connection or on the next one.
        segments: the sizes of the segments that the other end has attached, in bytes, by their numbers.
        records: the records that are complete because the next frame did not fit into them.
    """

    def __init__(self, hello: Hello, peer: str, theirs: Hello | None = None) -> None:
        self.state = OPENING
        self.peer_pid: int | None = None
        self._role = hello.role
        self._this = f"the {hello.role}"
        self._peer = peer
        self.hello = hello
        self.theirs: Hello | None = None
        self.mismatch: str | None = None
        self.next_message = hello.first
        self.segments: dict[int, int] = {}
        self._sent: dict[int, int] = {}  # for each message of this end: the announced tensors, or _WHOLE
        self._received: dict[int, int] = {}  # the same for the messages of the other end
        self._next_received = 0
        self._max_received = 0
        self._asked: set[int] = set()  # the messages of this end that still get an answer
        self._skips = False
        self._taken: list[int] = []
        self._discarded: list[int] = []
        self._released: list[int] = []
        self.records: list[bytes] = []
        self._frames: list[Frame] = []  # of the next record
        self._nbytes = 0  # counted for these frames
        if theirs is None:
            self.records.append(encode(hello))
        else:
            self.mismatch = self._greet(theirs)

    @property
    def is_closed(self) -> bool:
        """Whether no more frames are sent or received."""
        return self.state is CLOSED

    @property
    def messages(self) -> int:
        """The number of messages that the other end has announced, also on earlier connections."""
        return self._next_received

    @property
    def in_flight(self) -> int:
        """The number of messages of the other end that have begun to arrive, and have not ended."""
        return len(self._received)

    # Commands

    def admit(self, first: int = 0) -> None:
        """Admit the other end, which has connected; the messages of this end begin with number `first`."""
        self.hello = replace(self.hello, first=first)
        self.next_message = first
        self._send(self.hello)
        self.state = OPEN

    def refuse(self, reason: str, *, is_refusal: bool = True) -> None:
        """Close the connection with a reason; see `Close` for `is_refusal`."""
        if self.state is OPENING:  # the other end reads the version in the hello
            self._send(replace(self.hello, is_admitted=False))
        self.close(Close(reason, is_refusal))

    def close(self, close: Close) -> None:
        """Close the connection: `close` is the last frame, in the record of all pending answers."""
        self.records = self.data_to_send(close)
        self.state = CLOSED

    def detach(self, segment: int) -> None:
        """Withdraw a segment in which the other end uses no block."""
        self._send(Detach(segment))

    def send(self, frame: Frame, nbytes: int = 0) -> None:
        """Send a frame whose payload has `nbytes` bytes, and that changes no state of this end."""
        self._send(frame, nbytes)

    def begin(self) -> int:
        """Begin a message before its first tensor, and return its number."""
        number = self.next_message
        self.next_message += 1
        self._sent[number] = 0
        self._send(Begin(number))
        return number

    def put(self, put: Put) -> None:
        """Announce a tensor of a message that has not ended, or of a new one from `next_message` on."""
        number = put.message
        if number >= self.next_message:
            self.next_message = number + 1
        self._sent[number] = _WHOLE if put.last else put.tensor + 1
        nbytes = len(put.payload) + _FRAME_BYTES
        if put.trace is not None:
            nbytes += sum(map(len, (*put.trace, *put.trace.values())))
        if self._nbytes + nbytes > _SPACE or self.state is CLOSED:
            self._send(put, nbytes - _FRAME_BYTES)
        else:  # as `_send`, without a call
            self._frames.append(put)
            self._nbytes += nbytes

    def end(self, message: int) -> None:
        """Complete a message; a new message is whole without a tensor."""
        self.next_message = max(self.next_message, message + 1)
        self._send(End(message, self._sent.get(message, 0)))
        self._sent[message] = _WHOLE

    def post(self, message: Message, *, waits: bool = False) -> list[bytes]:
        """Announce a message with a body, whose number is `next_message`, and return the records to write.

        With `waits`, there are none: the message waits for `data_to_send`.
        """
        if self.state is CLOSED:
            return []
        number = message.message
        self.next_message = number + 1
        if message.answers is None:  # an answer counts as taken
            self._sent[number] = _WHOLE
            if message.asks:
                self._asked.add(number)
        nbytes = len(message.payload)
        if waits:
            self._send(message, nbytes)
            return []
        is_first = not (self._frames or self.records or self._taken or self._discarded or self._released)
        if is_first and nbytes < _SPACE - _FRAME_BYTES:  # as `data_to_send`, without a call
            return [encode_record((message,))]
        self._send(message, nbytes)
        return self.data_to_send()

    def publish(self, number: int, record: bytes) -> None:
        """Announce a publication with its record, which is the same for all subscribers."""
        if self.state is not CLOSED:
            self.next_message = number + 1
            self.records = self.data_to_send()
            self.records.append(record)

    def discard(self, message: int) -> None:
        """Withdraw a message that has not ended; answers to it are ignored from now on."""
        self._sent.pop(message, None)
        self._send(Discard(message))

    def taken(self, message: int) -> None:
        """Return the permit of a message of the other end whose tensors were all taken."""
        if self._received.pop(message, None) is not None:
            self._taken.append(message)

    def taken_now(self, message: int) -> list[bytes]:
        """Do the same, and return the records to write."""
        if self._received.pop(message, None) is not None:
            if not (self._frames or self.records or self._taken or self._discarded or self._released):
                return [encode_record((Taken((message,)),))]  # as `data_to_send`, without a call
            self._taken.append(message)
        return self.data_to_send()

    def discarded(self, message: int, *, confirms: bool = False) -> None:
        """Return the permit of a message that no call will take, if it has begun and not ended.

        Args:
            message: the number of the message.
            confirms: whether to answer even if the other end has withdrawn the message.
        """
        if self._received.pop(message, None) is not None or confirms:
            self._discarded.append(message)

    def release(self, block: int) -> None:
        """Return a block; called once for each tensor or content that was announced in it."""
        self._released.append(block)

    def data_to_send(self, last: Frame | None = None) -> list[bytes]:
        """Return all records to write; `last` is a further frame, after the answers."""
        if self._taken or self._discarded or self._released:
            answers = (Taken, self._taken), (Discarded, self._discarded), (Release, self._released)
            for make, numbers in answers:
                while len(numbers) > MAX_NUMBERS:
                    self._send(make(tuple(numbers[:MAX_NUMBERS])))
                    del numbers[:MAX_NUMBERS]
                if numbers and self.state is not CLOSED:
                    self._frames.append(make(tuple(numbers)))  # as `_send`, without a call
                numbers.clear()
        if last is not None:
            self._send(last)
        records, self.records = self.records, []
        if self._frames:
            records.append(encode_record(self._frames))
            self._frames, self._nbytes = [], 0
        return records

    def _send(self, frame: Frame, payload_bytes: int = 0) -> None:
        """Add a frame to the next record; this has no effect on a closed connection."""
        if self.state is CLOSED:
            return
        nbytes = payload_bytes + _FRAME_BYTES
        if self._nbytes + nbytes > _SPACE and self._frames:
            self.records.append(encode_record(self._frames))
            self._frames, self._nbytes = [], 0
        self._frames.append(frame)
        self._nbytes += nbytes

    # Frames of the other end

    def receive(self, data: bytes | memoryview) -> list[Frame]:
        """Validate a record, and return its frames in order, up to a `Close`.

        An error closes the connection, and no frame of the record is returned.

        Raises:
            ProtocolError: the record is invalid, or a frame in it violates the protocol.
            RefusedError: the peer has another version.
        """
        if self.state is CLOSED:
            return []
        try:
            if len(data) > MAX_RECORD_BYTES:
                raise ProtocolError(f"it sent a record of more than {MAX_RECORD_BYTES} bytes")
            frames = decode_record(data)
            for count, frame in enumerate(frames, 1):
                if self.state is not OPEN and not isinstance(frame, Hello | Close):
                    raise ProtocolError("it sent a frame before its hello")
                match frame:
                    case Message():
                        number = frame.message
                        if (
                            number == self._next_received
                            and frame.block is None
                            and frame.placement == INLINE
                            and len(self._received) < self._max_received
                            and number < MAX_NUMBER
                        ):  # most messages, as `_check_message`, without a call
                            self._next_received = number + 1
                            if frame.answers is None:
                                self._received[number] = _WHOLE
                            elif frame.answers in self._asked:
                                self._asked.remove(frame.answers)
                            else:
                                raise _unasked(frame.answers)
                        else:
                            self._check_message(frame)
                    case Put():
                        number = frame.message
                        if (
                            number == self._next_received
                            and frame.last
                            and not frame.tensor
                            and len(self._received) < self._max_received
                            and number < MAX_NUMBER
                        ):  # most tensors, as above
                            self._next_received = number + 1
                            self._received[number] = _WHOLE
                        else:
                            self._check_message(frame)
                    case End() | Begin():
                        self._check_message(frame)
                    case Failure():
                        if frame.message in self._asked:
                            self._asked.remove(frame.message)
                        elif not self.hello.first <= frame.message < self.next_message:
                            raise ProtocolError(f"it refused message {frame.message}, which was never sent")
                    case Taken() | Discarded():
                        for number in frame.messages:
                            if isinstance(frame, Discarded):
                                self._asked.discard(number)
                            sent = self._sent.pop(number, None)
                            if sent is None:  # withdrawn by this end, a publication, or never sent
                                if not self.hello.first <= number < self.next_message:
                                    raise ProtocolError(f"it answered message {number}, which was never sent")
                            elif sent != _WHOLE and isinstance(frame, Taken):
                                raise ProtocolError(f"it took message {number}, which was not whole")
                    case Release():
                        pass  # the arena has counted the announcements of each block
                    case Discard():
                        self._check_sent(frame.message)
                        self._received.pop(frame.message, None)
                    case Attach() | Detach():
                        self._check_segment(frame)
                    case Hello():
                        reason = self._greet(frame)
                        if reason is not None:
                            raise self.refused(reason).error
                        self.state = OPEN if frame.is_admitted else OPENING
                    case Close():
                        self.state = CLOSED
                        return frames[:count]
        except ProtocolError:
            self.state = CLOSED
            raise
        except DECODE_ERRORS as error:
            self.state = CLOSED
            raise ProtocolError(f"it sent a frame that cannot be decoded: {error}") from error
        return frames

    def _greet(self, hello: Hello) -> str | None:
        """Record the hello of the other end, and return the reason to refuse its version, or None."""
        if self.theirs is not None:
            raise ProtocolError("it sent a second hello")
        self.theirs = hello
        self.peer_pid = hello.pid
        self._next_received = hello.first
        self._max_received = hello.max_messages
        self._skips = hello.role == "publisher"
        return mismatch(hello.version, VERSION, self._peer, self._this)

    def _check_message(self, frame: Put | End | Begin | Message) -> None:
        number = frame.message
        count = self._received.get(number)
        if count is None:
            if number < self._next_received and not self._skips:
                self._check_sent(number)  # this end has discarded the message
                if isinstance(frame, Begin | Message):
                    raise ProtocolError(f"it began message {number} again")
                return
            if number < self._next_received or (number > self._next_received and not self._skips):
                raise ProtocolError(
                    f"it sent a frame of message {number}, but the next one is {self._next_received}"
                )
            if number == MAX_NUMBER:
                raise ProtocolError("it sent more messages than there are numbers")
            if len(self._received) >= self._max_received:
                raise ProtocolError(f"it has more than its limit of {self._max_received} messages in flight")
            self._next_received = number + 1
            count = 0
        elif isinstance(frame, Begin | Message):
            raise ProtocolError(f"it began message {number} again")
        match frame:
            case Put():
                if frame.tensor != count or count >= MAX_TENSORS:  # _WHOLE is not a tensor number
                    raise ProtocolError(f"it sent tensor {frame.tensor} of message {number} out of order")
                count = _WHOLE if frame.last else count + 1
            case End():
                if frame.count != count:  # _WHOLE is not a valid count
                    raise ProtocolError(f"it ended message {number} with a wrong count of tensors")
                count = _WHOLE
            case Message():
                if frame.placement != (INLINE if frame.block is None else ARENA):
                    raise ProtocolError(
                        f"it used the unknown placement {frame.placement!r} for message {number}"
                    )
                if frame.answers is not None:
                    if frame.answers not in self._asked:
                        raise _unasked(frame.answers)
                    self._asked.remove(frame.answers)
                    return  # an answer counts as taken
                count = _WHOLE
        self._received[number] = count

    def _check_sent(self, number: int) -> None:
        first = 0 if self.theirs is None else self.theirs.first
        if not first <= number < self._next_received:
            raise ProtocolError(
                f"it sent a frame of message {number}, but the next one is {self._next_received}"
            )

    def _check_segment(self, frame: Attach | Detach) -> None:
        number = frame.segment
        if isinstance(frame, Detach):
            if self.segments.pop(number, None) is None:
                raise ProtocolError(f"it detached segment {number}, which it never attached")
            return
        arena_bytes = frame.arena_bytes
        if frame.placement != FORWARDED and self.theirs is not None:
            arena_bytes = self.theirs.arena_bytes
        # This limits each segment: a new segment may replace one whose blocks are still in use.
        max_bytes = ADDRESSES_PER_BYTE * (arena_bytes + _LARGEST_PAGE_BYTES)
        if frame.placement not in (ARENA, FORWARDED):
            raise ProtocolError(f"it attached memory for the unknown placement {frame.placement!r}")
        if number in self.segments:
            raise ProtocolError(f"it attached segment {number} twice")
        if len(self.segments) >= MAX_SEGMENTS:
            raise ProtocolError(f"it attached more than {MAX_SEGMENTS} segments")
        if frame.nbytes > max_bytes:
            raise ProtocolError(
                f"it attached {frame.nbytes} bytes, more than the {max_bytes} of its arena of {arena_bytes}"
            )
        self.segments[number] = frame.nbytes

    # The end

    def closed(self, close: Close) -> Loss:
        """End the connection because of a `Close` of the peer."""
        if not close.reason:
            loss = self.lost("it closed the connection", is_retried=True)
        elif close.is_refusal:
            loss = self.refused(close.reason)
        else:
            loss = self.lost(f"it closed the connection: {close.reason}", is_retried=close.retry)
        return loss._replace(is_clean=not close.reason, is_last=True)

    def violated(self, error: ProtocolError) -> Loss:
        """End the connection because the peer violated the protocol."""
        loss = self.lost(f"it broke the protocol: {error}", is_retried=False)
        # A new exception without a traceback: the traceback of the original one keeps the record alive.
        loss.error.__cause__ = ProtocolError(*error.args)
        return loss

    def lost(self, reason: str, *, is_retried: bool) -> Loss:
        """End the connection because the peer is gone.

        Args:
            reason: the end of the error message, which begins with "the connection to … was lost: ".
            is_retried: whether to connect again automatically.
        """
        self.state = CLOSED
        error = PeerLostError(f"the connection to {self._name} was lost: {reason}", pid=self.peer_pid)
        return Loss(error, is_retried, reason)

    def refused(self, reason: str) -> Loss:
        """End the connection because the peer refused this end, or has another version."""
        self.state = CLOSED
        error = RefusedError(f"{self._name} refused this {self._role}: {reason}", pid=self.peer_pid)
        return Loss(error, is_retried=False, reason=reason)

    def rejected(self, reason: str, *, is_refusal: bool) -> Loss:
        """End the connection because this end does not accept the other one."""
        self.state = CLOSED
        kind = RefusedError if is_refusal else PeerLostError
        text = f"{self._this} cannot use {self._name}: {reason}"
        return Loss(kind(text, pid=self.peer_pid), is_retried=False, reason=reason)

    @property
    def _name(self) -> str:
        pid = "" if self.peer_pid is None else f" (pid {self.peer_pid})"
        return f"{self._peer}{pid}"


def _unasked(number: int) -> ProtocolError:
    return ProtocolError(f"it answered message {number}, which asks for no answer, or has one")
