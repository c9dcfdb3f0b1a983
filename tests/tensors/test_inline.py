import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError
from aiotensor.tensors.allocations import Allocations
from aiotensor.tensors.dtypes import DTYPES
from aiotensor.tensors.inline import MAX_INLINE_BYTES, open_inline
from aiotensor.tensors.inline import bytes_of as values_of
from aiotensor.tensors.placement import Plan, open_tensor, plan_placement
from tests.tensors.segments import bytes_of, random_tensor

dtypes = st.sampled_from(list(DTYPES.values()))
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)  # small enough for a frame


def place(source: torch.Tensor) -> bytes:
    """Return the bytes of a tensor that travels in the frame."""
    assert plan_placement(source, Allocations(print)) == Plan(0, None)
    return values_of(source)


@settings(max_examples=300)
@given(shape=shapes, dtype=dtypes, seed=st.integers(0, 9))
def test_an_inline_tensor_survives_the_round_trip(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    source = random_tensor(shape, dtype, seed)
    opened = open_inline(place(source), dtype, shape)

    assert (tuple(opened.shape), opened.dtype) == (shape, dtype)
    assert bytes_of(opened) == bytes_of(source)


def test_a_slice_is_encoded_as_its_own_bytes_in_row_major_order() -> None:
    source = torch.arange(100, dtype=torch.uint8).reshape(10, 10)[2:4, 5:7].t()

    assert place(source) == bytes([25, 35, 26, 36])


@pytest.mark.parametrize(
    "source",
    [
        torch.tensor([1.0, 2.0, 3.0])[1::2],
        torch.tensor([[1.0, 2.0], [3.0, 4.0]])[:1, 1:],
        torch.tensor([2.0]).expand(1),
        torch.tensor(2.0).expand(1, 1),
        torch.tensor([2.0]).as_strided((1,), (7,)),
        torch.tensor([1.0, 2.0])[1],
    ],
    ids=lambda source: f"shape {tuple(source.shape)} strides {source.stride()}",
)
def test_one_element_is_the_same_whatever_its_strides(source: torch.Tensor) -> None:
    assert place(source) == place(torch.tensor(2.0))


@pytest.mark.parametrize(
    "source",
    [
        torch.from_numpy(np.zeros(0, np.float32)),
        torch.from_numpy(np.zeros((0, 3), np.float32)),
        torch.zeros(1).expand(0),
        torch.zeros(3)[:0],
        torch.zeros(3, 4)[:, 4:],
    ],
    ids=lambda source: f"shape {tuple(source.shape)} strides {source.stride()}",
)
def test_a_tensor_without_elements_has_no_bytes_whatever_its_strides(source: torch.Tensor) -> None:
    assert place(source) == b""


def test_conjugate_and_negative_views_are_encoded_as_the_values_that_they_show() -> None:
    assert place(torch.tensor([1 + 2j]).conj()) == place(torch.tensor([1 - 2j]))
    assert place(torch.tensor([1 + 2j]).conj().imag) == place(torch.tensor([-2.0]))
    assert place(torch._neg_view(torch.tensor([2.0]))) == place(torch.tensor([-2.0]))


def test_a_parameter_is_encoded_by_its_values() -> None:
    assert place(torch.nn.Parameter(torch.tensor([2.0]))) == place(torch.tensor([2.0]))


def test_an_opened_tensor_has_memory_of_its_own() -> None:
    payload = place(torch.zeros(4, dtype=torch.uint8))
    opened = open_inline(payload, torch.uint8, (4,))
    opened.fill_(7)

    assert payload == bytes(4)


def test_a_tensor_of_as_many_dimensions_as_a_frame_may_name_is_opened() -> None:
    opened = open_inline(b"\x07", torch.uint8, (1,) * 64)

    assert opened.dim() == 64
    assert opened.sum() == 7


@pytest.mark.parametrize("extra", [-1, 1, -12, 12])
def test_more_or_fewer_bytes_than_dtype_and_shape_need_are_refused(extra: int) -> None:
    with pytest.raises(ProtocolError, match=f"sent {12 + extra} bytes .* which needs 12"):
        open_inline(bytes(12 + extra), torch.float32, (3,))


def test_an_empty_tensor_with_bytes_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="needs 0"):
        open_inline(b"x", torch.uint8, (0, 3))


# The table of openers


def test_an_inline_tensor_belongs_to_no_segment() -> None:
    opened = open_tensor("inline", b"\x01\x02", "uint8", (2,), {})

    assert opened.tensor.tolist() == [1, 2]
    assert (opened.segment, opened.owner) == (None, None)


@pytest.mark.parametrize(
    ("placement", "payload", "dtype", "shape", "reason"),
    [
        ("telepathy", b"", "uint8", (0,), "the unknown placement 'telepathy'"),
        ("__class__", b"", "uint8", (0,), "the unknown placement"),
        ("inline", b"", "Tensor", (0,), "unknown dtype 'Tensor'"),
        ("inline", b"x", "uint8", (2,), "sent 1 bytes"),
        ("inline", b"", "uint8", (2**63 - 1, 2), "sent 0 bytes"),
        ("inline", b"", "float64", (2**60,), "sent 0 bytes"),
        ("inline", b"", "uint8", (0, 2**62, 2), "more than can be addressed"),
        ("arena", bytes(16), "uint8", (1,), "in segment 0, which it never attached"),
        ("arena", b"\xff" * 16, "uint8", (1,), "in segment 18446744073709551615, which it never attached"),
        ("arena", b"", "uint8", (1,), "invalid position of a tensor, of 0 bytes"),
    ],
)
def test_invalid_placements_payloads_dtypes_and_shapes_are_refused(
    placement: str, payload: bytes, dtype: str, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ProtocolError, match=reason):
        open_tensor(placement, payload, dtype, shape, {})


def test_an_empty_tensor_as_large_as_can_be_addressed_is_opened() -> None:
    opened = open_tensor("inline", b"", "uint8", (0, 2**62), {})

    assert opened.tensor.shape == (0, 2**62)


# The choice of a placement


@pytest.mark.parametrize("shape", [(MAX_INLINE_BYTES,), (0, 1 << 30), ()], ids=str)
def test_a_small_or_empty_tensor_is_placed_inline(shape: tuple[int, ...]) -> None:
    source = torch.empty(shape, dtype=torch.uint8)

    assert plan_placement(source, Allocations(print)) == Plan(0, None)


def test_the_size_of_an_expanded_tensor_includes_all_its_elements() -> None:
    source = torch.zeros(1, dtype=torch.uint8).expand(MAX_INLINE_BYTES + 1)

    assert plan_placement(source, Allocations(print)) == Plan(MAX_INLINE_BYTES + 1, None)
