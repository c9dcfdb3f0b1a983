"""A subscriber's end of one connection to a publisher.

    OPENING --Admit--> OPEN --Close, either way; violation--> CLOSED
       |                                                        ^
       '--Welcome of another version; Close; violation----------'

A subscriber that is not admitted receives the reason in a `Close` after the `Welcome`. One publication:

    --Publish--> announced --taken--> (ended)
                     |
                     '--dropped, usually because of a Discard--> (ended)

The publisher may withdraw a publication that this side has taken in the meantime; the owner of the connection
ignores that `Discard`.
"""

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.protocol.answers import AnsweringConnection
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.protocol.broadcast import (
    TO_SUBSCRIBER,
    Admit,
    Content,
    Detach,
    Publish,
    ToSubscriber,
)
from aiotensor.protocol.connection import CLOSED, OPEN, Close
from aiotensor.protocol.frames import (
    ARENA,
    DECODE_ERRORS,
    INLINE,
    LEAST_FRAME_BYTES,
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Discard,
    Subscribe,
    Welcome,
    encode,
    unreadable,
)
from aiotensor.protocol.segments import LARGEST_PAGE_BYTES, add_segment

__all__ = ["SubscriberConnection", "read_content"]

_content = msgspec.msgpack.Decoder(Content)


class SubscriberConnection(AnsweringConnection[ToSubscriber, Subscribe]):
    """A subscriber's end of one connection.

    Args:
        subscribe: the first frame of this end; `data_to_send` returns it first.

    Attributes:
        publisher_id: the id of the publisher; None until the `Welcome`.
        limits: the frame with the limits of the publisher; None until it has admitted this subscriber.
    """

    def __init__(self, subscribe: Subscribe) -> None:
        super().__init__("subscriber", "the publisher", TO_SUBSCRIBER, MAX_RECORD_BYTES, LEAST_FRAME_BYTES)
        self.publisher_id: str | None = None
        self.limits: Admit | None = None
        self._is_welcome = False
        self._next = 0
        self._unanswered: set[int] = set()
        self._segments: dict[int, int] = {}  # the sizes of attached segments in bytes
        self._records.append(encode(subscribe))

    # Commands

    def taken(self, number: int) -> None:
        """Answer a publication that the application has taken."""
        if self.state is not CLOSED:
            self._unanswered.remove(number)
            self._taken.append(number)

    def dropped(self, number: int) -> None:
        """Answer a publication that was dropped; the publisher may reuse all of its memory."""
        if self.state is not CLOSED:
            self._unanswered.remove(number)
            self._discarded.append(number)

    # Frames of the publisher

    def _validate(self, frame: ToSubscriber) -> None:
        match frame:
            case Publish():
                limits = self.limits
                if limits is None:
                    raise ProtocolError("it sent a publication before it admitted this subscriber")
                if frame.number < self._next:
                    raise ProtocolError(f"it sent publication {frame.number} after {self._next - 1}")
                if len(self._unanswered) >= 2 * limits.max_behind:
                    raise ProtocolError(
                        f"it sent more publications than max_behind={limits.max_behind} allows"
                    )
                if frame.placement != (INLINE if frame.block is None else ARENA):
                    raise ProtocolError(
                        f"it used the unknown placement {frame.placement!r} for a publication"
                    )
                self._next = frame.number + 1
                self._unanswered.add(frame.number)
            case Discard():
                self.check_open()
                if not frame.message < self._next:
                    raise ProtocolError(f"it withdrew publication {frame.message}, which it never sent")
            case Attach():
                self.check_open()
                arena_bytes = 0 if self.limits is None else self.limits.arena_bytes
                max_bytes = ADDRESSES_PER_BYTE * (arena_bytes + LARGEST_PAGE_BYTES)
                add_segment(self._segments, frame, max_bytes, arena_bytes)
            case Detach():
                self.check_open()
                if self._segments.pop(frame.segment, None) is None:
                    raise ProtocolError(f"it detached segment {frame.segment}, which it never attached")
            case Admit():
                if not self._is_welcome or self.limits is not None:
                    raise ProtocolError("it admitted this subscriber twice, or without a welcome")
                self.limits, self._next = frame, frame.next
                self.state = OPEN
            case Welcome():
                self.publisher_id = frame.receiver
                self.accept_hello(frame.version, frame.pid, VERSION)
                self._is_welcome = frame.is_admitted
            case Close():
                self.state = CLOSED


def read_content(data: bytes | memoryview) -> Content:
    """Decode the content of a publication; its body refers to the memory of `data`.

    Raises:
        ProtocolError: the content is invalid, or a number in it is out of bounds.
    """
    try:
        return _content.decode(data)
    except DECODE_ERRORS as error:
        raise unreadable(error) from error
