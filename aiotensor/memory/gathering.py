"""Gathering: copying the values of a source whose bytes are not in row-major order.

torch's `contiguous` starts a team of OpenMP threads, which spin after each copy and take cores from the event
loop, and it does not support negative strides. numpy copies any strides on the calling thread, without the
interpreter lock, but often in an order that is bad for the caches. This module therefore cuts a source into
boxes of a few megabytes, each copied with a few calls of numpy. Within a box, numpy copies tiles that fit
into the caches: a ufunc with ``order="C"`` visits the axes in the order of the arrays that it receives.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from aiotensor.memory.raw import ArrayMemory, RawBytes, new_bytes
from aiotensor.memory.source import Sendable, Source, as_source
from aiotensor.memory.views import view_over

__all__ = ["Gathering", "as_tensor", "gather", "gathered"]

Box: TypeAlias = tuple[slice, ...]
Array: TypeAlias = npt.NDArray[Any]

# Elements are copied as numbers of their size, which `np.positive` returns unchanged, bit for bit.
# `np.copyto` for each tile takes less processor time, but more time while another thread runs Python code.
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

# A source of at most this size stays in the cache regardless of the order.
_TILED_BYTES = 32 << 10

# Sizes of tiles, in elements.
_FEW = 16  # an axis with at most this many, such as the colors of a pixel, is not cut
_ENOUGH = 1 << 14  # for one tile
_SHORTEST_LOOP = 8  # with a shorter inner loop, tiles cost more than they save
_LONGEST_LOOP = 8192
_ROWS, _MIN_ROWS = 512, 32  # a tile of a transposition reads this many rows ...
_COLUMNS, _MIN_COLUMNS = 64, 16  # ... and this many elements of each, which is a cache line or more

# Addresses that differ by this period belong to the same set of the first-level cache, which has few lines.
_CACHE_PERIOD, _CACHE_LINE, _LINES_PER_SET = 4096, 64, 8


class _Tile(NamedTuple):
    """The extents of a tile along some axes, and the axis of the innermost loop."""

    extents: dict[int, int]
    inner: int


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
        self._tile = None if source.nbytes <= _TILED_BYTES else _tile(shape, strides, itemsize)
        self.boxes = _boxes(shape, self._tile, itemsize)

    def copy(self, box: Box) -> None:
        """Copy one box."""
        target, source = self._target[box], self._source[box]
        if self._tile is None:
            np.copyto(target, source)
        else:
            _copy_tiles(target, source, self._tile)
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
    return view_over(gathered(source).data, 0, source.dtype, source.shape).tensor


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


def _tile(shape: list[int], strides: list[int], itemsize: int) -> _Tile | None:
    """Choose tiles that read and write whole cache lines; None if the order of the target needs no tiles."""
    extents: dict[int, int] = {}
    volume = 1
    written = list(range(len(shape)))  # the last of them moves by the fewest bytes in the target
    read = sorted((axis for axis in written if strides[axis]), key=lambda axis: (abs(strides[axis]), -axis))
    while read and volume < _ENOUGH:
        last, nearest = written[-1], read[0]
        few = next((axis for axis in (last, nearest) if shape[axis] <= _FEW), None)
        if few is not None:
            extents[few] = shape[few]
            volume *= shape[few]
            written.remove(few)
            if few in read:
                read.remove(few)
            continue
        if last == nearest:
            if not extents:
                return None
            extents[last] = _LONGEST_LOOP
        else:
            extents[last] = _rows(strides[last])
            extents[nearest] = max(_COLUMNS * (2 if itemsize == 1 else 1) // volume, _MIN_COLUMNS)
        return _Tile(extents, last)
    if not extents:
        return None
    inner = max(extents, key=lambda axis: (extents[axis], axis))
    return _Tile(extents, inner) if extents[inner] >= _SHORTEST_LOOP else None


def _rows(stride: int) -> int:
    """Return the number of rows that a tile may span before its lines evict each other from the cache."""
    if not stride:
        return _ROWS
    sets = _CACHE_PERIOD // max(math.gcd(stride, _CACHE_PERIOD), _CACHE_LINE)
    return max(min(sets * _LINES_PER_SET, _ROWS), _MIN_ROWS)


def _boxes(shape: list[int], tile: _Tile | None, itemsize: int) -> list[Box]:
    """Cut all elements into boxes of whole tiles, and return the boxes in row-major order."""
    extents = [1] * len(shape)
    for axis, extent in (tile.extents if tile is not None else {}).items():
        extents[axis] = min(extent, shape[axis])
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


def _copy_tiles(target: Array, source: Array, tile: _Tile) -> None:
    """Copy tile by tile; the rest at the end of an axis is one more row of smaller tiles."""
    for axis, extent in tile.extents.items():
        size = target.shape[axis]
        left = size % extent
        if left and size > extent:
            for part, length in (slice(size - left), extent), (slice(size - left, size), left):
                where = (slice(None),) * axis + (part,)
                _copy_tiles(
                    target[where], source[where], tile._replace(extents={**tile.extents, axis: length})
                )
            return
    np.positive(_tiles(source, tile), out=_tiles(target, tile), order="C")


def _tiles(array: Array, tile: _Tile) -> Array:
    """Return a view of an array with its axes in the order of the tiles, and the innermost loop last."""
    outer: list[tuple[int, int]] = []
    within: list[tuple[int, int]] = []
    loop = (1, 0)
    for axis, (size, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
        extent = min(tile.extents.get(axis, 1), size)
        if size > extent:
            outer.append((size // extent, stride * extent))
        if axis == tile.inner:
            loop = (extent, stride)
        elif extent > 1:
            within.append((extent, stride))
    sizes, strides = zip(*outer, *within, loop, strict=True)
    return as_strided(array, sizes, strides)
