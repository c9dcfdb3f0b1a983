"""Messages between two engines, which write into the memory of the other process; see `aiotensor.engines`.

    connecting side                            listening side
      | Chosen(engine)                           |   at once, if the user has chosen an engine
      | ---------------------------------------> |
      | Offer(address, key of a test)            |   from both sides, if the user has chosen it there, too
      | Proved(test)                             |   the test write of that side has ended
      | <-------------------------------------> |   both have proved: blocks may be written
      | Refused(reason)                          |   instead of any of these, or later: no engine is used,
      | <-------------------------------------> |   and the one of that side is closed

    writer                                     reader
      | Reserve(write, segment, block, size)     |
      | ---------------------------------------> |
      |                     Reserved(write, key) |   the block has memory; without a key, it takes steps
      | <--------------------------------------- |
      |              (the engine writes)         |
      | Written(write)                           |   the write has ended, or did not begin
      | ---------------------------------------> |

They are messages of `aiotensor.protocol.network`. The record about the tensor follows the end of the write.
"""

from typing import Annotated, TypeAlias

import msgspec

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import DECODE_ERRORS
from aiotensor.protocol.network import DIRECT
from aiotensor.types import Number

__all__ = [
    "MAX_REASON",
    "MAX_WRITES",
    "Chosen",
    "DirectMessage",
    "Offer",
    "Proved",
    "Refused",
    "Reserve",
    "Reserved",
    "Written",
    "encode_direct",
    "read_direct",
]

MAX_WRITES = 64  # of one side that are reserved at once
MAX_REASON = 1024  # characters

_TEST_BYTES = 16

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Bytes = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
_Test = Annotated[bytes, msgspec.Meta(min_length=_TEST_BYTES, max_length=_TEST_BYTES)]


class Chosen(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The engine that the user has chosen."""

    engine: _Name


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """How to reach the engine of this side, and the key of its memory for the test write."""

    address: _Bytes
    key: _Bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """This side uses no engine, or has closed it: no byte of a write is under way there."""

    reason: _Text


class Proved(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The bytes that the test of this side has written."""

    test: _Test


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Request memory for a block."""

    write: Number
    segment: Number
    block: Number
    nbytes: Number


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A block has memory; the key is empty if no engine can write there."""

    write: Number
    key: _Bytes


class Written(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A write has ended, and no byte of it is under way."""

    write: Number


DirectMessage: TypeAlias = Chosen | Offer | Refused | Proved | Reserve | Reserved | Written

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[DirectMessage] = msgspec.msgpack.Decoder(DirectMessage)
_DIRECT = bytes([DIRECT])


def encode_direct(message: DirectMessage) -> bytes:
    """Encode a message between engines."""
    return _DIRECT + _encoder.encode(message)


def read_direct(data: memoryview) -> DirectMessage:
    """Return a message between engines.

    Raises:
        ProtocolError: it is none, or a part of it is too long.
    """
    try:
        return _decoder.decode(data[1:])
    except DECODE_ERRORS as error:
        raise ProtocolError(f"it sent a message between engines that cannot be read: {error}") from error
