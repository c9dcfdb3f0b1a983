"""The frames of a connection, and the only code that encodes and decodes them.

Both ends use the same frames:

    connecting end                           accepting end
      | Hello(version, pid, role, limits)       |   alone in the first record; the role decides what follows
      | --------------------------------------> |
      |       Hello(version, pid, role, limits) |   states whether the connecting end is admitted
      | <-------------------------------------- |

    end that sends a message                 end that takes it
      | Attach(segment)                         |   before the first tensor in it, with its descriptor
      | Begin(message)                          |   only if later messages may be sent before its first tensor
      | Put(message, tensor, ..., last)         |   one for each tensor of a message
      | End(message, count)                     |   or Put(last=True): the message is whole
      | Message(message, ..., asks, answers)    |   a whole message with a body
      | Failure(message, type_name, text)       |   an error in place of the answer to a message
      | Discard(message)                        |   withdraws the message, or cancels it if it was taken
      | Detach(segment)                         |   no block of the segment is in use
      | --------------------------------------> |
      |                         Taken(messages) |   returns permits
      |                     Discarded(messages) |   returns permits of messages that no call will take
      |                         Release(blocks) |   returns memory, once for each tensor or body in it
      | <-------------------------------------- |
      | ReceiverReport, PublisherReport, ...    |   to an inspector, which sends only its hello
      | Close(reason)               either way  |   the last frame; earlier frames remain valid
      | <-------------------------------------> |

No frame depends on the kind of memory or transport: `placement` identifies the code that opens a `payload`,
and file descriptors accompany a record. Frames are msgpack arrays whose first item is the tag; unknown
trailing items are ignored, so a later version can add fields. A record is an array of frames: the frames of
one iteration of the event loop share a record.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from aiotensor.errors import ProtocolError
from aiotensor.types import (
    MAX_NUMBER,
    Number,
    PublisherStatistics,
    ReceiverStatistics,
    ServerStatistics,
    TraceContext,
)

VERSION = 5

# The placements, which determine the payload of a tensor.
INLINE = "inline"  # its bytes
ARENA = "arena"  # the position of its bytes in an attached segment

# The placement of a segment of a third process, from which this end forwards blocks.
FORWARDED = "forwarded"

# The maximum number of dimensions of a tensor, more than tensors have in practice. It keeps frames small.
MAX_DIMENSIONS = 64

# The longest record. It must fit into the send buffer of a local socket, by default 208 KiB on Linux.
MAX_RECORD_BYTES = 64 * 1024

# The maximum number of frames in a record. Handling a record blocks the event loop: 64 KiB of the shortest
# frames took 40 ms, and this number of frames takes 0.3 ms.
MAX_FRAMES = 32

# The maximum count of numbers in a frame, for the same reason: each identifies a message or block to look up.
MAX_NUMBERS = 128

# The longest record from an unidentified connection. A `Hello` has fewer than 400 bytes.
MAX_HELLO_BYTES = 4 * 1024

# The maximum lengths of the name of the type of an error, and of its text, in characters.
MAX_REASON = 1024  # the maximum length of the reason of a `Close`, in characters
MAX_TYPE_NAME, MAX_TEXT = 64, 8 * 1024

# The maximum number of tokens of a segment, one for each process of a chain: a record carries 8 descriptors.
MAX_TOKENS = 7

# The maximum number of tensors in a message. Tensors placed inline use no shared memory, so only this limit
# bounds their bytes.
MAX_TENSORS = 1024

# The maximum number of senders in a `ReceiverReport`, and of subscribers in a `PublisherReport`: so many fit
# into a record, even with the longest names. The remaining senders follow in further reports.
MAX_ROWS = 128

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
OptionalName = Annotated[str, msgspec.Meta(max_length=64)]
Shape = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_NUMBERS)]
Pid = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # the range of `pid_t`: it is passed to system calls


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Open one direction of a connection, and state the limits that this end will keep.

    Attributes:
        version: the version of the protocol.
        pid: the process id of this end.
        role: the role of this end, such as "sender".
        id: the id of this end; "" for an inspector and a rank.
        max_messages: the maximum number of messages of this end that the other end has not answered.
        arena_bytes: the maximum shared memory of this end, in bytes.
        first: the number of the first message of this end. Earlier ones belonged to an earlier connection,
            and will not arrive.
        is_admitted: whether this end, which accepts the connection, admits the other one. If not, a `Close`
            with the reason follows.
        withdraws: whether this publisher may withdraw publications.
        publisher: the id of the publisher to which this subscriber was connected before; "" if none.
        next: the number of the first publication that this subscriber has not received from that publisher.
        max_waiting: the maximum number of messages of the other end that this server has not taken.
        max_body_bytes: the maximum size of a body from the other end in bytes; None for no limit.
    """

    version: int
    pid: Pid
    role: OptionalName
    id: OptionalName = ""
    max_messages: Number = 0
    arena_bytes: Number = 0
    first: Number = 0
    is_admitted: bool = True
    withdraws: bool = False
    publisher: OptionalName = ""
    next: Number = 0
    max_waiting: Number = 0
    max_body_bytes: Number | None = None


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """Share a segment in which tensors will be placed; its descriptor and its tokens accompany the record.

    `tokens` is the number of descriptors after that of the segment: the reading end of the owner's token, and
    the tokens that the other end keeps (see `aiotensor.memory.mapping`). `arena_bytes` is the limit of the
    arena of a forwarded segment; for a segment of this end, the hello states it.
    """

    segment: Number
    placement: Name
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] = 0
    arena_bytes: Number = 0


class Detach(msgspec.Struct, frozen=True, array_like=True, tag="detach"):
    """Withdraw a segment in which no block is in use; the other end then unmaps it."""

    segment: Number


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Begin a message whose first tensor will be announced later."""

    message: Number


class Attributes(msgspec.Struct, frozen=True, array_like=True):
    """The attributes of a tensor for autograd, and the order of its values in memory.

    `order` contains its dimensions, from the outermost to the innermost in memory; empty for row-major order.
    """

    requires_grad: bool = False
    is_parameter: bool = False
    order: Shape = ()


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Announce one tensor; `placement` determines the content of the `payload`.

    `block` is the number of the block that contains the bytes, for a later `Release`; None if there is no
    block. `last` makes the message whole. `attributes` is None for an ordinary tensor. `trace` is the trace
    context of the sender; None without tracing.
    """

    message: Number
    tensor: Number
    dtype: Name
    shape: Shape
    device: Name
    placement: Name
    payload: bytes
    block: Number | None = None
    last: bool = False
    attributes: Attributes | None = None
    trace: TraceContext | None = None


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Complete a message, and state the number of its tensors; a rank sends None as a message without any."""

    message: Number
    count: Number


class Message(msgspec.Struct, frozen=True, array_like=True, tag="message"):
    """Announce a whole message; `payload` is its content, or the position of the content in a segment.

    `nbytes` is the size of the content in bytes, and `block` the number of its block; None if there is none.
    `trace` is the trace context of the sending end; None without tracing. A message that `asks` gets one
    answer: a message that names it in `answers`, a `Failure` or a `Discarded`.
    """

    message: Number
    placement: Name
    payload: bytes
    nbytes: Number
    block: Number | None = None
    trace: TraceContext | None = None
    asks: bool = False
    answers: Number | None = None


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Answer a message of the other end with an error, also if it asks for no answer but was refused.

    `is_loss` states that this end has stopped its work, for example because its process exits.
    """

    message: Number
    type_name: Annotated[str, msgspec.Meta(max_length=MAX_TYPE_NAME)]
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    is_loss: bool = False


class PlacedTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a message with a body; fields as in `Put`."""

    dtype: Name
    shape: Shape
    placement: Name
    payload: bytes
    block: Number
    attributes: Attributes | None = None


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The content of a message: its body, and the tensors to which the body refers by their positions."""

    body: memoryview
    tensors: tuple[PlacedTensor, ...] = ()


class Discard(msgspec.Struct, frozen=True, array_like=True, tag="discard"):
    """Withdraw a message. If it was taken, its answer is not needed any more."""

    message: Number


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Return the permits of messages whose tensors were all taken."""

    messages: Numbers


class Discarded(msgspec.Struct, frozen=True, array_like=True, tag="discarded"):
    """Return the permits of messages that were discarded; of publications, also the memory."""

    messages: Numbers


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Return blocks of memory. For each `Put` that named a block, its number is returned once."""

    blocks: Numbers


class SenderSummary(msgspec.Struct, frozen=True, array_like=True):
    """The state of one sender, as its receiver knows it.

    `messages` is the number of messages that the sender has announced, on all its connections. `in_flight` is
    the number of these messages that were neither taken nor discarded.
    """

    sender: Name
    pid: Number
    max_concurrent_videos: Number
    arena_bytes: Number
    messages: Number
    in_flight: Number
    unclaimed_tensors: Number
    unclaimed_bytes: Number
    leases: Number
    leased_bytes: Number


class ReceiverReport(msgspec.Struct, frozen=True, array_like=True, tag="receiver report"):
    """Answer an inspector; if the senders do not fit into one report, several are sent, up to the `last`."""

    statistics: ReceiverStatistics
    senders: Annotated[tuple[SenderSummary, ...], msgspec.Meta(max_length=MAX_ROWS)]
    last: bool = True


class PublisherReport(msgspec.Struct, frozen=True, array_like=True, tag="publisher report"):
    """Answer an inspector, with at most `MAX_ROWS` subscribers: the slowest ones."""

    statistics: PublisherStatistics
    last: bool = True


class ServerReport(msgspec.Struct, frozen=True, array_like=True, tag="server report"):
    """Answer an inspector of a message server."""

    statistics: ServerStatistics
    last: bool = True


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Close the connection; no frame follows. A reason means that this side rejects the other one.

    `is_refusal`: whether further attempts fail, too, until a limit or the version of one side is changed.
    `retry`: whether the peer may connect again automatically, because a newer connection replaced this one.
    `uses_memory`: whether tensors of this end still use memory of the other end. If not, that end reuses it.
    """

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""
    is_refusal: bool = False
    retry: bool = False
    uses_memory: bool = True


Frame = (
    Hello
    | Attach
    | Detach
    | Begin
    | Put
    | End
    | Message
    | Failure
    | Discard
    | Taken
    | Discarded
    | Release
    | ReceiverReport
    | PublisherReport
    | ServerReport
    | Close
)
Statistics = TypeVar("Statistics", ReceiverStatistics, PublisherStatistics, ServerStatistics)

# Encodes a sequence of frames as one record.
encode_record: Callable[[Sequence[object]], bytes] = msgspec.msgpack.Encoder().encode

# The errors that a decoder raises for invalid bytes.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# Decodes a record, and raises one of `DECODE_ERRORS`.
decode_record: Callable[[bytes | memoryview], list[Frame]] = msgspec.msgpack.Decoder(
    Annotated[list[Frame], msgspec.Meta(max_length=MAX_FRAMES)]
).decode
_hello: msgspec.msgpack.Decoder[list[Hello]] = msgspec.msgpack.Decoder(
    Annotated[list[Hello], msgspec.Meta(min_length=1, max_length=1)]
)
encode_content: Callable[[Content], bytes] = msgspec.msgpack.Encoder().encode

# Decodes content, and raises one of `DECODE_ERRORS`; the body refers to the memory of the argument.
decode_content: Callable[[bytes | memoryview], Content] = msgspec.msgpack.Decoder(Content).decode


def encode(*frames: Frame) -> bytes:
    """Encode frames as one record."""
    return encode_record(frames)


def decode(data: bytes | memoryview) -> list[Frame]:
    """Decode a record.

    Raises:
        ProtocolError: the record is too long or invalid, or a number in it is out of bounds.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError(f"it sent a record of more than {MAX_RECORD_BYTES} bytes")
    try:
        return decode_record(data)
    except DECODE_ERRORS as error:
        raise unreadable(error) from error


def decode_hello(data: bytes | memoryview) -> Hello:
    """Decode the first record of a connection; errors are those of `decode`."""
    if len(data) > MAX_HELLO_BYTES:
        raise ProtocolError(f"it sent a record of more than {MAX_HELLO_BYTES} bytes")
    try:
        return _hello.decode(data)[0]
    except DECODE_ERRORS as error:
        raise unreadable(error) from error


def read_content(data: bytes | memoryview) -> Content:
    """Decode the content of a message; its body refers to the memory of `data`.

    Raises:
        ProtocolError: the content is invalid, or a number in it is out of bounds.
    """
    try:
        return decode_content(data)
    except DECODE_ERRORS as error:
        raise unreadable(error) from error


def unreadable(error: Exception) -> ProtocolError:
    """Return the error of a peer that sent bytes which cannot be decoded."""
    return ProtocolError(f"it sent a frame that cannot be decoded: {error}")


def bounded(statistics: Statistics) -> Statistics:
    """Clamp numbers to `MAX_NUMBER`, the largest that a frame can contain; users may set higher limits."""
    large = {
        name: MAX_NUMBER
        for name, number in asdict(statistics).items()
        if isinstance(number, int) and number > MAX_NUMBER
    }
    return replace(statistics, **large)
