import threading
import warnings
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.placements import copying
from aiotensor.placements.copying import CopyAbandonedError, copy_exactly, new_tensor
from aiotensor.placements.dtypes import DTYPES

Raw = npt.NDArray[np.uint8]

dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
VIEWS = ["transpose", "expand", "step", "narrow", "select"]


def tensor_over(raw: Raw, dtype: torch.dtype) -> torch.Tensor:
    """Read an array of (*shape, bytes of an element) as a tensor of that shape."""
    return torch.from_numpy(raw.reshape(-1)).view(dtype).reshape(raw.shape[:-1])


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def random_raw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Raw:
    return np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)


def view_both(tensor: torch.Tensor, raw: Raw, view: str, data: st.DataObject) -> tuple[torch.Tensor, Raw]:
    """Take the same view of a tensor and of the bytes under it."""
    if view == "expand":
        times = data.draw(st.integers(0, 3))
        return tensor.unsqueeze(0).expand(times, *tensor.shape), np.broadcast_to(raw, (times, *raw.shape))
    if not tensor.dim():
        return tensor, raw
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[dim]
    if view == "transpose":
        return tensor.transpose(0, dim), raw.swapaxes(0, dim)
    index: slice | int
    if view == "step":
        index = slice(None, None, data.draw(st.integers(1, 3)))
    elif view == "narrow":
        index = slice(data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))
    elif size:
        index = data.draw(st.integers(0, size - 1))
    else:
        return tensor, raw
    where = (slice(None),) * dim + (index,)
    return tensor[where], raw[where]


@dtypes
@settings(max_examples=30, deadline=None)
@given(shape=shapes, views=st.lists(st.sampled_from(VIEWS), max_size=3), data=st.data())
def test_any_view_arrives_bit_for_bit_whatever_the_slabs(
    dtype: torch.dtype, shape: tuple[int, ...], views: list[str], data: st.DataObject
) -> None:
    raw = random_raw(shape, dtype, seed=data.draw(st.integers(0, 9)))
    source, expected = tensor_over(raw, dtype), raw
    for view in views:
        source, expected = view_both(source, expected, view, data)
    target = new_tensor(tuple(source.shape), dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_SLAB_BYTES", data.draw(st.sampled_from([1, 7, 16, 40, 1 << 20])))
        copy_exactly(source, target)

    assert bytes_of(target) == expected.tobytes()


@dtypes
def test_elements_in_reverse_order_keep_their_bits(dtype: torch.dtype) -> None:
    raw = random_raw((6, 4), dtype)
    reversed_raw = torch.from_numpy(raw).flip(0, 1)
    target = new_tensor((6, 4), dtype)

    copy_exactly(reversed_raw.reshape(-1).view(dtype).reshape(6, 4), target)

    assert bytes_of(target) == raw[::-1, ::-1].tobytes()


@pytest.mark.parametrize(
    ("dtype", "pattern"),
    [
        (torch.float16, 0x7D01),
        (torch.bfloat16, 0xFF81),
        (torch.float32, 0x7FA00001),
        (torch.float64, 0xFFF4000000000001),
    ],
    ids=str,
)
def test_a_signalling_nan_keeps_its_payload(dtype: torch.dtype, pattern: int) -> None:
    raw = np.frombuffer(pattern.to_bytes(dtype.itemsize, "little") * 100, np.uint8).reshape(10, 10, -1)
    source = tensor_over(raw.copy(), dtype)
    target = new_tensor((10, 10), dtype)

    copy_exactly(source.t(), target)

    assert bytes_of(target) == raw.tobytes()


VALUES_OF_A_VIEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conj": lambda tensor: tensor.conj(),
    "conj transposed": lambda tensor: tensor.conj().t(),
    "conj sliced": lambda tensor: tensor[1:, ::2].conj(),
    "conj of no dimension": lambda tensor: tensor.conj()[1, 2],
    "conj empty": lambda tensor: tensor.conj()[:0],
    "negative": lambda tensor: tensor.conj().imag,
    "negative transposed": lambda tensor: tensor.conj().imag.t(),
    "negative of no dimension": lambda tensor: tensor.conj().imag[1, 2],
}


@pytest.mark.parametrize("slab", [1, 24, 1 << 20])
@pytest.mark.parametrize("view", VALUES_OF_A_VIEW)
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_views_arrive_as_the_values_that_they_show(
    dtype: torch.dtype, view: str, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_SLAB_BYTES", slab)
    raw = random_raw((3, 4), dtype)
    source = VALUES_OF_A_VIEW[view](tensor_over(raw, dtype))
    assert source.is_conj() or source.is_neg()
    target = new_tensor(tuple(source.shape), source.dtype)

    copy_exactly(source, target)

    assert not target.is_conj()
    assert not target.is_neg()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ComplexHalf support is experimental", UserWarning)
        expected = source.resolve_conj().resolve_neg().contiguous()
    assert bytes_of(target) == bytes_of(expected)


def test_a_view_that_is_both_conjugate_and_negative_arrives_as_its_values() -> None:
    source = torch._neg_view(torch.randn(3, 4, dtype=torch.complex64).conj())
    target = torch.empty(3, 4, dtype=torch.complex64)

    copy_exactly(source, target)

    assert torch.equal(target, source.resolve_conj().resolve_neg())


def test_the_source_is_only_read_and_its_gradient_flag_stays() -> None:
    source = torch.arange(12.0).reshape(3, 4).requires_grad_()
    before = source.detach().clone()
    target = torch.empty(4, 3)

    copy_exactly(source.t(), target)

    assert torch.equal(source.detach(), before)
    assert source.requires_grad
    assert not target.requires_grad
    assert torch.equal(target, before.t())


class SetAfter(threading.Event):
    """An event that is found set when it was looked at so many times before."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("slabs", [0, 1, 3])
def test_an_abandoned_copy_stops_at_the_next_slab(slabs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_SLAB_BYTES", 20)  # two rows
    target = torch.zeros(8, 10, dtype=torch.uint8)

    with pytest.raises(CopyAbandonedError):
        copy_exactly(torch.ones(8, 10, dtype=torch.uint8), target, SetAfter(slabs))

    assert target.sum(dim=1).tolist() == [10] * 2 * slabs + [0] * (8 - 2 * slabs)


def test_a_copy_of_one_slab_is_abandoned_too_if_nobody_wants_it_before_it_begins() -> None:
    abandoned = threading.Event()
    abandoned.set()
    target = torch.zeros(3)

    with pytest.raises(CopyAbandonedError):
        copy_exactly(torch.ones(3), target, abandoned)

    assert torch.equal(target, torch.zeros(3))


def test_a_single_row_larger_than_a_slab_is_cut_further_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_SLAB_BYTES", 16)
    target = torch.zeros(1, 1, 64, dtype=torch.uint8)

    with pytest.raises(CopyAbandonedError):
        copy_exactly(torch.ones(1, 1, 64, dtype=torch.uint8), target, SetAfter(2))

    assert int(target.sum()) == 32


@pytest.mark.parametrize("more", [-1, 0, 1], ids=["below", "at", "above"])
def test_the_edge_of_a_slab_shows_in_no_byte(more: int) -> None:
    rows = copying._SLAB_BYTES // 4096 + more
    source = torch.arange(rows * 1024, dtype=torch.int32).reshape(rows, 1024)
    target = torch.zeros_like(source)

    copy_exactly(source, target)

    assert torch.equal(target, source)


def test_a_copy_that_is_wanted_to_the_end_is_complete() -> None:
    target = torch.zeros(3)

    copy_exactly(torch.ones(3), target, threading.Event())

    assert torch.equal(target, torch.ones(3))


@dtypes
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (0, 5, 2)], ids=str)
def test_a_new_tensor_is_made_without_a_warning(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = new_tensor(shape, dtype)

    assert tensor.dtype is dtype
    assert tuple(tensor.shape) == shape
    assert tensor.is_contiguous()
