import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.memory import copying
from aiotensor.memory.copying import Gathering, gathered
from aiotensor.memory.source import as_source
from aiotensor.memory.tensors import RawBytes, flat_bytes
from tests.memory.segments import random_tensor, tensor_of
from tests.selection import COMPLETE, DTYPES

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
VIEWS = ["transpose", "expand", "step", "narrow", "select"]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> RawBytes:
    return flat_bytes(random_tensor(shape, dtype, seed)).reshape(*shape, dtype.itemsize)


def joined(tensor: torch.Tensor) -> bytes:
    return gathered(tensor).tobytes()


def cut_small(patch: pytest.MonkeyPatch, box_bytes: int, few: int) -> None:
    """Let small tensors go through boxes as large ones do."""
    patch.setattr(copying, "_BOX_BYTES", box_bytes)
    patch.setattr(copying, "_FEW", few)


def view_both(
    tensor: torch.Tensor, array: RawBytes, view: str, data: st.DataObject
) -> tuple[torch.Tensor, RawBytes]:
    """Take the same view of a tensor and of the bytes that it was made of."""
    if view == "expand":
        times = data.draw(st.integers(0, 3))
        return tensor.unsqueeze(0).expand(times, *tensor.shape), np.broadcast_to(array, (times, *array.shape))
    if not tensor.dim():
        return tensor, array
    dim = data.draw(st.integers(0, tensor.dim() - 1))
    size = tensor.shape[dim]
    if view == "transpose":
        return tensor.transpose(0, dim), array.swapaxes(0, dim)
    index: slice | int
    if view == "step":
        index = slice(None, None, data.draw(st.integers(1, 3)))
    elif view == "narrow":
        index = slice(data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))
    elif size:
        index = data.draw(st.integers(0, size - 1))
    else:
        return tensor, array
    where = (slice(None),) * dim + (index,)
    return tensor[where], array[where]


@settings(max_examples=1000 if COMPLETE else 150)
@given(
    dtype=st.sampled_from(list(DTYPES.values())),
    shape=shapes,
    views=st.lists(st.sampled_from(VIEWS), max_size=3),
    data=st.data(),
)
def test_any_view_is_read_bit_for_bit_whatever_the_pieces(
    dtype: torch.dtype, shape: tuple[int, ...], views: list[str], data: st.DataObject
) -> None:
    expected = random_bytes(shape, dtype, seed=data.draw(st.integers(0, 9)))
    source = tensor_of(expected, dtype)
    for view in views:
        source, expected = view_both(source, expected, view, data)

    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch, data.draw(st.sampled_from([1, 7, 40, 1 << 20])), data.draw(st.integers(0, 3)))
        assert joined(source) == expected.tobytes()


def test_one_element_is_read_whatever_its_strides() -> None:
    for dtype in DTYPES.values():
        array = random_bytes((), dtype)
        for strides in ((7, 3), (0, 0)):
            assert joined(tensor_of(array, dtype).as_strided((1, 1), strides)) == array.tobytes()


VALUES_OF_A_VIEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conj": lambda tensor: tensor.conj(),
    "conj transposed": lambda tensor: tensor.conj().t(),
    "conj sliced": lambda tensor: tensor[1:, ::2].conj(),
    "conj of no dimension": lambda tensor: tensor.conj()[1, 2],
    "conj of one element": lambda tensor: tensor.conj()[1, ::4],
    "conj empty": lambda tensor: tensor.conj()[:0],
    "negative": lambda tensor: tensor.conj().imag,
    "negative transposed": lambda tensor: tensor.conj().imag.t(),
    "negative of no dimension": lambda tensor: tensor.conj().imag[1, 2],
    "negative of one element": lambda tensor: tensor.conj().imag[:1, :1],
}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugate_and_negative_views_are_read_as_the_values_that_they_show(dtype: torch.dtype) -> None:
    for size in (1, 24, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            cut_small(patch, size, 2)
            for name, view in VALUES_OF_A_VIEW.items():
                source = view(random_tensor((3, 4), dtype))
                assert source.is_conj() or source.is_neg()
                expected = source.resolve_conj().resolve_neg().contiguous()
                assert joined(source) == joined(expected), name
            if dtype != torch.complex32:  # whose negative torch cannot resolve
                source = torch._neg_view(random_tensor((3, 4), dtype).conj())
                assert joined(source) == joined(source.resolve_conj().resolve_neg())


def test_the_source_is_only_read_and_its_gradient_flag_stays() -> None:
    source = torch.arange(12.0).reshape(3, 4).requires_grad_()
    before = source.detach().clone()

    assert joined(source.t()) == before.t().contiguous().numpy().tobytes()
    assert torch.equal(source.detach(), before)
    assert source.requires_grad


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {  # and in which order the axes are looked at
    "a matrix": ((1234, 2345), (1, 0)),
    "a matrix of a power of two": ((1024, 4096), (1, 0)),
    "a wide matrix": ((3, 700_001), (1, 0)),
    "a tall matrix": ((700_001, 3), (1, 0)),
    "NHWC to NCHW": ((5, 240, 321, 3), (0, 3, 1, 2)),
    "NCHW to NHWC": ((5, 3, 240, 321), (0, 2, 3, 1)),
    "HWC, turned by a right angle": ((700, 1001, 3), (1, 0, 2)),
    "patches": ((2, 3, 17, 16, 19, 16), (0, 2, 4, 3, 5, 1)),
    "many small axes": ((2,) * 21, tuple(reversed(range(21)))),
    "features last": ((4, 64, 90, 91), (0, 2, 3, 1)),
}
SLICES: dict[str, tuple[Any, ...]] = {
    "whole": (),
    "reversed": (..., slice(None, None, -1)),
    "upside down": (slice(None, None, -1),),
    "every second": (slice(1, None, 2), ..., slice(None, None, 2)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_large_arrays_are_gathered_bit_for_bit(name: str) -> None:
    shape, order = SHAPES[name]
    count = int(np.prod(shape))
    for kind in ("u1", "u2", "u4", "u8", "c16") if COMPLETE else ("u2",):
        memory = np.random.default_rng(0).integers(0, 256, count * np.dtype(kind).itemsize, np.uint8)
        for cut in SLICES.values():
            array = memory.view(kind).reshape(shape).transpose(order)[cut]
            assert gathered(as_source(array)).tobytes() == array.tobytes()


def test_gathering_takes_a_bounded_number_of_bounded_steps() -> None:
    for shape, order in SHAPES.values():
        source = torch.empty(shape[0] * 20, *shape[1:], dtype=torch.float64).permute(order)
        boxes = Gathering(source, np.empty(source.nbytes, np.uint8)).boxes
        [extents, *_] = copying._merged(source.shape, [8 * stride for stride in source.stride()])
        sizes = [
            8
            * int(np.prod([len(range(*part.indices(size))) for part, size in zip(box, extents, strict=True)]))
            for box in boxes
        ]
        assert sum(sizes) == source.nbytes
        assert max(sizes) <= copying._BOX_BYTES
        assert len(sizes) <= 4 + 4 * source.nbytes / copying._BOX_BYTES


THREADS = """
import os, torch
torch.set_num_threads(4)
from aiotensor.codec import TensorEncoder
sources = [torch.empty(3000, 3000).t(), torch.empty(9, 3, 700, 700).permute(0, 2, 3, 1)]
sources.append(torch.empty(2000, 2000, dtype=torch.complex64).conj().t())
before = len(os.listdir("/proc/self/task"))
TensorEncoder().encode(sources)
assert len(os.listdir("/proc/self/task")) == before
"""


def test_gathering_starts_none_of_the_threads_of_torch() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.promise(7)
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64])
def test_a_conjugate_view_keeps_the_bits_of_signaling_nans(dtype: torch.dtype) -> None:
    kind, nan = (torch.int16, 0x7D01) if dtype is torch.complex32 else (torch.int32, 0x7FA00001)
    view = torch.tensor([nan, nan], dtype=kind).view(dtype).conj()
    values = gathered(view).view(f"u{kind.itemsize}")
    assert values.tolist() == [nan, nan | 1 << (8 * kind.itemsize - 1)]
