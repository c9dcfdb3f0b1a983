"""Decode messages from a body and out-of-band buffers, and check their types."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeAlias, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import torch

from aiotensor.codec.expectations import arms, check_decodable, expectations
from aiotensor.codec.meta import MismatchError
from aiotensor.codec.placeholders import ARRAY, TENSOR, External, Inline, Tied, read
from aiotensor.errors import ProtocolError
from aiotensor.memory.tensors import (
    DTYPES,
    open_buffer,
    tensor_over,
    unknown_dtype,
    view_over,
    with_attributes,
)
from aiotensor.protocol.frames import DECODE_ERRORS

T = TypeVar("T")
P = TypeVar("P")

Find: TypeAlias = Callable[[Any], torch.Tensor]
"""A function that returns the tensor of a handle."""


# Replacements for terms of MessagePack in the error texts of msgspec.
_PLAIN_TERMS = {
    "Expected `object`": "Expected a Struct, a dataclass or a dict",
    "got `ext`": "got a tensor or an array",
}


def _nowhere(handle: object) -> torch.Tensor:
    raise ProtocolError(
        f"the peer sent the handle of a tensor, but this decoder has no `find`: {handle!r:.64}"
    )


class Parts(Generic[P]):
    """Buffers or tensors beside the body of a message, each of which the message must use once.

    Args:
        kind: their name in errors, such as "tensor".
        parts: the parts, which the body refers to by their numbers.
    """

    def __init__(self, kind: str, parts: list[P]) -> None:
        self._kind = kind
        self._parts = parts
        self._used: set[int] = set()

    def take(self, number: object) -> P:
        """Return a part, but only once: tied tensors refer to a number of a tensor instead."""
        if not isinstance(number, int) or not 0 <= number < len(self._parts):
            raise ProtocolError(
                f"the peer referred to {self._kind} {number!r:.64}, but sent {len(self._parts)} {self._kind}s"
            )
        if number in self._used:
            raise ProtocolError(f"the peer referred to {self._kind} {number} twice")
        self._used.add(number)
        return self._parts[number]

    def check_all_used(self) -> None:
        """Raise `ProtocolError` if the message did not use each part."""
        if len(self._used) != len(self._parts):
            raise ProtocolError(
                f"the peer sent {len(self._parts)} {self._kind}s, but the message uses {len(self._used)} of "
                "them: there is one too many, or a tensor is in a field that the type of this decoder does "
                "not have"
            )


class _Decoding(msgspec.Struct, eq=False):
    """The buffers of one message, while it is decoded."""

    buffers: Parts[memoryview]
    call_find: Find
    error: BaseException | None = None  # raised by `call_find`
    tensors: dict[int, torch.Tensor] = {}  # the tensors that were decoded, by their numbers

    def find(self, handle: object) -> torch.Tensor:
        """Call `find`, and store its error, so that it is not mistaken for an error of the peer."""
        try:
            tensor: object = self.call_find(handle)
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"`find` must return a tensor, got {type(tensor).__name__!r}")
        except BaseException as error:
            self.error = error
            raise
        return tensor


_NO_BUFFERS: Parts[memoryview] = Parts("buffer", [])


class _Current(threading.local):
    """The message that this thread decodes."""

    parts = _Decoding(_NO_BUFFERS, _nowhere)


class TensorDecoder(Generic[T]):
    """Decode messages that contain tensors and numpy arrays, and check their types.

    Creating a decoder takes longer than decoding a message, so create one for each type and reuse it. Several
    threads may use a decoder at the same time.

    A field of type `torch.Tensor` or `numpy.ndarray` accepts both, and converts the value to its own type.
    The dtype of an annotation such as ``NDArray[np.uint8]`` is checked, and so are `TensorMeta` annotations,
    such as ``Annotated[torch.Tensor, TensorMeta(dtype=torch.uint8, shape=(None, None, None, 3))]``, of the
    fields of Structs. A union may contain a tensor or an array only together with None: annotate a field for
    several types, such as ``torch.Tensor | list[torch.Tensor]``, as `Any`.

    Args:
        type: the type of the messages, as for a decoder of msgspec.
        find: called with each handle that the encoder's `place` returned, in the order of the message;
            returns the tensor. Its errors propagate from `decode`. By default, `decode` raises
            `ProtocolError` for a handle.

    Raises:
        TypeError: msgspec cannot decode this type, or a `TensorMeta` annotates a type other than a tensor, or
            a tensor that is neither a field of a Struct nor the message.
    """

    def __init__(self, type: type[T], find: Find = _nowhere) -> None:  # noqa: A002
        self._find = find
        self._name = repr(type) if get_args(type) else getattr(type, "__name__", repr(type))
        self._current = _Current()
        self._only_tensors = check_decodable(type)
        self._expectations = expectations(type)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            type, ext_hook=self._open_extension, dec_hook=None if self._only_tensors else _convert
        )

    def decode(self, parts: Sequence[bytes | bytearray | memoryview], find: Find | None = None) -> T:
        """Decode a message, and return it.

        The tensors of the message are writable. A tensor from a buffer shares the memory of the buffer and
        keeps it alive. If the buffer is read-only or not aligned for the dtype, the tensor is a copy instead.

        Args:
            parts: the body and the buffers, as `TensorEncoder.encode` returned them.
            find: replaces the `find` of the decoder for this message.

        Raises:
            ProtocolError: the body is invalid or of another type, a tensor does not match its annotation, or
                a buffer is missing or unused, perhaps because the local type lacks a field. For a mismatch,
                the text contains the path of the field.
            OSError: no memory is left for a copy.
        """
        if not parts:
            raise ProtocolError("the peer sent a message without parts")
        body, *buffers = parts
        views = Parts("buffer", [memoryview(part) for part in buffers]) if buffers else _NO_BUFFERS
        now = _Decoding(views, self._find if find is None else find)
        outer, self._current.parts = self._current.parts, now  # `find` may decode another message
        try:
            message = self._decoder.decode(body)
            if self._expectations is not None:
                self._expectations(message)
        except MismatchError as error:
            raise ProtocolError(f"`${error.path}` does not match its annotation: {error}") from None
        # msgspec raises a TypeError for a set whose items are not hashable.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
            if error is now.error:
                raise
            text = str(error)
            for term, plain in _PLAIN_TERMS.items():
                text = text.replace(term, plain)
            raise ProtocolError(
                f"the peer sent a message that cannot be decoded as {self._name}: {text}"
            ) from error
        finally:
            self._current.parts = outer
            now.error = None  # its traceback refers to this object, and thus to tensors
            now.tensors.clear()
        if buffers:
            views.check_all_used()
        return message

    def _open_extension(self, code: int, data: memoryview) -> object:
        if code not in (TENSOR, ARRAY):
            return msgspec.msgpack.Ext(code, bytes(data))
        parts = self._current.parts
        try:
            placeholder = read(data)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"the peer described an invalid tensor: {error}") from error
        number = placeholder.number
        if isinstance(placeholder, Tied):
            if number not in parts.tensors:
                raise ProtocolError(
                    f"the peer sent a tensor tied to tensor {number}, which was not decoded: it may be in a "
                    "field that the type of this decoder does not have"
                )
            tensor = parts.tensors[number]
        elif number in parts.tensors:
            raise ProtocolError(f"the peer sent tensor {number} twice")
        elif isinstance(placeholder, External):
            tensor = parts.find(placeholder.handle)
        else:
            meaning = placeholder.meaning
            dtype = DTYPES.get(meaning.dtype)
            if dtype is None:
                raise unknown_dtype(meaning.dtype)
            if isinstance(placeholder, Inline):
                payload, shape = placeholder.payload, meaning.shape
                if payload and len(payload) == math.prod(shape) * dtype.itemsize:
                    tensor = view_over(bytearray(payload), 0, dtype, shape)[0]
                else:
                    tensor = open_buffer(payload, dtype, shape)
            else:
                tensor = open_buffer(parts.buffers.take(placeholder.buffer), dtype, meaning.shape)
            if meaning.attributes is not None:
                tensor = with_attributes(tensor, meaning.attributes)
        parts.tensors[number] = tensor
        return tensor if code == TENSOR or self._only_tensors else _as_array(tensor)


def _as_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    try:
        return tensor.detach().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError, ValueError) as error:  # a ValueError before numpy 2
        raise ProtocolError(
            f"the peer sent an array of {tensor.dtype}, which numpy does not support with {tensor.dim()} "
            "dimensions"
        ) from error


def _convert(type_: Any, value: object) -> object:
    """Convert a tensor or an array to the type of its field; msgspec rejects values of other types.

    Raises:
        TypeError: the dtype of the array differs from its annotation; msgspec adds the path of the field.
    """
    wanted = get_origin(type_) or type_
    if wanted is np.ndarray:
        array = _as_array(value) if isinstance(value, torch.Tensor) else value
        if isinstance(array, np.ndarray):
            _check_array(array, type_)
        return array
    return tensor_over(value) if isinstance(value, np.ndarray) else value


def _check_array(array: np.ndarray[Any, Any], type_: Any) -> None:
    """Check the dtype of an array against an annotation such as ``NDArray[np.uint8]``."""
    for dtype in get_args(type_)[1:]:
        wanted = [arm for scalar in get_args(dtype) for arm in arms(scalar)]
        if wanted and not any(arm is Any or issubclass(array.dtype.type, arm) for arm in wanted):
            names = " | ".join(arm.__name__ for arm in wanted)
            raise TypeError(f"Expected an array of `{names}`, got `{array.dtype}`")
