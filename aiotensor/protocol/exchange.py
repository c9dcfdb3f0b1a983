"""What a client and a server of messages say to each other, and the only place that reads it.

    client                                   server
      | ClientHello(version, pid, limit, ...)   |   once, first
      | --------------------------------------> |
      |       ServerHello(version, pid, limits) |   once, first; the client asks nothing before it
      | <-------------------------------------- |
      | Ask(number, body, handles, ...)         |
      | Cancel(number)                          |   nobody wants the answer any more
      | --------------------------------------> |
      |      Answer(number, body, handles, ...) |
      |   Failure(number, type_name, text, ...) |   or: there will be no answer
      |                   Taken(messages, bytes)|   credit comes back
      |           Farewell(reason, is_refusal)  |   nothing follows
      | <-------------------------------------- |

The server reads whatever comes, and says at first how many messages, and how many bytes of them, a client may
have waiting there. It counts what of them was taken, or needs no taking any more, from the beginning of the
connection, and says so in every answer, or by itself when half of that credit was taken since it last did.
With it goes the number of messages of other clients that have not ended there, so that clients of several
servers can choose the one with the least load.

One of these is the first part of what travels, a *header*. A large body of an `Ask` or an `Answer` follows it
as a part of its own, so that it is not copied into the header, and so do the buffers beside the body. The
`handles` name the tensors of the message that travel by a sender; where they stand in the message, the body
says, by their numbers in this tuple.

Both hellos state the largest part, a body or a buffer, that their sender accepts, and the largest body. A
message that exceeds them is not sent. If a peer sends it nevertheless, ZeroMQ closes the connection of a peer
with a large part, and the side that reads a large body cuts the peer off without decoding the body.
"""

from typing import Annotated, NamedTuple, TypeVar

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import MAX_TENSORS, Number
from aiotensor.types import MAX_NUMBER, TensorHandle

__all__ = [
    "BODY_BYTES",
    "MAX_HEADER_BYTES",
    "VERSION",
    "Answer",
    "Ask",
    "Cancel",
    "ClientHello",
    "Failure",
    "Farewell",
    "FromClient",
    "FromServer",
    "PartLimits",
    "ServerHello",
    "Taken",
    "failure",
    "read_from_client",
    "read_from_server",
    "write",
]

VERSION = 3

# A body of at least so many bytes is a part of its own.
BODY_BYTES = 64 * 1024

# No header of an honest peer has more: a body in it, or the text of an error, and the handles of all tensors.
MAX_HEADER_BYTES = 1 << 20

_MAX_NAME, _MAX_TEXT = 64, 16 * 1024  # characters

_Id = Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
_Text = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)] | None
_Handles = Annotated[tuple[TensorHandle, ...], msgspec.Meta(max_length=MAX_TENSORS)]


class PartLimits(NamedTuple):
    """What one side accepts in a message; None for no limit.

    Attributes:
        part_bytes: the largest part.
        body_bytes: the largest body.
    """

    part_bytes: int | None = None
    body_bytes: int | None = None


class ClientHello(msgspec.Struct, frozen=True, array_like=True, tag="client"):
    """Open the connection of a client.

    `receiver` is the id of the receiver by which it takes the tensors of answers; "" for none.
    `max_part_bytes` bounds each part of an answer, and `max_body_bytes` its body; None for no limit.
    """

    version: int
    pid: Number
    receiver: _Id = ""
    max_part_bytes: _Limit = None
    max_body_bytes: _Limit = None


class ServerHello(msgspec.Struct, frozen=True, array_like=True, tag="server"):
    """Answer a `ClientHello`.

    `receiver` is the id of the server's receiver; "" for none. The limits are how many messages, and bytes of
    them, may wait to be taken, and the bytes of each part and of the body of a message; None for no limit.
    """

    version: int
    pid: Number
    receiver: _Id = ""
    max_waiting: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_waiting_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_part_bytes: _Limit = None
    max_body_bytes: _Limit = None


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Send a message. Numbers count up for each connection, but some may be left out.

    A `body` of None is the part after this header.
    """

    number: Number
    body: memoryview | None
    handles: _Handles = ()
    wants_answer: bool = True


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Give up a message; one that was answered stays so."""

    number: Number


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Answer a message with another. A `body` of None is the part after this header."""

    number: Number
    body: memoryview | None
    handles: _Handles = ()
    taken: Number = 0
    taken_bytes: Number = 0
    others: Number = 0


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Say that a message gets no answer: what was raised, and its text."""

    number: Number
    type_name: _Id
    text: _Text
    taken: Number = 0
    taken_bytes: Number = 0
    others: Number = 0


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Give credit back, by what was taken of the connection's messages in all."""

    messages: Number
    bytes: Number
    others: Number = 0


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """Close. A reason says that the other side is not welcome.

    `is_refusal` says that a new attempt fails too, until a limit or the version of one side is changed.
    """

    reason: _Text = ""
    is_refusal: bool = False


FromClient = ClientHello | Ask | Cancel
FromServer = ServerHello | Answer | Failure | Taken | Farewell

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def failure(
    number: int, type_name: str, text: str, taken: int = 0, taken_bytes: int = 0, others: int = 0
) -> Failure:
    """Make a `Failure` that can travel, whatever an error says of itself."""
    return Failure(number, _plain(type_name, _MAX_NAME), _plain(text, _MAX_TEXT), taken, taken_bytes, others)


def _plain(text: str, length: int) -> str:
    # A lone surrogate cannot be encoded, and an error may well hold a path that has one.
    return text[:length].encode(errors="backslashreplace").decode()[:length]


def write(header: FromClient | FromServer) -> bytes:
    """Turn a header into bytes."""
    return _encoder.encode(header)


def read_from_client(data: bytes | memoryview) -> FromClient:
    """Read a header that a client wrote.

    Raises:
        ProtocolError: the bytes are no such header, a number in it is out of bounds, or it is too long.
    """
    return _read(_from_client, data, "a client")


def read_from_server(data: bytes | memoryview) -> FromServer:
    """Read a header that a server wrote.

    Raises:
        ProtocolError: the bytes are no such header, a number in it is out of bounds, or it is too long.
    """
    return _read(_from_server, data, "the server")


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview, who: str) -> T:
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(f"{who} sent a header of {len(data)} bytes: at most {MAX_HEADER_BYTES} are read")
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{who} sent a header that cannot be read: {error}") from error
