"""The control frames, and the only place that turns them into bytes and back.

    sender                                   receiver
      | Hello(version, pid, sender, limits)     |   once, first
      | --------------------------------------> |
      |           Welcome(version, pid, limits) |   once, first; says whether the sender is admitted
      | <-------------------------------------- |
      | Attach(segment)                         |   before the first tensor in it; its descriptor beside it
      | Detach(segment)                         |   after the last one
      | Put(message, tensor, ..., last)         |   one for each tensor
      | End(message, count)                     |   or Put(last=True): the message is whole
      | Discard(message)                        |   or: it never will be
      | --------------------------------------> |
      |                         Taken(messages) |   permits come back
      |                     Discarded(messages) |   permits come back, nobody took them
      |                         Release(blocks) |   memory comes back
      | <-------------------------------------- |
      | Bye(reason)      either way         Bye |   what was sent before it still counts
      | <-------------------------------------> |

    observer                       receiver                          sender
      | Look(version, pid)           |                                 |   the one frame of its connection
      | ---------------------------> |                                 |
      |   Welcome, Report(...), last | Inquire()                       |   to each sender that owes no answer
      | <--------------------------- | ------------------------------> |
      |     Account(..., its sender) |                    Account(...) |   as each of them answers
      | <--------------------------- | <------------------------------ |

No frame names a kind of memory or of link: `placement` names who can open a `payload`, and file
descriptors travel beside a frame, never in it. Frames are msgpack arrays whose first item is the tag;
unknown trailing items are ignored, so a later version can add fields. A record of a link is an array of
frames, so that those which meet in one turn of the loop travel together.
"""

from typing import Annotated

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.types import MAX_ERROR_NAMES, MAX_NUMBER, Number, ReceiverStatistics, Seconds, Waits

__all__ = [
    "LEAST_FRAME_BYTES",
    "MAX_DIMENSIONS",
    "MAX_ERROR_NAMES",
    "MAX_FRAMES",
    "MAX_HELLO_BYTES",
    "MAX_HOLDERS",
    "MAX_NUMBERS",
    "MAX_RECORD_BYTES",
    "MAX_ROWS",
    "MAX_TENSORS",
    "VERSION",
    "Account",
    "Attach",
    "Bye",
    "Detach",
    "Discard",
    "Discarded",
    "End",
    "Hello",
    "Holding",
    "Inquire",
    "Look",
    "Number",
    "Put",
    "Release",
    "Report",
    "SenderRow",
    "Taken",
    "ToObserver",
    "ToReceiver",
    "ToSender",
    "Welcome",
    "decode_to_observer",
    "decode_to_receiver",
    "decode_to_sender",
    "encode",
]

VERSION = 2

# More than any tensor of use has; the bound keeps frames small.
MAX_DIMENSIONS = 64

# The longest record. It must fit the send buffer of a local socket, 208 KiB by default on Linux.
MAX_RECORD_BYTES = 64 * 1024

# What every receiver takes, and a sender keeps to until the `Welcome` allows more: room for one tensor
# that rides in its frame.
LEAST_FRAME_BYTES = 16 * 1024

# Of one record, which the event loop handles in one step: 64 KiB of the shortest frames took it 40 ms, and
# as many as this 0.3 ms. A sender's outbox fills a record with no more.
MAX_FRAMES = 32

# Of one frame, for the same reason: each number is a message or a block that its receiver looks up.
MAX_NUMBERS = 128

# The longest record from a connection that is not identified. A `Hello` takes less than 400 bytes.
MAX_HELLO_BYTES = 4 * 1024

# Of one message. What rides in frames counts against no bytes of shared memory, so this bounds it.
MAX_TENSORS = 1024

# Of a sender's permits and memory, whom its account names; the others hold theirs for less long.
MAX_HOLDERS = 8

# Of senders in one report: so many fit a record, whatever they are called. Of more there are more reports.
MAX_ROWS = 128

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_NUMBERS)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Introduce a sender and the limits that it will keep.

    Messages are numbered from `first_message`; those below it belonged to an earlier connection and will
    not arrive any more.
    """

    version: int
    pid: Number
    sender: Name
    max_concurrent_videos: Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
    arena_bytes: Number
    first_message: Number = 0


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """Hand over a segment of memory that tensors will lie in."""

    segment: Number
    placement: Name
    nbytes: Number


class Detach(msgspec.Struct, frozen=True, array_like=True, tag="detach"):
    """Say that nothing more will be placed in a segment."""

    segment: Number


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Announce one tensor; its bytes are in, or are named by, `payload`.

    `block` is the number of the block of memory that holds the bytes, to be given back in a
    `Release`; None if there is nothing to give back.
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
    requires_grad: bool = False
    is_parameter: bool = False


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Say that a message is whole, and how many tensors it has."""

    message: Number
    count: Number


class Discard(msgspec.Struct, frozen=True, array_like=True, tag="discard"):
    """Take a message back; a message that was already taken stays so."""

    message: Number


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """Who holds a permit or memory of a sender; see `Holder`."""

    message: Number | None
    state: Name
    bytes: Number
    seconds: Seconds


class Account(msgspec.Struct, frozen=True, array_like=True, tag="account"):
    """Answer an `Inquire` with what a sender holds and has done; see `SenderStatistics`.

    The receiver passes it on to those who look at it, with the id of the sender that gave it.
    """

    in_flight: Number
    peak_in_flight: Number
    waiting: Number
    longest_wait_s: Seconds
    bytes_in_use: Number
    peak_bytes_in_use: Number
    warm_bytes: Number
    largest_free_bytes: Number
    messages_sent: Number
    messages_discarded: Number
    tensors_sent: Number
    bytes_sent: Number
    receivers_lost: Number
    permit_waits: Waits
    memory_waits: Waits
    tensors_copied: Number
    bytes_copied: Number
    errors: Annotated[dict[Name, Number], msgspec.Meta(max_length=MAX_ERROR_NAMES)]
    holders: Annotated[tuple[Holding, ...], msgspec.Meta(max_length=MAX_HOLDERS)] = ()
    sender: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look"):
    """Ask a receiver what it holds, in place of a `Hello`; nothing else is said on such a connection."""

    version: int
    pid: Number


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """Close cleanly: nothing follows. A reason says that the other side is not welcome.

    A sender whose process does not use its memory any more leaves it to the receiver, which then returns to
    the system what it does not use either.

    `is_refusal` says that a new attempt fails too, until a limit or the version of one side is changed.
    `retry` says that another connection only replaced this one: a sender connects again automatically.
    """

    reason: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    uses_memory: bool = True
    is_refusal: bool = False
    retry: bool = False


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer a `Hello` or a `Look` with the longest record that the receiver takes, and the receiver's id.

    `is_admitted` says that the sender of the `Hello` has a place. Without it a `Bye` with the reason follows.
    """

    version: int
    pid: Number
    max_frame_bytes: Annotated[int, msgspec.Meta(ge=LEAST_FRAME_BYTES)] = LEAST_FRAME_BYTES
    receiver: Annotated[str, msgspec.Meta(max_length=64)] = ""
    is_admitted: bool = False


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Say that all tensors of these messages were taken."""

    messages: Numbers


class Discarded(msgspec.Struct, frozen=True, array_like=True, tag="discarded"):
    """Say that the receiver gave these messages up."""

    messages: Numbers


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Give blocks back; a number stands here once for each `Put` that named it."""

    blocks: Numbers


class Inquire(msgspec.Struct, frozen=True, array_like=True, tag="inquire"):
    """Ask a sender for its account: somebody looks at the receiver."""


class SenderRow(msgspec.Struct, frozen=True, array_like=True):
    """What a receiver itself knows of one of its senders."""

    sender: Name
    pid: Number
    max_concurrent_videos: Number
    arena_bytes: Number
    unclaimed_tensors: Number
    unclaimed_bytes: Number
    leases: Number
    leased_bytes: Number


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Answer a `Look` with what the receiver knows; its senders may take several, up to the `last`."""

    statistics: ReceiverStatistics
    senders: Annotated[tuple[SenderRow, ...], msgspec.Meta(max_length=MAX_ROWS)]
    last: bool = True


ToReceiver = Hello | Attach | Detach | Put | End | Discard | Account | Look | Bye
ToSender = Welcome | Taken | Discarded | Release | Inquire | Bye
ToObserver = Welcome | Report | Account | Bye

_A_RECORD = msgspec.Meta(max_length=MAX_FRAMES)
_encoder = msgspec.msgpack.Encoder()
_to_receiver: msgspec.msgpack.Decoder[list[ToReceiver]] = msgspec.msgpack.Decoder(
    Annotated[list[ToReceiver], _A_RECORD]
)
_to_sender: msgspec.msgpack.Decoder[list[ToSender]] = msgspec.msgpack.Decoder(
    Annotated[list[ToSender], _A_RECORD]
)
_to_observer: msgspec.msgpack.Decoder[list[ToObserver]] = msgspec.msgpack.Decoder(
    Annotated[list[ToObserver], _A_RECORD]
)


def encode(*frames: ToReceiver | ToSender | ToObserver) -> bytes:
    """Turn frames into one record."""
    return _encoder.encode(frames)


def decode_to_receiver(data: bytes | memoryview) -> list[ToReceiver]:
    """Read a record that a sender wrote.

    Raises:
        ProtocolError: the bytes are not such frames, or a number in them is out of bounds.
    """
    try:
        return _to_receiver.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a sender sent a frame that cannot be read: {error}") from error


def decode_to_sender(data: bytes | memoryview) -> list[ToSender]:
    """Read a record that the receiver wrote.

    Raises:
        ProtocolError: the bytes are not such frames, or a number in them is out of bounds.
    """
    try:
        return _to_sender.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the receiver sent a frame that cannot be read: {error}") from error


def decode_to_observer(data: bytes | memoryview) -> list[ToObserver]:
    """Read a record that a receiver wrote to somebody who looks at it.

    Raises:
        ProtocolError: the bytes are not such frames, or a number in them is out of bounds.
    """
    try:
        return _to_observer.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the receiver sent a frame that cannot be read: {error}") from error
