"""The placeholders that replace tensors in a message, each in a msgpack extension.

The encoder numbers the tensors of a message, so that a later placeholder can refer to an earlier tensor: tied
tensors, which share their memory, travel once.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec

from aiotensor.protocol.frames import MAX_DIMENSIONS, Attributes
from aiotensor.types import Number

# The codes of the msgpack extensions for tensors and arrays. Other extensions of users are passed on
# unchanged.
TENSOR, ARRAY = ord("T"), ord("A")

_Shape = Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
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
    number: Number


class OutOfBand(msgspec.Struct, frozen=True, array_like=True, tag="by", gc=False):
    """A tensor whose bytes are in a separate buffer; the number of the first buffer is 0."""

    meaning: Meaning
    buffer: Number
    number: Number


class External(msgspec.Struct, frozen=True, array_like=True, tag="at"):
    """A tensor that another transport carries, and the handle that identifies it there."""

    handle: Any
    number: Number


class Tied(msgspec.Struct, frozen=True, array_like=True, tag="as", gc=False):
    """A tensor over the same memory as an earlier one, which has this number."""

    number: Number


Placeholder: TypeAlias = Inline | OutOfBand | External | Tied

write: Callable[[Placeholder], bytes] = msgspec.msgpack.Encoder().encode
read: Callable[[memoryview], Placeholder] = msgspec.msgpack.Decoder(Placeholder).decode
