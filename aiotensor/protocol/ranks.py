"""The frames between two ranks, and one end of their connection; both ends follow the same rules.

    rank                                     rank
      | Join(version, pid, limit)   both ways   |   alone in the first record
      | <-------------------------------------> |
      | Attach(segment)                         |   before the first tensor in it, with its descriptor
      | Put(number, ...) or PutNone(number)     |   one for each message, in order
      | --------------------------------------> |
      |                          Taken(numbers) |   the messages were received
      |                         Release(blocks) |   returns memory
      | <-------------------------------------- |   all of these in both directions
      | Close(reason)               either way  |   the last frame
      | <-------------------------------------> |

    OPENING --Join, with the same limit--> OPEN --Close, either way; violation--> CLOSED
       |                                                                           ^
       '--Join of another version or limit; Close; violation-----------------------'

`max_bytes` limits the messages that were sent in one direction and not received. Each message counts as at
least `LEAST_MESSAGE_BYTES`, so that the limit also covers its frame and the entries for it at both ends.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.protocol.answers import AnsweringConnection
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.protocol.connection import CLOSED, OPEN, Close
from aiotensor.protocol.frames import (
    INLINE,
    MAX_FRAMES,
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Number,
    Pid,
    Put,
    Release,
    Taken,
    encode_record,
)
from aiotensor.protocol.segments import LARGEST_PAGE_BYTES, add_segment

__all__ = ["FROM_RANK", "LEAST_MESSAGE_BYTES", "FromRank", "Join", "PutNone", "RankConnection", "counted"]

LEAST_MESSAGE_BYTES = 4096


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Open the connection of a rank; `max_bytes` limits the messages in each direction."""

    version: int
    pid: Pid
    max_bytes: Number


class PutNone(msgspec.Struct, frozen=True, array_like=True, tag="put none"):
    """Send a message that is None."""

    message: Number


FromRank = Join | Attach | Put | PutNone | Taken | Release | Close

FROM_RANK: msgspec.msgpack.Decoder[list[FromRank]] = msgspec.msgpack.Decoder(
    Annotated[list[FromRank], msgspec.Meta(max_length=MAX_FRAMES)]
)


def counted(nbytes: int) -> int:
    """Return the bytes that count against the limit for a message with a tensor of `nbytes` bytes."""
    return max(nbytes, LEAST_MESSAGE_BYTES)


class RankConnection(AnsweringConnection[FromRank, FromRank]):
    """One end of a connection between two ranks.

    Args:
        join: the first frame of this end; `data_to_send` returns it first.
        peer: the name of the other end, for error messages, such as ``"rank 1"``.
    """

    def __init__(self, join: Join, peer: str) -> None:
        super().__init__("rank", peer, FROM_RANK, MAX_RECORD_BYTES, MAX_RECORD_BYTES)
        self._this = "this rank"  # each rank checks the version of the other one itself
        self._max_bytes = join.max_bytes
        self._untaken: dict[int, int] = {}  # the bytes counted so far for messages of the peer
        self._untaken_bytes = 0
        self._next = 0  # the lowest valid number of the next message of the peer
        self._sent: dict[int, None] = {}  # messages of this end that the peer has not taken
        self._segments: dict[int, int] = {}  # the sizes of segments of the peer in bytes
        self._records.append(encode_record([join]))

    # Commands

    def attach(self, segment: int, placement: str, nbytes: int) -> bytes:
        """Return the record that shares a segment; write it after earlier records, with the descriptor."""
        return encode_record([Attach(segment, placement, nbytes)])

    def put(self, message: Put | PutNone) -> None:
        """Send a message, whose number is larger than those of earlier messages."""
        self._sent[message.message] = None
        self._send(message, len(message.payload) if isinstance(message, Put) else 0)

    def put_with_data(self, message: Put) -> Sequence[bytes]:
        """Send a message whose bytes the transport carries, and return the records to write now.

        The transport sends the bytes with the last record. There is no record if the connection is closed.
        """
        if self.state is CLOSED:
            return []
        self._send_answers()  # before the message: after it, they might begin another record
        self.put(message)
        return self.data_to_send()

    def taken(self, message: int) -> None:
        """Answer a message that the application has received."""
        if self.state is not CLOSED:
            self._untaken_bytes -= self._untaken.pop(message)
            self._taken.append(message)

    def count_data(self, message: int, nbytes: int) -> None:
        """Count the bytes that the transport has carried with a message of the peer.

        Raises:
            ProtocolError: the bytes exceed the limit.
        """
        self._count(message, counted(nbytes) - self._untaken[message])

    # Frames of the peer

    def _validate(self, frame: FromRank) -> None:
        if self.state is not OPEN and not isinstance(frame, Join | Close):
            self.check_open()
        match frame:
            case Put() | PutNone():
                self._validate_message(frame)
            case Taken():
                for number in frame.messages:
                    if number not in self._sent:
                        raise ProtocolError(
                            f"it took message {number}, which was not sent or was already taken"
                        )
                    del self._sent[number]
            case Attach():
                max_bytes = ADDRESSES_PER_BYTE * (self._max_bytes + LARGEST_PAGE_BYTES)
                add_segment(self._segments, frame, max_bytes, self._max_bytes)
            case Join():
                self._validate_join(frame)
            case Close():
                self.state = CLOSED

    def _validate_message(self, message: Put | PutNone) -> None:
        number = message.message
        if number < self._next:
            raise ProtocolError(f"it sent message {number} after {self._next - 1}")
        inline = len(message.payload) if isinstance(message, Put) and message.placement == INLINE else 0
        self._next = number + 1
        self._untaken[number] = 0
        self._count(number, counted(inline))

    def _count(self, number: int, nbytes: int) -> None:
        """Count further bytes of a message."""
        if self._untaken_bytes + nbytes > self._max_bytes:
            raise ProtocolError(f"it sent more than its limit of {self._max_bytes} bytes")
        self._untaken[number] += nbytes
        self._untaken_bytes += nbytes

    def _validate_join(self, join: Join) -> None:
        self.accept_hello(join.version, join.pid, VERSION)
        if join.max_bytes != self._max_bytes:
            self.state = CLOSED
            raise RefusedError(
                f"{self._name} opened the pipe with max_bytes={join.max_bytes}, but this rank with "
                f"{self._max_bytes}: pass the same value at both ranks",
                pid=join.pid,
            )
        self.state = OPEN
