"""A receiver's end of one connection to a sender.

    OPENING --admit--> OPEN --Close, either way; violation--> CLOSED
       |                                                        ^
       '--refuse; violation-------------------------------------'

The `Hello` has arrived when the object is created. A message, as the sender announces it:

    --Begin or Put--> begun --End, or the last Put--> whole --taken--> (ended)
                        |                               |
                        '-------------------------------'--discard, or Discard by the sender--> (ended)

The numbers of messages and of their tensors increase without gaps. A sender may continue a message that this
side has discarded, because it does not know that yet; the owner of the connection drops such tensors.
"""

from typing import NamedTuple

from msgspec.structs import replace

from aiotensor.errors import ProtocolError
from aiotensor.protocol.answers import AnsweringConnection
from aiotensor.protocol.connection import CLOSED, OPEN, OPENING, Close
from aiotensor.protocol.frames import (
    FROM_SENDER,
    MAX_RECORD_BYTES,
    MAX_TENSORS,
    VERSION,
    Attach,
    Begin,
    Discard,
    End,
    FromSender,
    Hello,
    Put,
    ToSender,
    Welcome,
)
from aiotensor.protocol.segments import add_segment
from aiotensor.types import MAX_NUMBER

__all__ = ["AdmissionLimits", "ReceiverConnection"]

_WHOLE = -1


class AdmissionLimits(NamedTuple):
    """The limits of a receiver for all its senders together; None for no limit.

    The admission of a sender covers its maximum use, so that no later frame can exceed a limit.

    Attributes:
        senders: the maximum number of connected senders.
        mapped_bytes: the maximum shared memory that is mapped, or reserved for connected senders, in bytes.
        unclaimed_messages: the maximum number of messages that may wait to be taken.
        frame_bytes: the size in bytes of the longest valid record.
    """

    senders: int | None
    mapped_bytes: int | None
    unclaimed_messages: int | None
    frame_bytes: int

    def exceeded_by(self, hello: Hello, senders: int, mapped: int, promised: int) -> str | None:
        """Return a reason to refuse another sender, with a remedy; None if it can be admitted.

        Args:
            hello: the hello of the sender.
            senders: the number of connected senders.
            mapped: bytes of shared memory that are mapped, or reserved for connected senders.
            promised: the number of messages that connected senders may have in flight, plus the untaken
                messages of closed senders.
        """
        if self.senders is not None and senders >= self.senders:
            return (
                f"max_senders={self.senders} senders are already connected: raise max_senders of the "
                "receiver, or close another sender"
            )
        if self.mapped_bytes is not None and mapped + hello.arena_bytes > self.mapped_bytes:
            return (
                f"{mapped} bytes of shared memory are reserved for other senders and this sender requests "
                f"{hello.arena_bytes}, more than max_mapped_bytes={self.mapped_bytes} allows: raise "
                "max_mapped_bytes of the receiver, or lower arena_bytes of the senders"
            )
        wanted = hello.max_concurrent_videos
        if self.unclaimed_messages is not None and promised + wanted > self.unclaimed_messages:
            return (
                f"{promised} messages in flight are reserved for other senders and this sender requests "
                f"{wanted}, more than max_unclaimed_messages={self.unclaimed_messages} allows: raise "
                "max_unclaimed_messages of the receiver, or lower max_concurrent_videos of the senders"
            )
        return None


class ReceiverConnection(AnsweringConnection[FromSender, ToSender]):
    """A receiver's end of one connection to a sender.

    Args:
        hello: the first frame of the sender.
        welcome: the answer to it, if the sender is admitted.
        max_segment_bytes: the maximum address space that all segments of the sender may use, in bytes.

    Attributes:
        hello: the first frame of the sender.
        mismatch: the reason to refuse the sender because of its version; None if there is none.
        segments: the sizes of attached segments in bytes, by their numbers.
    """

    def __init__(self, hello: Hello, welcome: Welcome, max_segment_bytes: int) -> None:
        super().__init__("receiver", "the sender", FROM_SENDER, welcome.max_frame_bytes, MAX_RECORD_BYTES)
        self.hello = hello
        self.mismatch = self.record_hello(hello.version, hello.pid, VERSION)
        self.segments: dict[int, int] = {}
        self._welcome = welcome
        self._max_segment_bytes = max_segment_bytes
        self._next_message = hello.first_message
        self._messages: dict[int, int] = {}  # the number of tensors that have arrived, or _WHOLE

    @property
    def messages(self) -> int:
        """The number of messages that the sender has announced, also on its earlier connections."""
        return min(self._next_message, MAX_NUMBER)

    @property
    def in_flight(self) -> int:
        """The number of messages that have begun to arrive, and have not ended."""
        return len(self._messages)

    # Commands

    def admit(self) -> None:
        """Admit the sender."""
        self._send(self._welcome)
        self.state = OPEN

    def refuse(self, reason: str, *, is_refusal: bool = True) -> None:
        """Close the connection with a reason; see `Close` for `is_refusal`."""
        if self.state is OPENING:  # the sender reads the version in the `Welcome`
            self._send(replace(self._welcome, is_admitted=False))
        self.close(Close(reason, is_refusal))

    def taken(self, message: int) -> None:
        """Return the permit of a message whose tensors were all taken."""
        if self._messages.pop(message, None) is not None:
            self._taken.append(message)

    def discard(self, message: int) -> None:
        """Return the permit of a message that no call will take, if it has begun and not ended."""
        if self._messages.pop(message, None) is not None:
            self._discarded.append(message)

    # Frames of the sender

    def _validate(self, frame: FromSender) -> None:
        if self.state is not OPEN:
            self.check_open()
        match frame:
            case Put():
                number = frame.message
                count = self._messages.get(number)
                if count is None:
                    if number != self._next_message:
                        self._check_begun(number)
                        return  # this side has discarded the message
                    if len(self._messages) >= self.hello.max_concurrent_videos:
                        raise self._too_many()
                    self._next_message += 1
                    count = 0
                if frame.tensor != count or count >= MAX_TENSORS:  # _WHOLE is not a tensor number
                    raise ProtocolError(f"it sent tensor {frame.tensor} of message {number} out of order")
                self._messages[number] = _WHOLE if frame.last else count + 1
            case End():
                count = self._messages.get(frame.message)
                if count is None:
                    self._check_begun(frame.message)
                elif count != frame.count:  # _WHOLE is not a valid count
                    raise ProtocolError(f"it ended message {frame.message} with a wrong count of tensors")
                else:
                    self._messages[frame.message] = _WHOLE
            case Begin():
                if frame.message != self._next_message:
                    raise ProtocolError(f"it began message {frame.message} out of order")
                if len(self._messages) >= self.hello.max_concurrent_videos:
                    raise self._too_many()
                self._next_message += 1
                self._messages[frame.message] = 0
            case Discard():
                self._check_begun(frame.message)
                self._messages.pop(frame.message, None)
            case Attach():
                left = self._max_segment_bytes - sum(self.segments.values())
                add_segment(self.segments, frame, left, self.hello.arena_bytes)
            case Close():
                self.state = CLOSED

    def _too_many(self) -> ProtocolError:
        limit = self.hello.max_concurrent_videos
        return ProtocolError(f"it has more than its limit of {limit} messages in flight")

    def _check_begun(self, number: int) -> None:
        if not self.hello.first_message <= number < self._next_message:
            raise ProtocolError(
                f"it sent a frame of message {number} while the next one is {self._next_message}"
            )
