"""The control frames, and the only place that turns them into bytes and back.

    sender                                   receiver
      | Hello(version, pid, limits)             |   once, first
      | --------------------------------------> |
      |                   Welcome(version, pid) |   once, first
      | <-------------------------------------- |
      | Put(message, tensor, ..., last)         |   one for each tensor
      | End(message, count)                     |   or Put(last=True): the message is whole
      | Discard(message)                        |   or: it never will be
      | --------------------------------------> |
      |                         Taken(messages) |   permits come back
      |                     Discarded(messages) |   permits come back, nobody took them
      |                         Release(blocks) |   memory comes back
      | <-------------------------------------- |
      | Bye()             either way      Bye() |   what was sent before it still counts
      | <-------------------------------------> |

No frame names a kind of memory or of link: `Put.placement` names who can open `Put.payload`, and file
descriptors travel beside a frame, never in it. Frames are msgpack arrays whose first item is the tag;
unknown trailing items are ignored, so a later version can add fields.
"""

from typing import Annotated

import msgspec

from aiotensor.errors import ProtocolError

__all__ = [
    "MAX_DIMENSIONS",
    "MAX_TENSORS",
    "VERSION",
    "Bye",
    "Discard",
    "Discarded",
    "End",
    "Hello",
    "Put",
    "Release",
    "Taken",
    "ToReceiver",
    "ToSender",
    "Welcome",
    "decode_to_receiver",
    "decode_to_sender",
    "encode",
]

VERSION = 1

# More than any tensor of use has; the bound keeps frames small.
MAX_DIMENSIONS = 64

# Of one message. What rides in frames counts against no bytes of shared memory, so this bounds it.
MAX_TENSORS = 1024

Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Numbers = Annotated[tuple[Number, ...], msgspec.Meta(max_length=4096)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Introduce a sender and the limits that it will keep."""

    version: int
    pid: Number
    max_concurrent_videos: Annotated[int, msgspec.Meta(ge=1)]
    arena_bytes: Number


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


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """Close cleanly: nothing follows."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer a `Hello`."""

    version: int
    pid: Number


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """Say that all tensors of these messages were taken."""

    messages: Numbers


class Discarded(msgspec.Struct, frozen=True, array_like=True, tag="discarded"):
    """Say that the receiver gave these messages up."""

    messages: Numbers


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Give blocks back; a number stands here once for each `Put` that named it."""

    blocks: Numbers


ToReceiver = Hello | Put | End | Discard | Bye
ToSender = Welcome | Taken | Discarded | Release | Bye

_encoder = msgspec.msgpack.Encoder()
_to_receiver: msgspec.msgpack.Decoder[ToReceiver] = msgspec.msgpack.Decoder(ToReceiver)
_to_sender: msgspec.msgpack.Decoder[ToSender] = msgspec.msgpack.Decoder(ToSender)


def encode(frame: ToReceiver | ToSender) -> bytes:
    """Turn a frame into bytes."""
    return _encoder.encode(frame)


def decode_to_receiver(data: bytes | memoryview) -> ToReceiver:
    """Read a frame that a sender wrote.

    Raises:
        ProtocolError: the bytes are not such a frame, or a number in it is out of bounds.
    """
    try:
        return _to_receiver.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a sender sent a frame that cannot be read: {error}") from error


def decode_to_sender(data: bytes | memoryview) -> ToSender:
    """Read a frame that the receiver wrote.

    Raises:
        ProtocolError: the bytes are not such a frame, or a number in it is out of bounds.
    """
    try:
        return _to_sender.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the receiver sent a frame that cannot be read: {error}") from error
