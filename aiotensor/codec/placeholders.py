"""The placeholders that replace tensors in a message, each in a msgpack extension.

The encoder numbers the tensors of a message, so that a later placeholder can refer to an earlier tensor: tied
tensors, which share their memory, travel once.

Placeholders of small tensors may be packed: the last buffer then contains them, each preceded by its length,
and each of their extensions in the body contains `PACKED`, which refers to the next placeholder. This keeps a
body with many tensors small.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import DECODE_ERRORS, MAX_DIMENSIONS, Attributes

__all__ = [
    "ARRAY",
    "LENGTH_BYTES",
    "MAX_PACKED_BYTES",
    "PACKED",
    "TENSOR",
    "External",
    "Inline",
    "Meaning",
    "OutOfBand",
    "Tied",
    "read",
    "read_packed",
    "write",
]

# The codes of the msgpack extensions for tensors and arrays. Other extensions of users are passed on
# unchanged.
TENSOR, ARRAY = ord("T"), ord("A")

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Shape = Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Meaning(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The type, the shape and the attributes of a tensor."""

    dtype: _Name
    shape: _Shape
    attributes: Attributes | None = None


class Inline(msgspec.Struct, frozen=True, array_like=True, tag="in", gc=False):
    """A tensor whose bytes are in the placeholder."""

    meaning: Meaning
    payload: memoryview
    number: _Number


class OutOfBand(msgspec.Struct, frozen=True, array_like=True, tag="by", gc=False):
    """A tensor whose bytes are in a separate buffer; the number of the first buffer is 0."""

    meaning: Meaning
    buffer: _Number
    number: _Number


class External(msgspec.Struct, frozen=True, array_like=True, tag="at"):
    """A tensor that another transport carries, and the handle that identifies it there."""

    handle: Any
    number: _Number


class Tied(msgspec.Struct, frozen=True, array_like=True, tag="as", gc=False):
    """A tensor over the same memory as an earlier one, which has this number."""

    number: _Number


Placeholder: TypeAlias = Inline | OutOfBand | External | Tied

write: Callable[[Placeholder], bytes] = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Placeholder] = msgspec.msgpack.Decoder(Placeholder)
_inline_decoder: msgspec.msgpack.Decoder[Inline] = msgspec.msgpack.Decoder(Inline)

PACKED = msgspec.msgpack.encode("pk")  # in an extension, refers to the next packed placeholder

LENGTH_BYTES = 2  # the size of the big-endian length before each packed placeholder
MAX_PACKED_BYTES = (1 << 8 * LENGTH_BYTES) - 1


def read(data: memoryview) -> Placeholder:
    """Decode the placeholder of an extension.

    Raises:
        ProtocolError: the placeholder is invalid, or a number in it is out of range.
    """
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS as error:
        raise _unreadable(error) from error


def read_packed(data: memoryview) -> Inline:
    """Decode a packed placeholder, as `read` does; it contains no handle, which could take long to decode."""
    try:
        return _inline_decoder.decode(data)
    except DECODE_ERRORS as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> ProtocolError:
    return ProtocolError(f"the peer described an invalid tensor: {error}")
