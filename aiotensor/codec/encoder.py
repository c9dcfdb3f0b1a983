"""Encode a message as a body and out-of-band buffers."""

import sys
from collections.abc import Callable, Hashable
from typing import TypeAlias, cast

import msgspec
import numpy as np
import torch

from aiotensor.codec.placeholders import (
    ARRAY,
    LENGTH_BYTES,
    MAX_PACKED_BYTES,
    PACKED,
    TENSOR,
    External,
    Inline,
    Meaning,
    OutOfBand,
    Tied,
    write,
)
from aiotensor.memory.dtypes import DTYPE_NAMES
from aiotensor.memory.gathering import as_tensor
from aiotensor.memory.inline import MAX_INLINE_BYTES, buffer_of, bytes_of
from aiotensor.memory.source import (
    REGISTERED,
    Sendable,
    Source,
    SupportsDLPack,
    as_source,
    attributes_of,
)

__all__ = ["Encoding", "Place", "TensorEncoder"]

Place: TypeAlias = Callable[[torch.Tensor], object | None]
"""A function that sends a tensor, and returns its handle, or None to encode the tensor in the message."""

Buffers: TypeAlias = list[bytes | memoryview]


_TENSORS = (torch.Tensor, np.ndarray, SupportsDLPack)

_SCALAR_KINDS = "biufSU"  # bool, signed and unsigned integers, floats, bytes and text


def _plain_value(value: object) -> object:
    """Return the Python value of a numpy scalar; raise TypeError for any other unknown object."""
    if isinstance(value, np.generic) and value.dtype.kind in _SCALAR_KINDS:
        plain = value.item()
        if not isinstance(plain, np.generic):  # such as a longdouble, for which Python has no type
            return plain
    raise TypeError(
        f"a message cannot contain a {type(value).__name__!r}: use a msgspec Struct, a dataclass, a list, a "
        "dict, a plain value, a tensor or an array"
    )


def _not_mine(source: Source) -> None:
    return None


class Encoding(msgspec.Struct, eq=False):
    """The encoding of one message, whose tensors and arrays become sources.

    Attributes:
        place: called with each source in the order of the message; returns a handle that msgpack can encode,
            or None to encode the source in the message. Its errors propagate from `encode`.
        inline_bytes: the size in bytes up to which sources are part of the body; larger ones become buffers.
        max_inline_bytes: the maximum number of bytes that further sources add to the body, including their
            dtypes and shapes. Further placeholders are packed into one additional buffer of type `bytes`,
            which is the last one; only a placeholder of more than `MAX_PACKED_BYTES` stays in the body.
        open: called with each tensor or array; returns its source.
        buffers: the buffers that follow the body.
        pack: the contents of the additional buffer.
        numbers: the number of each tensor and array, by its identity, and the object, which stays alive, so
            that no other object gets its address.
    """

    place: Callable[[Source], object | None]
    inline_bytes: int = MAX_INLINE_BYTES
    max_inline_bytes: int = sys.maxsize
    open: Callable[[Sendable], Source] = as_source
    buffers: Buffers = []
    pack: bytearray = msgspec.field(default_factory=bytearray)
    numbers: dict[Hashable, tuple[int, object]] = {}

    def encode(self, message: object) -> Buffers:
        """Encode the message, as `TensorEncoder.encode` does; may be called only once."""
        body = msgspec.msgpack.encode(message, enc_hook=self._encode_tensor)
        if self.pack:
            self.buffers.append(bytes(self.pack))
        return [body, *self.buffers]

    def _encode_tensor(self, value: object) -> object:
        if not isinstance(value, _TENSORS):
            return _plain_value(value)
        source = self.open(value)
        # An array of a dtype that numpy itself does not have, such as bfloat16, arrives as a tensor.
        is_array = isinstance(value, np.ndarray) and value.dtype.isbuiltin != REGISTERED
        code = ARRAY if is_array else TENSOR
        number = len(self.numbers)
        identity: Hashable = id(value)
        if isinstance(value, torch.Tensor) and value.nbytes:
            elements = (value.data_ptr(), value.dtype, value.shape, value.stride())
            identity = (elements, value.requires_grad, type(value), value.is_conj(), value.is_neg())
        first, _ = self.numbers.setdefault(identity, (number, value))
        if first != number:
            return msgspec.msgpack.Ext(code, write(Tied(first)))
        handle = self.place(source)
        if handle is not None:
            return msgspec.msgpack.Ext(code, write(External(handle, number)))
        meaning = Meaning(DTYPE_NAMES[source.dtype], tuple(source.shape), attributes_of(source))
        if source.nbytes <= self.inline_bytes:
            placeholder = write(Inline(meaning, memoryview(bytes_of(source)), number))
            size = len(placeholder)
            if self.max_inline_bytes < size <= MAX_PACKED_BYTES:
                self.pack += size.to_bytes(LENGTH_BYTES, "big") + placeholder
                return msgspec.msgpack.Ext(code, PACKED)
            self.max_inline_bytes -= size
            return msgspec.msgpack.Ext(code, placeholder)
        self.buffers.append(buffer_of(source).data.toreadonly())
        return msgspec.msgpack.Ext(code, write(OutOfBand(meaning, len(self.buffers) - 1, number)))


class TensorEncoder:
    """Encode messages that contain tensors and numpy arrays.

    An encoder keeps no reference to a message, and several threads may use it at the same time. It reserves
    the codes 65 and 84 of msgpack extensions; other extensions are encoded unchanged.

    Args:
        place: called with each tensor in the order of the message, but once for a tensor that occurs twice.
            A numpy array is passed as a tensor over its memory, or as a copy if torch cannot view that memory
            (negative strides). Returns a handle that msgpack can encode, or None to encode the tensor in the
            message. Its errors propagate from `encode`.
        inline_bytes: the size in bytes up to which tensors are part of the body; larger ones become buffers.
    """

    def __init__(self, place: Place = _not_mine, *, inline_bytes: int = MAX_INLINE_BYTES) -> None:
        self._place = cast(Callable[[Source], object | None], place)
        self._inline_bytes = inline_bytes
        self._open = as_source if place is _not_mine else as_tensor

    def encode(self, message: object) -> Buffers:
        """Encode a message, and return its body, followed by its buffers.

        A buffer shares the memory of its tensor, which must not change until the buffer has been sent. A
        large tensor whose memory has gaps or overlaps is copied. A tensor or an array that occurs twice in
        the message is encoded once, and decoded as one; the same applies to two tensors over the same
        elements.

        Args:
            message: a value that msgspec can encode; it may contain, at any depth, tensors, arrays and
                objects with ``__dlpack__``. A numpy scalar is encoded as the plain value of its `item()`.

        Raises:
            TypeError: a value in the message has a type that cannot be encoded.
            UnsupportedTensorError: a tensor cannot be sent unchanged.
            OverflowError: an integer in the message has more than 64 bits.
            RecursionError: the message is nested too deeply.
            UnicodeEncodeError: a string in the message contains a lone surrogate.
            OSError: no memory is left for a copy.
        """
        return Encoding(self._place, self._inline_bytes, open=self._open).encode(message)
