"""Messages of all kinds, placeholders of peers, and comparable descriptions of messages."""

import dataclasses
import itertools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypedDict, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torch.nn import Parameter

from aiotensor.codec import TensorDecoder, TensorEncoder
from aiotensor.memory.tensors import DTYPES
from tests.memory.segments import random_tensor

T = TypeVar("T")
Array: TypeAlias = npt.NDArray[Any]

LARGE = (300, 70)  # too large for a body, whatever the dtype


class Box(msgspec.Struct, Generic[T]):
    item: T


@dataclasses.dataclass
class Crate(Generic[T]):
    number: int
    item: T


class Labelled(NamedTuple, Generic[T]):
    label: str
    item: T


class Options(TypedDict, Generic[T], total=False):
    first: T
    second: T


# Records that are made by hand, as a peer with another program may make them


_numbers = itertools.count(1000)  # of tensors


def extension(code: str, placeholder: object) -> msgspec.msgpack.Ext:
    """Return an extension for a tensor (T) or an array (A) with any content."""
    return msgspec.msgpack.Ext(ord(code), msgspec.msgpack.encode(placeholder))


def inside(dtype: str, shape: object, payload: object, *flags: object) -> msgspec.msgpack.Ext:
    attributes = [flags] if flags else []
    return extension("T", ["in", [dtype, shape, *attributes], payload, next(_numbers)])


def beside(number: object, dtype: str = "uint8", shape: object = (3,)) -> msgspec.msgpack.Ext:
    return extension("T", ["by", [dtype, shape], number, next(_numbers)])


def body_of(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def large(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return random_tensor(LARGE, dtype)


anything: TensorDecoder[Any] = TensorDecoder(Any)


def through(type_: Any, message: object, inline_bytes: int = 8192) -> Any:
    """Encode a message, and decode it as a message of this type."""
    return TensorDecoder(type_).decode(TensorEncoder(inline_bytes=inline_bytes).encode(message))


def encoded(message: object) -> tuple[bytes | memoryview, memoryview]:
    """Encode a message of one large tensor: its body, and the buffer beside it."""
    body, buffer = TensorEncoder().encode(message)
    assert isinstance(buffer, memoryview)
    return body, buffer


def sent(parts: Sequence[bytes | bytearray | memoryview]) -> list[bytearray]:
    """Copy parts into separate memory, as they are at the other side."""
    return [bytearray(part) for part in parts]


# Descriptions of messages


def raw(tensor: torch.Tensor) -> Array:
    """Return the bits of a tensor's values as integers, since torch cannot compare all dtypes."""
    raws = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    array: Array = tensor.detach().resolve_conj().resolve_neg().view(raws[tensor.element_size()]).numpy()
    return array


def plain(value: Any) -> object:
    """Return a comparable and readable description of everything in a message that must arrive."""
    if isinstance(value, torch.Tensor):
        kind = type(value).__name__, value.requires_grad, value.is_leaf
        return kind, value.dtype, tuple(value.shape), raw(value).tobytes()
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
        names = typing.get_type_hints(type(value))
        return type(value), {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(item) for item in value]
    return type(value), value


def tensors_in(message: Any) -> Iterator[torch.Tensor | Array]:
    """Iterate over the tensors and arrays of a message, in order; it may be as deep as msgpack allows."""
    left = [message]
    while left:
        value = left.pop()
        if isinstance(value, torch.Tensor | np.ndarray):
            yield value
        elif isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
            left += reversed([getattr(value, name) for name in typing.get_type_hints(type(value))])
        elif isinstance(value, dict | list | tuple):
            left += reversed(list(value.values() if isinstance(value, dict) else value))


def address_of(memory: torch.Tensor | Array | memoryview | bytearray | bytes) -> int:
    if isinstance(memory, torch.Tensor):
        return memory.data_ptr()
    array = memory if isinstance(memory, np.ndarray) else np.frombuffer(memory, np.uint8)
    address: int = array.__array_interface__["data"][0]
    return address


# Strategies

# No tensor is inline, some are, all small ones are.
limits = st.sampled_from([0, 16, 8192])
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)
_NUMPY_DTYPES = [
    np.dtype(kind) for kind in ("?", "b", "B", "h", "H", "i", "I", "l", "L", "e", "f", "d", "F", "D")
]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw any tensor that can be sent: of every dtype, with any strides, with or without a gradient."""
    tensor = random_tensor(draw(shapes), draw(st.sampled_from(list(DTYPES.values()))), draw(seeds))
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    for axis, size in enumerate(tensor.shape):
        start, step = draw(st.integers(0, max(size - 1, 0))), draw(st.integers(1, 2))
        tensor = tensor[(slice(None),) * axis + (slice(start, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.expand(draw(st.integers(0, 2)), *tensor.shape)
    wants_gradient = (tensor.is_floating_point() or tensor.is_complex()) and draw(st.booleans())
    if draw(st.booleans()):
        return Parameter(tensor, requires_grad=wants_gradient)
    return tensor.requires_grad_(wants_gradient)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Draw any array that can be sent: of every dtype of both sides, with any strides, read-only or not."""
    shape, dtype = draw(shapes), draw(st.sampled_from(_NUMPY_DTYPES))
    values = np.random.default_rng(draw(seeds)).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    array: Array = values.view(dtype).reshape(shape)
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    for axis in range(array.ndim):
        array = array[(slice(None),) * axis + (slice(None, None, draw(st.sampled_from([1, 2, -1, -2]))),)]
    if draw(st.booleans()):
        array = np.broadcast_to(array, (2, *array.shape))
    array.setflags(write=array.flags.writeable and draw(st.booleans()))
    return array


class Kind(NamedTuple):
    """A type, and the messages of it."""

    type_: Any
    values: st.SearchStrategy[Any]


def of(generic: Any, *arguments: Any) -> Any:
    """Return a type that is constructed at run time."""
    return generic[arguments]


_simple = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.binary(max_size=3)
_anything = st.recursive(
    tensors() | arrays() | _simple,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def _around(inner: Kind) -> list[Kind]:
    """Return types that contain one type, with strategies for their values."""
    type_, values = inner
    several = st.lists(values, max_size=3)
    return [
        Kind(of(list, type_), several),
        Kind(of(tuple, type_, ...), several.map(tuple)),
        Kind(of(dict, str, type_), st.dictionaries(st.text(max_size=3), values, max_size=3)),
        Kind(of(dict, int, type_), st.dictionaries(st.integers(0, 9), values, max_size=3)),
        Kind(of(Box, type_), st.builds(Box, values)),
        Kind(of(Crate, type_), st.builds(Crate, st.integers(0, 9), values)),
        Kind(of(Labelled, type_), st.builds(Labelled, st.text(max_size=3), values)),
        Kind(of(Options, type_), st.dictionaries(st.sampled_from(["first", "second"]), values)),
        Kind(type_ | types.NoneType, values | st.none()),
    ]


def _beside(one: Kind, other: Kind) -> Kind:
    return Kind(of(tuple, one.type_, other.type_), st.tuples(one.values, other.values))


kinds = st.recursive(
    st.sampled_from(
        [
            Kind(torch.Tensor, tensors()),
            Kind(np.ndarray, arrays()),
            Kind(int, st.integers(-9, 9)),
            Kind(Any, _anything),
        ]
    ),
    lambda inner: (
        inner.flatmap(lambda kind: st.sampled_from(_around(kind))) | st.builds(_beside, inner, inner)
    ),
    max_leaves=4,
)
