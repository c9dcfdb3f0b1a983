"""Gathering: copying the values of a source whose bytes are not in row-major order.

torch's `contiguous` starts a team of OpenMP threads, which spin after each copy and take cores from the event
loop, and it does not support negative strides. numpy copies any strides on the calling thread, without the
interpreter lock. This module therefore cuts a source into boxes of a few megabytes, each copied with a few
calls of numpy.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aiotensor.memory.raw import ArrayMemory, RawBytes, new_bytes
from aiotensor.memory.source import Sendable, Source, as_source
from aiotensor.memory.views import view_over

__all__ = ["Gathering", "as_tensor", "gather", "gathered"]

Box: TypeAlias = tuple[slice, ...]
Array: TypeAlias = npt.NDArray[Any]

# Elements are copied as numbers of their size, bit for bit.
_RAW: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

# The dtypes whose negative and conjugate views differ from their memory only in sign bits, and the types of
# the numbers with one sign bit. A complex number consists of two of them.
_SIGNED: dict[torch.dtype, npt.DTypeLike] = {
    torch.float16: np.uint16,
    torch.bfloat16: np.uint16,
    torch.float32: np.uint32,
    torch.float64: np.uint64,
    torch.complex32: np.uint16,
    torch.complex64: np.uint32,
    torch.complex128: np.uint64,
}

# Copying a box takes a few milliseconds, so an abandoned copy stops soon, and the interpreter lock, which may
# take long to acquire, is rarely needed.
_BOX_BYTES = 8 << 20

# If the last axis has at most this many elements, such as the colors of a pixel, they are copied one by one,
# as numpy is slow with short inner loops: images with reversed colors take a seventh of the time.
_FEW = 16


class Gathering:
    """Copy a source into row-major order, in boxes that several threads may share.

    Conjugate and negative views are copied as the values that they show. The source is only read.

    Args:
        source: the source, with at least one element.
        target: memory of the size of the source.

    Attributes:
        boxes: the boxes; call `copy` once with each of them.
    """

    def __init__(self, source: Source, target: RawBytes) -> None:
        itemsize = source.dtype.itemsize
        if isinstance(source, torch.Tensor):
            if source.is_neg() and source.dtype not in _SIGNED:
                source = source.resolve_neg()  # of integers: only torch's own tests make such views
            byte_strides = [stride * itemsize for stride in source.stride()]
        else:
            byte_strides = list(source.array.strides)
        shape, strides = _merged(source.shape, byte_strides)
        raw = np.dtype(_RAW[itemsize])
        interface = {
            "data": (source.data_ptr(), True),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": raw.str,
        }
        self._source = np.asarray(ArrayMemory(source, interface))
        self._target = target.view(raw).reshape(shape)
        self._signs: Array | None = None  # the numbers in the target whose signs must be inverted
        if source.is_conj() or source.is_neg():
            self._signs = _signs(source, target, shape)
        self.boxes = _boxes(shape, itemsize)

    def copy(self, box: Box) -> None:
        """Copy one box."""
        target, source = self._target[box], self._source[box]
        if target.ndim > 1 and target.shape[-1] <= _FEW:
            for index in range(target.shape[-1]):
                np.copyto(target[..., index], source[..., index])
        else:
            np.copyto(target, source)
        if self._signs is not None:
            signs = self._signs[box]
            np.bitwise_xor(signs, signs.dtype.type(1 << (8 * signs.itemsize - 1)), out=signs)


def gather(source: Source, target: RawBytes) -> None:
    """Copy a source of any size into memory of that size, in row-major order, on this thread."""
    if source.nbytes:
        gathering = Gathering(source, target)
        for box in gathering.boxes:
            gathering.copy(box)


def gathered(source: Source) -> RawBytes:
    """Return the bytes of a source in row-major order, in new memory.

    Raises:
        OSError: no memory is left.
    """
    target = new_bytes(source.nbytes)
    gather(source, target)
    return target


def as_tensor(value: Sendable) -> torch.Tensor:
    """Return a tensor over the memory of a value, or over a copy if torch cannot view that memory.

    Errors are those of `as_source`.
    """
    source = as_source(value)
    if isinstance(source, torch.Tensor):
        return source
    return view_over(gathered(source).data, 0, source.dtype, source.shape)[0]


def _merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[int], list[int]]:
    """Merge axes, so that as few as possible describe the same elements in the same order."""
    sizes, steps = [1], [0]
    for size, step in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if sizes[-1] == 1 or steps[-1] == step * size:
            sizes[-1] *= size
            steps[-1] = step
        else:
            sizes.append(size)
            steps.append(step)
    return sizes, steps


def _signs(source: Source, target: RawBytes, shape: list[int]) -> Array:
    """Return the numbers of the target whose signs differ between the memory of a view and its values."""
    numbers = target.view(_SIGNED[source.dtype])
    if not source.dtype.is_complex:
        return numbers.reshape(shape)
    parts = numbers.reshape(*shape, 2)
    if not source.is_conj():
        return parts
    return parts[..., 0] if source.is_neg() else parts[..., 1]


def _boxes(shape: list[int], itemsize: int) -> list[Box]:
    """Cut all elements into boxes, and return the boxes in row-major order."""
    extents = [1] * len(shape)
    for axis in reversed(range(len(shape))):
        fits = _BOX_BYTES // (math.prod(extents) * itemsize)
        if fits <= 1:
            break
        extents[axis] = min(extents[axis] * fits, shape[axis])
    ranges = [range(0, size, extent) for size, extent in zip(shape, extents, strict=True)]
    return [
        tuple(slice(start, start + extent) for start, extent in zip(starts, extents, strict=True))
        for starts in product(*ranges)
    ]
