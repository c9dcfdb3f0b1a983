"""The frames between a publisher and its subscribers, in addition to those of `aiotensor.protocol.frames`.

    subscriber                               publisher
      | Subscribe(version, pid, id, ...)        |   alone in the first record
      | --------------------------------------> |
      |      Welcome(version, pid, limits), ... |   states whether the subscriber is admitted
      |     Admit(arena, max_behind, number)    |   if it is
      | <-------------------------------------- |
      |                         Attach(segment) |   before the first publication in it, with its descriptor
      |                   Publish(number, ...)  |   one for each publication; the same record to all
      |                         Discard(number) |   withdraws a publication, unless it was taken
      |                         Detach(segment) |   no block of the segment is in use
      | <-------------------------------------- |
      | Taken(numbers) or Discarded(numbers)    |   exactly one answer to each publication
      | Release(blocks)                         |   one for each tensor or content of a taken publication
      | --------------------------------------> |
      | Close(reason)     either way            |   the last frame; earlier frames remain valid
      | <-------------------------------------> |

The numbers of publications increase; a gap means that publications were dropped for this subscriber.
"""

from typing import Annotated

import msgspec

from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    MAX_DIMENSIONS,
    MAX_FRAMES,
    Attach,
    Attributes,
    Discard,
    Discarded,
    Name,
    Release,
    Taken,
    Welcome,
)
from aiotensor.types import MAX_NUMBER, Number, TraceContext

__all__ = [
    "FROM_SUBSCRIBER",
    "TO_SUBSCRIBER",
    "Admit",
    "Content",
    "Detach",
    "FromSubscriber",
    "PlacedTensor",
    "Publish",
    "ToSubscriber",
]


class Admit(msgspec.Struct, frozen=True, array_like=True, tag="admit"):
    """Admit a subscriber, and state the limits that the publisher will keep.

    `next` is the number of the first publication that the subscriber may receive. At most `max_behind`
    publications are unanswered, or at most twice as many before a `Close`. If `drops` is true, publications
    may be withdrawn.
    """

    arena_bytes: Number
    max_behind: Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
    next: Number
    drops: bool = False


class Publish(msgspec.Struct, frozen=True, array_like=True, tag="publish"):
    """Announce a publication; `payload` is its content, or the position of the content in a segment.

    `nbytes` is the size of the content in bytes, and `block` the number of its block; None if there is none.
    `trace` is the trace context of the publisher; None without tracing.
    """

    number: Number
    placement: Name
    payload: bytes
    nbytes: Number
    block: Number | None = None
    trace: TraceContext | None = None


class Detach(msgspec.Struct, frozen=True, array_like=True, tag="detach"):
    """Withdraw a segment in which no block is in use; the subscriber then unmaps it."""

    segment: Number


class PlacedTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a publication; fields as in `Put`."""

    dtype: Name
    shape: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    placement: Name
    payload: bytes
    block: Number
    attributes: Attributes | None = None


class Content(msgspec.Struct, frozen=True, array_like=True):
    """The content of a publication: the message, and the tensors that it refers to by their positions."""

    body: memoryview
    tensors: tuple[PlacedTensor, ...] = ()


FromSubscriber = Taken | Discarded | Release | Close
ToSubscriber = Welcome | Admit | Attach | Detach | Publish | Discard | Close

_record = msgspec.Meta(max_length=MAX_FRAMES)

# Decoders for the valid records of each direction, after the first one.
FROM_SUBSCRIBER: msgspec.msgpack.Decoder[list[FromSubscriber]] = msgspec.msgpack.Decoder(
    Annotated[list[FromSubscriber], _record]
)
TO_SUBSCRIBER: msgspec.msgpack.Decoder[list[ToSubscriber]] = msgspec.msgpack.Decoder(
    Annotated[list[ToSubscriber], _record]
)
