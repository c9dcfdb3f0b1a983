"""What stands in a message where a tensor was: a msgpack extension, which holds one of these records.

Records of small tensors may be packed: the last buffer holds them one after the other, each behind its
length, and the extensions in the body say only that the next one is meant. This keeps a body of many tensors
small.
"""

from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import MAX_DIMENSIONS

__all__ = [
    "ARRAY",
    "LENGTH_BYTES",
    "MAX_PACKED_BYTES",
    "PACKED",
    "TENSOR",
    "Beside",
    "Elsewhere",
    "Inside",
    "Meaning",
    "read",
    "read_packed",
    "write",
]

# Codes of msgpack extensions. Those of users' own pass through as they are.
TENSOR, ARRAY = ord("T"), ord("A")

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Shape = Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Meaning(NamedTuple):
    """What the bytes of a tensor mean."""

    dtype: _Name
    shape: _Shape
    requires_grad: bool = False
    is_parameter: bool = False


class Inside(msgspec.Struct, frozen=True, array_like=True, tag="in", gc=False):
    """The bytes are here."""

    meaning: Meaning
    payload: memoryview


class Beside(msgspec.Struct, frozen=True, array_like=True, tag="by", gc=False):
    """The bytes are a buffer of their own, counted from 0."""

    meaning: Meaning
    buffer: _Number


class Elsewhere(msgspec.Struct, frozen=True, array_like=True, tag="at"):
    """Somebody else has the tensor, who knows it by a handle."""

    handle: Any


Record = Inside | Beside | Elsewhere

R = TypeVar("R")

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_inside: msgspec.msgpack.Decoder[Inside] = msgspec.msgpack.Decoder(Inside)

PACKED = _encoder.encode("pk")  # stands for the next record of the pack

LENGTH_BYTES = 2  # before each record, most significant first
MAX_PACKED_BYTES = (1 << 8 * LENGTH_BYTES) - 1


def write(record: Record) -> bytes:
    """Turn a record into bytes."""
    return _encoder.encode(record)


def read(data: memoryview) -> Record:
    """Read what stands in an extension.

    Raises:
        ProtocolError: it is no such record, or a number in it is out of bounds.
    """
    return _read(_decoder, data)


def read_packed(data: memoryview) -> Inside:
    """Read a packed record. It holds a tensor, never a handle, which could take long to decode.

    Raises:
        ProtocolError: it is no such record, or a number in it is out of bounds.
    """
    return _read(_inside, data)


def _read(decoder: msgspec.msgpack.Decoder[R], data: memoryview) -> R:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the peer described a tensor that cannot be: {error}") from error
