"""The messages between two engines, which write into the memory of the other process.

    connecting side                            listening side
      | Chosen(engine)                           |   at once, if the user has chosen an engine
      | ---------------------------------------> |
      | Offer(address, key of a test)            |   from each side whose user has chosen this engine
      | Proved(test)                             |   the test write of this side has ended
      | <-------------------------------------> |   after both `Proved`, blocks may be written
      | Refused(reason)                          |   instead of any of these, or later: no engine is used,
      | <-------------------------------------> |   and that of this side is closed

    writer                                     reader
      | Reserve(write, segment, block, size)     |
      | ---------------------------------------> |
      |                     Reserved(write, key) |   the block has memory; if the key is empty, steps are used
      | <--------------------------------------- |
      |              (the engine writes)         |
      | Written(write)                           |   the write has ended, or was cancelled before it began
      | ---------------------------------------> |

They are sent as DIRECT messages of `aiotensor.protocol.network`. The record that announces the tensor is sent
after the end of the write. `aiotensor.engines` defines the interface of engines.
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

MAX_WRITES = 64  # the maximum number of reserved writes of one side at once
MAX_REASON = 1024  # characters

_TEST_BYTES = 16

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Bytes = Annotated[bytes, msgspec.Meta(max_length=64 << 10)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
_Test = Annotated[bytes, msgspec.Meta(min_length=_TEST_BYTES, max_length=_TEST_BYTES)]


class Chosen(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """State the engine that the user of the connecting side has chosen."""

    engine: _Name


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """State the address of the engine of this side, and the key of its memory for the test write."""

    address: _Bytes
    key: _Bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """State that this side uses no engine, or has closed it: it writes nothing more, and accepts no write."""

    reason: _Text


class Proved(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """State the bytes that the test write of this side repeats."""

    test: _Test


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Request memory for a block of `nbytes` bytes."""

    write: Number
    segment: Number
    block: Number
    nbytes: Number


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """State that a block has memory; the key is empty if the engine cannot write to it."""

    write: Number
    key: _Bytes


class Written(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """State that a write has ended or was cancelled, and that no byte of it is under way."""

    write: Number


DirectMessage: TypeAlias = Chosen | Offer | Refused | Proved | Reserve | Reserved | Written

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[DirectMessage] = msgspec.msgpack.Decoder(DirectMessage)
_DIRECT = bytes([DIRECT])


def encode_direct(message: DirectMessage) -> bytes:
    """Encode a message between engines, with its kind."""
    return _DIRECT + _encoder.encode(message)


def read_direct(data: memoryview) -> DirectMessage:
    """Decode a message between engines, which begins with its kind.

    Raises:
        ProtocolError: the message is invalid, or one of its fields is too long.
    """
    try:
        return _decoder.decode(data[1:])
    except DECODE_ERRORS as error:
        raise ProtocolError(f"it sent a message between engines that cannot be decoded: {error}") from error
