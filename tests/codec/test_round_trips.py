"""Decoded messages equal the encoded ones bit for bit, and large tensors are not copied."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.codec import TensorDecoder, TensorEncoder
from aiotensor.codec.cost import cost_of
from aiotensor.errors import ProtocolError
from aiotensor.memory.tensors import MAX_INLINE_BYTES
from tests.codec.messages import (
    LARGE,
    Array,
    Box,
    Kind,
    address_of,
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
from tests.selection import COMPLETE

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


# Any message


@settings(max_examples=400 if COMPLETE else 60)
@given(
    kind=kinds,
    inline_bytes=limits,
    least=st.sampled_from([None, 0, 1, 3]),
    data=st.data(),
)
def test_any_message_round_trips_unchanged(
    kind: Kind, inline_bytes: int, least: int | None, data: st.DataObject
) -> None:
    """Tensors are in the body, beside the body, or, of `least` elements and more, elsewhere."""
    message = data.draw(kind.values)
    before = plain(message)
    offered: list[torch.Tensor] = []
    placed: dict[int, torch.Tensor] = {}
    found: list[int] = []

    def place(tensor: Any) -> int | None:
        offered.append(tensor)
        if tensor.numel() < (least or 0):
            return None
        number = len(placed)  # the first is 0, which is a handle like any other
        placed[number] = tensor
        return number

    def find(number: int) -> torch.Tensor:
        found.append(number)
        return placed[number]

    places = () if least is None else (place,)
    parts = TensorEncoder(*places, inline_bytes=inline_bytes).encode(message)
    received = TensorDecoder(kind.type_, find).decode(sent(parts))

    assert plain(received) == before
    assert plain(message) == before, "encoding only reads"
    assert found == list(placed), "in the order of the message"
    if least is None:
        assert all(isinstance(one, torch.Tensor) or one.flags.writeable for one in tensors_in(received))
        return
    assert [plain(tensor) for tensor in offered] == [plain(torch.as_tensor(t)) for t in writable(message)]
    for source, arrived in zip(offered, tensors_in(received), strict=True):
        if source.numel() >= max(least, 1):
            assert address_of(arrived) == source.data_ptr()


def writable(message: object) -> list[torch.Tensor | Array]:
    """The tensors of a message, and copies of its arrays: torch takes those in some strides only."""
    return [tensor.copy() if isinstance(tensor, np.ndarray) else tensor for tensor in tensors_in(message)]


def test_a_conjugate_or_negative_view_round_trips_with_its_values() -> None:
    numbers = torch.randn((300, 70), dtype=torch.complex64)
    conjugate = numbers.conj()
    for source in (
        conjugate,
        conjugate.t(),
        conjugate.imag,
        conjugate.imag[:, ::2],
        torch._neg_view(numbers),
    ):
        assert source.is_conj() or source.is_neg()
        for inline_bytes in (1 << 20, 0):
            received = through(torch.Tensor, source, inline_bytes)
            assert torch.equal(received, source)
            assert not received.is_conj()
            assert not received.is_neg()


def test_a_numpy_scalar_is_encoded_as_a_plain_value() -> None:
    for scalar, value in (
        (np.float32(1.5), 1.5),
        (np.float64(0.1), 0.1),
        (np.int64(-7), -7),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
    ):
        received = through(Any, {"item": [scalar]})["item"]
        assert received == [value]
        assert type(received[0]) is type(value)
        assert not cost_of({"item": [scalar]})[0]


# In the body, or beside it


def test_a_tensor_is_part_of_the_body_up_to_inline_bytes() -> None:
    for encoder, limit in ((TensorEncoder(), MAX_INLINE_BYTES), (TensorEncoder(inline_bytes=10), 10)):
        assert len(encoder.encode([torch.zeros(limit, dtype=torch.uint8)])) == 1
        assert len(encoder.encode([torch.zeros(limit + 1, dtype=torch.uint8)])) == 2


def test_the_size_of_a_buffer_is_that_of_all_elements() -> None:
    [_, buffer] = encoded(torch.zeros(1, dtype=torch.uint8).expand(MAX_INLINE_BYTES + 1))

    assert buffer.nbytes == MAX_INLINE_BYTES + 1
    assert len(TensorEncoder(inline_bytes=0).encode([torch.zeros(0, 7), np.zeros((3, 0))])) == 1


@pytest.mark.parametrize("inline_bytes", [1 << 20, 0])
def test_tied_tensors_are_encoded_once_and_arrive_tied(inline_bytes: int) -> None:
    first, second = torch.nn.Linear(9, 9), torch.nn.Linear(9, 9)
    second.weight = first.weight
    model = torch.nn.Sequential(first, second)
    array = np.zeros((3, 5))
    encoder = TensorEncoder(inline_bytes=inline_bytes)
    parts = sent(encoder.encode({"state": model.state_dict(), "arrays": [array, array]}))
    assert sum(memoryview(part).nbytes for part in parts) < 2 * first.weight.nbytes + array.nbytes

    received = anything.decode(parts)
    state, (one, other) = received["state"], received["arrays"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor)
    state["0.weight"].zero_()
    assert not state["1.weight"].any()
    one += 1
    assert other.all()


def test_tensors_that_share_memory_otherwise_are_decoded_as_separate_ones() -> None:
    tensor = torch.ones(30, 40)
    for other in (
        tensor.view(40, 30),
        tensor.t(),
        tensor[:29],
        torch.nn.Parameter(tensor),
        tensor.view(torch.int32),
    ):
        one, received = through(list[torch.Tensor], [tensor, other])
        one.zero_()
        assert torch.equal(received, other)
    assert [len(one) for one in through(list[torch.Tensor], [torch.empty(0), torch.empty(0)])] == [0, 0]


class Foreigner:
    """An object whose tensor exists only while it is imported."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __dlpack__(self, **options: object) -> object:
        return torch.full((100,), self.value).__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_tensors_that_exist_only_during_encoding_are_not_mistaken_for_tied_ones() -> None:
    received = anything.decode(TensorEncoder().encode([Foreigner(value) for value in range(20)]))

    assert [int(tensor[0]) for tensor in received] == list(range(20))


def test_copies_of_arrays_are_freed_while_a_message_is_encoded() -> None:
    arrays = [np.ones((LARGE[0], LARGE[1]))[::-1] for _ in range(5)]
    alive: list[weakref.ref[torch.Tensor]] = []

    def place(tensor: torch.Tensor) -> int:
        assert sum(one() is not None for one in alive) <= 1
        alive.append(weakref.ref(tensor))
        return len(alive)

    TensorEncoder(place).encode(arrays)
    assert len(alive) == len(arrays)


def test_a_tie_to_a_tensor_that_was_not_decoded_is_refused() -> None:
    class Second(msgspec.Struct):
        second: torch.Tensor

    tensor = torch.zeros(3)
    [body] = TensorEncoder().encode({"first": tensor, "second": tensor})
    with pytest.raises(ProtocolError, match="a field that the type of this decoder does not have"):
        TensorDecoder(Second).decode([body])


def test_two_tensors_with_one_number_are_refused() -> None:
    [inner] = TensorEncoder().encode({"a": torch.zeros(3)})
    parts = TensorEncoder().encode({"x": torch.ones(3), "inner": msgspec.Raw(inner)})
    with pytest.raises(ProtocolError, match="sent tensor 0 twice"):
        anything.decode(parts)


def test_dense_strides_survive() -> None:
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    message = [images, torch.randn(3, 4, 1).permute(2, 1, 0), np.asfortranarray(np.eye(3, 4))]
    for inline_bytes in (1 << 20, 0):
        first, second, array = through(Any, message, inline_bytes)
        assert torch.equal(first, images)
        assert first.stride() == images.stride()
        assert array.flags.f_contiguous
        assert second.stride() == through(torch.Tensor, second, inline_bytes).stride()


def test_a_body_is_read_from_any_kind_of_bytes() -> None:
    body, buffer = encoded(Box(large()))
    for kind in (bytes, bytearray, memoryview):
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


def test_unknown_extensions_are_decoded_unchanged() -> None:
    theirs: Sequence[object] = [msgspec.msgpack.Ext(code, b"theirs") for code in (0, 1, 127, -2, -128)]
    for type_ in (list[msgspec.msgpack.Ext], Any):
        decoder: TensorDecoder[Any] = TensorDecoder(type_)
        received = decoder.decode([body_of(theirs)])
        assert received == theirs
        assert all(type(item.data) is bytes for item in received), "not a view of the body"
