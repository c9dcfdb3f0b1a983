"""The frames of the channel, between clients and a server, and the only code that encodes and decodes them.

    client                                   server
      | ClientHello(version, pid, limit, ...)   |   once, first
      | --------------------------------------> |
      |       ServerHello(version, pid, limits) |   once, first; the client sends no message before it
      | <-------------------------------------- |
      | Ask(number, body, handles, ...)         |
      | Cancel(number)                          |   the client no longer waits for the answer
      | --------------------------------------> |
      |      Answer(number, body, handles, ...) |
      |   Failure(number, type_name, text, ...) |   or an error in place of the answer
      |                Credit(messages, bytes)  |
      |              Close(reason, is_refusal)  |   the last frame
      | <-------------------------------------- |

The server never stops reading. Its hello limits the number and the bytes of a client's messages that wait at
the server. The server counts the messages that no longer wait, and their bytes, from the beginning of the
connection, and returns the credit for them: in every answer, and in a `Credit` once half of the credit is to
be returned. A client closes without a frame.

Each frame is the first part of a ZeroMQ message, the *header*; `parts.py` describes the other parts. The
`handles` name those tensors of the message that a sender has sent, and the body refers to them by their
indexes in this tuple. `client.py` and `server.py` contain the rules for the order of the frames.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import MAX_TENSORS, Close, Number
from aiotensor.types import MAX_NUMBER, TensorHandle, TraceContext

__all__ = [
    "MAX_HEADER_BYTES",
    "VERSION",
    "Answer",
    "Ask",
    "Cancel",
    "Cause",
    "ClientHello",
    "Credit",
    "Failure",
    "FromClient",
    "FromServer",
    "ServerHello",
    "failure",
    "read_from_client",
    "read_from_server",
    "write",
]

VERSION = 4

# The longest header that is read. Headers of this library are shorter: they contain a small body or the text
# of an error, and the handles of all tensors.
MAX_HEADER_BYTES = 1 << 20

_MAX_NAME, _MAX_TEXT = 64, 16 * 1024  # characters

_Id = Annotated[str, msgspec.Meta(max_length=_MAX_NAME)]
_Text = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)] | None
_Handles = Annotated[tuple[TensorHandle, ...], msgspec.Meta(max_length=MAX_TENSORS)]


class Cause(NamedTuple):
    """The reason why a message gets no answer.

    Attributes:
        type_name: the name of the type of the error.
        text: the text of the error.
        is_loss: whether the server stopped its work, for example because its process exits.
    """

    type_name: str
    text: str
    is_loss: bool = False


class ClientHello(msgspec.Struct, frozen=True, array_like=True, tag="client"):
    """Open the connection of a client.

    `receiver` is the id of the client's receiver for the tensors of answers; "" for none.
    `max_part_bytes` limits each part of an answer, and `max_body_bytes` its body; None for no limit.
    """

    version: int
    pid: Number
    receiver: _Id = ""
    max_part_bytes: _Limit = None
    max_body_bytes: _Limit = None


class ServerHello(msgspec.Struct, frozen=True, array_like=True, tag="server"):
    """Answer a `ClientHello`; the other fields are as in `ClientHello`, but for messages to the server.

    `max_waiting` and `max_waiting_bytes` limit the messages of the client that wait to be taken.
    """

    version: int
    pid: Number
    receiver: _Id = ""
    max_waiting: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_waiting_bytes: Annotated[int, msgspec.Meta(ge=1)] = 1
    max_part_bytes: _Limit = None
    max_body_bytes: _Limit = None


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Send a message to the server. Numbers increase within a connection, perhaps with gaps.

    If `body` is None, the next part is the body. `trace` is the trace context of the client; None without
    tracing.
    """

    number: Number
    body: memoryview | None
    handles: _Handles = ()
    wants_answer: bool = True
    trace: TraceContext | None = None


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel a message; this has no effect if it was answered."""

    number: Number


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Answer a message. If `body` is None, the next part is the body."""

    number: Number
    body: memoryview | None
    handles: _Handles = ()
    taken: Number = 0
    taken_bytes: Number = 0


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Answer a message with an error; the fields are those of `Cause` and `Credit`."""

    number: Number
    type_name: _Id
    text: _Text
    taken: Number = 0
    taken_bytes: Number = 0
    is_loss: bool = False


class Credit(msgspec.Struct, frozen=True, array_like=True, tag="credit"):
    """Return credit.

    `taken` and `taken_bytes` count all messages of the connection that no longer wait.
    """

    taken: Number
    taken_bytes: Number


FromClient = ClientHello | Ask | Cancel
FromServer = ServerHello | Answer | Failure | Credit | Close

T = TypeVar("T")

write: Callable[[FromClient | FromServer], bytes] = msgspec.msgpack.Encoder().encode


def failure(number: int, cause: Cause, taken: int = 0, taken_bytes: int = 0) -> Failure:
    """Return a `Failure` with the name and the text of an error, shortened and escaped as needed."""
    type_name, text = _plain(cause.type_name, _MAX_NAME), _plain(cause.text, _MAX_TEXT)
    return Failure(number, type_name, text, taken, taken_bytes, cause.is_loss)


def _plain(text: str, length: int) -> str:
    # A lone surrogate cannot be encoded, and the path in an error may contain one.
    return text[:length].encode(errors="backslashreplace").decode()[:length]


def _read(decoder: "msgspec.msgpack.Decoder[T]", peer: str, header: bytes | memoryview) -> T:
    """Decode a header.

    Raises:
        ProtocolError: the header is too long or not a frame of this direction, or a number is out of bounds.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"{peer} sent a header of {len(header)} bytes, more than the limit of {MAX_HEADER_BYTES}"
        )
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{peer} sent a header that cannot be decoded: {error}") from error


_from_client: "msgspec.msgpack.Decoder[FromClient]" = msgspec.msgpack.Decoder(FromClient)
_from_server: "msgspec.msgpack.Decoder[FromServer]" = msgspec.msgpack.Decoder(FromServer)

read_from_client = partial(_read, _from_client, "a client")
read_from_server = partial(_read, _from_server, "the server")
