"""Decoded messages equal the encoded ones bit for bit, and large tensors are not copied."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from aiotensor.codec import TensorDecoder, TensorEncoder
from aiotensor.codec.cost import takes_long
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from tests.codec.messages import (
    LARGE,
    Array,
    Box,
    Kind,
    anything,
    body_of,
    encoded,
    kinds,
    large,
    limits,
    plain,
    sent,
    tensors_in,
    through,
)
from tests.selection import DTYPES
from tests.tensors.segments import random_tensor
from tests.tensors.test_source import Box as Foreign
from tests.tensors.test_source import read_only
from tests.test_values import VIEWS

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

in_body_or_beside = pytest.mark.parametrize("inline_bytes", [1 << 20, 0], ids=["in the body", "beside it"])

# Any message


@settings(max_examples=400)
@given(kind=kinds, inline_bytes=limits, data=st.data())
def test_any_message_round_trips_unchanged(kind: Kind, inline_bytes: int, data: st.DataObject) -> None:
    message = data.draw(kind.values)
    before = plain(message)
    parts = TensorEncoder(inline_bytes=inline_bytes).encode(message)
    received = TensorDecoder(kind.type_).decode(sent(parts))

    assert plain(received) == before
    assert plain(message) == before, "encoding only reads"
    for array in tensors_in(received):
        assert isinstance(array, torch.Tensor) or array.flags.writeable


@in_body_or_beside
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 4)], ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_round_trips_bit_for_bit(name: str, shape: tuple[int, ...], inline_bytes: int) -> None:
    source = random_tensor(shape, DTYPES[name])

    received = through(torch.Tensor, source, inline_bytes)

    assert type(received) is torch.Tensor
    assert plain(received) == plain(source)


@in_body_or_beside
@pytest.mark.parametrize("shape", [(6, 4), LARGE], ids=str)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_any_strides_round_trips_as_a_contiguous_tensor(
    view: str, shape: tuple[int, ...], inline_bytes: int
) -> None:
    for dtype in (torch.uint8, torch.bfloat16, torch.complex128, torch.float8_e4m3fn):
        source = VIEWS[view](random_tensor(shape, dtype))
        received = through(torch.Tensor, source, inline_bytes)

        assert received.is_contiguous()
        assert plain(received) == plain(source)


@in_body_or_beside
@pytest.mark.parametrize(
    "view",
    [
        lambda numbers: numbers.conj(),
        lambda numbers: numbers.conj().t(),
        lambda numbers: numbers.conj().imag,
        lambda numbers: numbers.conj().imag[:, ::2],
        torch._neg_view,
    ],
    ids=["conjugate", "conjugate transposed", "negative", "negative sliced", "negative complex"],
)
def test_a_conjugate_or_negative_view_round_trips_with_its_values(
    view: Callable[[torch.Tensor], torch.Tensor], inline_bytes: int
) -> None:
    source = view(torch.randn((300, 70), dtype=torch.complex64))
    assert source.is_conj() or source.is_neg()

    received = through(torch.Tensor, source, inline_bytes)

    assert torch.equal(received, source)
    assert not received.is_conj()
    assert not received.is_neg()


_columns = np.arange(21_000, dtype=np.uint16).reshape(LARGE)
_records = np.zeros(50, [("mark", "u1"), ("value", "<i4")])
_records["value"] = range(50)


@in_body_or_beside
@pytest.mark.parametrize(
    "source",
    [
        _columns,
        read_only(_columns.copy()),
        _columns.T,
        _columns[::-1, ::-2],
        read_only(_columns[::-1].copy())[::-3],
        _columns[5:9, 3:4],
        np.broadcast_to(_columns[0], LARGE),
        np.asfortranarray(_columns),
        _records["value"],
        np.array(3.5),
        np.zeros((0, 3), np.complex64),
        np.zeros((0, 3), np.complex64)[::-1],
        _columns[:1][::-1],
        _columns > 7,
    ],
    ids=lambda array: f"{array.dtype} {array.shape} {array.strides} {array.flags.writeable}",
)
def test_an_array_of_any_strides_round_trips_as_a_writable_array(source: Array, inline_bytes: int) -> None:
    received = through(np.ndarray, source, inline_bytes)

    assert type(received) is np.ndarray
    assert received.flags.writeable
    assert received.dtype == source.dtype
    assert np.array_equal(received, source)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        (np.float32(1.5), 1.5),
        (np.float64(0.1), 0.1),
        (np.int64(-7), -7),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
    ],
    ids=repr,
)
def test_a_numpy_scalar_is_encoded_as_a_plain_value(scalar: np.generic, value: object) -> None:
    received = through(Any, {"item": [scalar]})["item"]

    assert received == [value]
    assert type(received[0]) is type(value)
    assert not takes_long({"item": [scalar]}, has_sender=True)


@in_body_or_beside
def test_a_dlpack_object_round_trips_as_a_tensor(inline_bytes: int) -> None:
    source = torch.arange(6.0).reshape(2, 3)
    [received] = through(list[torch.Tensor], [Foreign(source)], inline_bytes)

    assert torch.equal(received, source)


@in_body_or_beside
@pytest.mark.parametrize("requires_grad", [True, False])
def test_leaf_tensors_and_parameters_keep_their_type_and_requires_grad(
    requires_grad: bool, inline_bytes: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        leaf = large(dtype).t().requires_grad_(requires_grad)
        for source in (leaf, Parameter(leaf.detach(), requires_grad)):
            received = through(Any, [source], inline_bytes)[0]
            assert type(received) is type(source)
            assert received.requires_grad is requires_grad
            assert received.is_leaf
            assert plain(received) == plain(source)


def test_an_integer_parameter_round_trips_as_a_parameter() -> None:
    received = through(Parameter, Parameter(torch.arange(3), requires_grad=False))

    assert type(received) is Parameter
    assert received.tolist() == [0, 1, 2]


# In the body, or beside it


def test_a_tensor_is_part_of_the_body_up_to_inline_bytes() -> None:
    for encoder, limit in ((TensorEncoder(), MAX_INLINE_BYTES), (TensorEncoder(inline_bytes=10), 10)):
        assert len(encoder.encode([torch.zeros(limit, dtype=torch.uint8)])) == 1
        assert len(encoder.encode([torch.zeros(limit + 1, dtype=torch.uint8)])) == 2


def test_an_empty_tensor_needs_no_buffer() -> None:
    assert len(TensorEncoder(inline_bytes=0).encode([torch.zeros(0, 7), np.zeros((3, 0))])) == 1


def test_the_size_of_an_expanded_tensor_includes_all_its_elements() -> None:
    [_, buffer] = encoded(torch.zeros(1, dtype=torch.uint8).expand(MAX_INLINE_BYTES + 1))

    assert buffer.nbytes == MAX_INLINE_BYTES + 1


def test_an_inline_tensor_may_be_modified_after_encoding() -> None:
    source = torch.zeros(3)
    parts = TensorEncoder().encode(source)
    source.fill_(7)

    assert anything.decode(parts).tolist() == [0, 0, 0]


def test_a_tensor_that_occurs_twice_is_decoded_as_two_tensors() -> None:
    source = large()
    one, other = TensorDecoder(list[torch.Tensor]).decode(sent(TensorEncoder().encode([source, source])))
    one.fill_(0)

    assert torch.equal(other, source)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_body_is_read_from_any_kind_of_bytes(kind: Callable[[bytes | memoryview], Any]) -> None:
    body, buffer = encoded(Box(large()))

    assert torch.equal(TensorDecoder(Box[torch.Tensor]).decode((kind(body), buffer)).item, large())


def test_an_encoder_keeps_nothing_of_a_message() -> None:
    encoder = TensorEncoder()
    source = np.zeros(LARGE)
    gone = weakref.ref(source)
    first = encoder.encode([source, large()])
    second = encoder.encode([large()])
    del first, source
    gc.collect()

    assert gone() is None
    assert torch.equal(anything.decode(second)[0], large())


# Other extensions


@pytest.mark.parametrize("type_", [list[msgspec.msgpack.Ext], Any], ids=str)
def test_unknown_extensions_are_decoded_unchanged(type_: Any) -> None:
    theirs: Sequence[object] = [msgspec.msgpack.Ext(code, b"theirs") for code in (0, 1, 127, -2, -128)]
    received = TensorDecoder(type_).decode([body_of(theirs)])

    assert received == theirs
    assert all(type(item.data) is bytes for item in received), "not a view of the body"
