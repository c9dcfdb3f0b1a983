"""Encode a message as a body and out-of-band buffers."""

from collections.abc import Callable, Hashable
from typing import TypeAlias, cast

import msgspec
import numpy as np
import torch

from aiotensor.codec.placeholders import (
    ARRAY,
    TENSOR,
    External,
    Inline,
    Meaning,
    OutOfBand,
    Tied,
    write,
)
from aiotensor.memory.copying import as_tensor, buffer_of, bytes_at, bytes_of
from aiotensor.memory.source import REGISTERED, Sendable, Source, SupportsDLPack, as_source, attributes_of
from aiotensor.memory.tensors import DTYPE_NAMES, MAX_INLINE_BYTES

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
        inline_bytes: the size in bytes up to which sources are part of the body; larger ones become buffers.
        room: the number of bytes of small sources that are part of the body without a call of `place`; -1 to
            call it for every source, also for empty ones.
        open: called with each tensor or array; returns its source.
        call_place: called by `place`.
        buffers: the buffers that follow the body.
        values: the tensors and arrays, by their numbers. They stay alive, so that no other object gets the
            address of one.
        numbers: the numbers of the values, by their identities; empty while there is only one.
    """

    inline_bytes: int = MAX_INLINE_BYTES
    room: int = -1
    open: Callable[[Sendable], Source] = as_source
    call_place: Callable[[Source], object | None] = _not_mine
    buffers: Buffers = []
    values: list[object] = []
    numbers: dict[Hashable, int] = {}

    def place(self, source: Source) -> object | None:
        """Return a handle of a source that msgpack can encode, or None to encode it in the message.

        Called in the order of the message; errors propagate from `encode`.
        """
        return self.call_place(source)

    def encode_tensor(self, value: object) -> object:
        """Return the placeholder of a tensor or an array, or a plain value; called by msgspec."""
        if not isinstance(value, _TENSORS):
            return _plain_value(value)
        source = self.open(value)
        # An array of a dtype that numpy itself does not have, such as bfloat16, arrives as a tensor.
        is_array = isinstance(value, np.ndarray) and value.dtype.isbuiltin != REGISTERED
        code = ARRAY if is_array else TENSOR
        number, nbytes = len(self.values), source.nbytes
        if number:  # identities take several microseconds, and most messages have one tensor
            if not self.numbers:
                self.numbers[_identity(self.values[0])] = 0
            first = self.numbers.setdefault(_identity(value), number)
            if first != number:
                return msgspec.msgpack.Ext(code, write(Tied(first)))
        self.values.append(value)
        if nbytes <= self.inline_bytes and nbytes <= self.room:
            self.room -= nbytes
        elif (handle := self.place(source)) is not None:
            return msgspec.msgpack.Ext(code, write(External(handle, number)))
        attributes, shape = None, tuple(source.shape)
        # Nearly all tensors are ordinary, which this finds out without a call.
        is_contiguous = source.is_contiguous()
        if not is_contiguous or type(source) is not torch.Tensor or source.requires_grad or 1 in shape:
            attributes = attributes_of(source)
        meaning = Meaning(DTYPE_NAMES[source.dtype], shape, attributes)
        if nbytes <= self.inline_bytes:
            if is_contiguous and not source.is_conj() and not source.is_neg():
                payload = bytes_at(source.data_ptr(), nbytes)
            else:
                payload = bytes_of(source)
            return msgspec.msgpack.Ext(code, write(Inline(meaning, memoryview(payload), number)))
        self.buffers.append(buffer_of(source).data.toreadonly())
        return msgspec.msgpack.Ext(code, write(OutOfBand(meaning, len(self.buffers) - 1, number)))


def _identity(value: object) -> Hashable:
    """Return what two tensors over the same elements have in common; they are encoded once."""
    if not isinstance(value, torch.Tensor) or not value.nbytes:
        return id(value)
    elements = (value.data_ptr(), value.dtype, value.shape, value.stride())
    return elements, value.requires_grad, type(value), value.is_conj(), value.is_neg()


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
        encoding = Encoding(self._inline_bytes, open=self._open, call_place=self._place)
        return [msgspec.msgpack.encode(message, enc_hook=encoding.encode_tensor), *encoding.buffers]
