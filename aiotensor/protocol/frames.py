"""The frames between a receiver and its peers, and the only code that encodes and decodes them.

    sender                                   receiver
      | Hello(version, pid, sender, limits)     |   alone in the first record
      | --------------------------------------> |
      |           Welcome(version, pid, limits) |   the first frame; states whether the sender is admitted
      | <-------------------------------------- |
      | Attach(segment)                         |   before the first tensor in it, with its descriptor
      | Begin(message)                          |   only if later messages may be sent before its first tensor
      | Put(message, tensor, ..., last)         |   one for each tensor
      | End(message, count)                     |   or Put(last=True): the message is whole
      | Discard(message)                        |   the sender withdraws the message
      | --------------------------------------> |
      |                         Taken(messages) |   returns permits
      |                     Discarded(messages) |   returns permits of messages that no call will take
      |                         Release(blocks) |   returns memory
      | <-------------------------------------- |
      | Close(reason)     either way            |   the last frame; earlier frames remain valid
      | <-------------------------------------> |

    inspector                                receiver
      | Inspect(version, pid)                   |   alone in the first record
      | --------------------------------------> |
      |             Welcome, ReceiverReport ... |   as many reports as the senders need
      | <-------------------------------------- |

A publisher answers an inspector with a `Welcome` and a `PublisherReport`; its other frames are in
`aiotensor.protocol.broadcast`.

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
from aiotensor.protocol.connection import Close
from aiotensor.types import (
    MAX_NUMBER,
    Number,
    PublisherStatistics,
    ReceiverStatistics,
    TraceContext,
)

__all__ = [
    "ARENA",
    "DECODE_ERRORS",
    "FROM_SENDER",
    "INLINE",
    "LEAST_FRAME_BYTES",
    "MAX_DIMENSIONS",
    "MAX_FRAMES",
    "MAX_HELLO_BYTES",
    "MAX_NUMBERS",
    "MAX_RECORD_BYTES",
    "MAX_ROWS",
    "MAX_TENSORS",
    "OPENING",
    "OUT_OF_BAND",
    "TO_INSPECTOR",
    "TO_SENDER",
    "VERSION",
    "Attach",
    "Attributes",
    "Begin",
    "Discard",
    "Discarded",
    "End",
    "FromSender",
    "Hello",
    "Inspect",
    "Number",
    "Opening",
    "Pid",
    "PublisherReport",
    "Put",
    "ReceiverReport",
    "Release",
    "SenderSummary",
    "Subscribe",
    "Taken",
    "ToInspector",
    "ToSender",
    "Welcome",
    "bounded",
    "decode",
    "encode",
    "encode_record",
    "unreadable",
]

VERSION = 4

# The placements, which determine the payload of a tensor.
INLINE = "inline"  # its bytes
ARENA = "arena"  # the position of its bytes in an attached segment
OUT_OF_BAND = "out of band"  # empty: between machines, the transport carries the bytes with the record

# The maximum number of dimensions of a tensor, more than tensors have in practice. It keeps frames small.
MAX_DIMENSIONS = 64

# The longest record. It must fit into the send buffer of a local socket, by default 208 KiB on Linux.
MAX_RECORD_BYTES = 64 * 1024

# The longest record that every receiver accepts. A sender sends longer ones only after a `Welcome` that
# allows them. A tensor that is placed inline fits into such a record.
LEAST_FRAME_BYTES = 16 * 1024

# The maximum number of frames in a record. Handling a record blocks the event loop: 64 KiB of the shortest
# frames took 40 ms, and this number of frames takes 0.3 ms.
MAX_FRAMES = 32

# The maximum count of numbers in a frame, for the same reason: each identifies a message or block to look up.
MAX_NUMBERS = 128

# The longest record from an unidentified connection. A `Hello` has fewer than 400 bytes.
MAX_HELLO_BYTES = 4 * 1024

# The maximum number of tensors in a message. Tensors placed inline use no shared memory, so only this limit
# bounds their bytes.
MAX_TENSORS = 1024

# The maximum number of senders in a `ReceiverReport`, and of subscribers in a `PublisherReport`: so many fit
# into a record, even with the longest names. The remaining senders follow in further reports.
MAX_ROWS = 128

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
OptionalName = Annotated[str, msgspec.Meta(max_length=64)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_NUMBERS)]
Pid = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # the range of `pid_t`: it is passed to system calls


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Open the connection of a sender, and state the limits that it will keep.

    Messages are numbered from `first_message`; earlier ones belonged to an earlier connection, and will not
    arrive.
    """

    version: int
    pid: Pid
    sender: Name
    max_concurrent_videos: Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
    arena_bytes: Number
    first_message: Number = 0


class Inspect(msgspec.Struct, frozen=True, array_like=True, tag="inspect"):
    """Open the connection of an inspector, which sends no other frame."""

    version: int
    pid: Pid


class Subscribe(msgspec.Struct, frozen=True, array_like=True, tag="subscribe"):
    """Open the connection of a subscriber; see `aiotensor.protocol.broadcast`.

    `publisher` is the id of the publisher to which it was connected before, and `next` is the number of the
    first publication that it did not receive from that publisher.
    """

    version: int
    pid: Pid
    subscriber: Name
    publisher: OptionalName = ""
    next: Number = 0


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """Share a segment in which tensors will be placed; its descriptor accompanies the record."""

    segment: Number
    placement: Name
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]


class Begin(msgspec.Struct, frozen=True, array_like=True, tag="begin"):
    """Begin a message whose first tensor will be announced later."""

    message: Number


class Attributes(msgspec.Struct, frozen=True, array_like=True):
    """The attributes of a tensor for autograd, and the order of its values in memory.

    `order` contains its dimensions, from the outermost to the innermost in memory; empty for row-major order.
    """

    requires_grad: bool = False
    is_parameter: bool = False
    order: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)] = ()


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Announce one tensor; `placement` determines the content of the `payload`.

    `block` is the number of the block that contains the bytes, for a later `Release`; None if there is no
    block. `last` makes the message whole. `attributes` is None for an ordinary tensor. `trace` is the trace
    context of the sender; None without tracing.
    """

    message: Number
    tensor: Number
    dtype: Name
    shape: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    device: Name
    placement: Name
    payload: bytes
    block: Number | None = None
    last: bool = False
    attributes: Attributes | None = None
    trace: TraceContext | None = None


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Complete a message, and state the number of its tensors."""

    message: Number
    count: Number


class Discard(msgspec.Struct, frozen=True, array_like=True, tag="discard"):
    """Withdraw a message or publication; this has no effect if it was taken."""

    message: Number


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer a `Hello`, a `Subscribe` or an `Inspect`.

    `max_frame_bytes` is the size of the longest record that the receiver or publisher accepts, and `receiver`
    is its id. If a sender or subscriber is not admitted, a `Close` with the reason follows.
    """

    version: int
    pid: Pid
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=LEAST_FRAME_BYTES)] = LEAST_FRAME_BYTES
    receiver: OptionalName = ""
    is_admitted: bool = False


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Return the permits of messages whose tensors were all taken."""

    messages: Numbers


class Discarded(msgspec.Struct, frozen=True, array_like=True, tag="discarded"):
    """Return the permits of messages that the receiver discarded."""

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
    """Answer an `Inspect`; if the senders do not fit into one report, several are sent, up to the `last`."""

    statistics: ReceiverStatistics
    senders: Annotated[tuple[SenderSummary, ...], msgspec.Meta(max_length=MAX_ROWS)]
    last: bool = True


class PublisherReport(msgspec.Struct, frozen=True, array_like=True, tag="publisher report"):
    """Answer an `Inspect`, with at most `MAX_ROWS` subscribers: the slowest ones."""

    statistics: PublisherStatistics


Opening = Hello | Inspect | Subscribe
FromSender = Attach | Begin | Put | End | Discard | Close
ToSender = Welcome | Taken | Discarded | Release | Close
ToInspector = Welcome | ReceiverReport | PublisherReport | Close

Frame = Opening | FromSender | ToSender | ToInspector
Frames = TypeVar("Frames")
Statistics = TypeVar("Statistics", ReceiverStatistics, PublisherStatistics)

# Encodes a sequence of frames as one record.
encode_record: Callable[[Sequence[object]], bytes] = msgspec.msgpack.Encoder().encode

_record = msgspec.Meta(max_length=MAX_FRAMES)

# The errors that a decoder raises for invalid bytes.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# Decoders for the valid records of each direction, as arguments of `decode`.
OPENING: msgspec.msgpack.Decoder[list[Opening]] = msgspec.msgpack.Decoder(
    Annotated[list[Opening], msgspec.Meta(min_length=1, max_length=1)]
)
FROM_SENDER: msgspec.msgpack.Decoder[list[FromSender]] = msgspec.msgpack.Decoder(
    Annotated[list[FromSender], _record]
)
TO_SENDER: msgspec.msgpack.Decoder[list[ToSender]] = msgspec.msgpack.Decoder(
    Annotated[list[ToSender], _record]
)
TO_INSPECTOR: msgspec.msgpack.Decoder[list[ToInspector]] = msgspec.msgpack.Decoder(
    Annotated[list[ToInspector], _record]
)


def encode(*frames: Frame) -> bytes:
    """Encode frames as one record."""
    return encode_record(frames)


def decode(decoder: "msgspec.msgpack.Decoder[Frames]", data: bytes | memoryview) -> Frames:
    """Decode a record.

    Args:
        decoder: the decoder for the direction, such as `FROM_SENDER`.
        data: the record.

    Raises:
        ProtocolError: the record is invalid in this direction, or a number in it is out of bounds.
    """
    try:
        return decoder.decode(data)
    except DECODE_ERRORS as error:
        raise unreadable(error) from error


def unreadable(error: Exception) -> ProtocolError:
    """Return the error for a record that cannot be decoded."""
    return ProtocolError(f"it sent a frame that cannot be decoded: {error}")


def bounded(statistics: Statistics) -> Statistics:
    """Clamp numbers to `MAX_NUMBER`, the largest that a frame can contain; users may set higher limits."""
    large = {
        name: MAX_NUMBER
        for name, number in asdict(statistics).items()
        if isinstance(number, int) and number > MAX_NUMBER
    }
    return replace(statistics, **large)
