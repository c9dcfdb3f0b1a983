"""Copies of the values of a source: into shared memory, into a frame, and into row-major order.

torch's `contiguous` starts a team of OpenMP threads, which spin after each copy and take cores from the event
loop, and it does not support negative strides. numpy copies any strides on the calling thread, without the
interpreter lock. A source whose bytes are not in row-major order is therefore *gathered*: cut into boxes of a
few megabytes, each copied with a few calls of numpy.
"""

import contextlib
import ctypes
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aiotensor.memory.arena import Extent
from aiotensor.memory.source import Sendable, Source, as_source, is_flat, memory_order
from aiotensor.memory.tensors import ArrayMemory, RawBytes, flat_bytes, new_bytes, view_over

# Copying this much into warm memory takes less time than waking a thread and being woken by it: a twentieth
# of a millisecond, or a tenth on a slow machine, which is acceptable on the event loop.
QUICK_BYTES = 1 << 20

# From this size on, two threads are faster than one. Below it, the second thread starts too late to help.
_SHARED_COPY_BYTES = 4 << 20

# A flat source is copied in steps. They are small enough for an abandoned copy to stop soon, but few, since a
# thread waits for the interpreter lock after each of them. They get smaller towards the end, so that two
# threads finish at about the same time.
_LONGEST_STEP_BYTES = 8 << 20
_SHORTEST_STEP_BYTES = 1 << 20


class CopyAbandonedError(Exception):
    """The copy was stopped, because it is no longer needed."""


def copy_now(source: Source, place: Extent) -> None:
    """Copy a small source into warm memory, on this thread.

    Raises:
        CopyAbandonedError: the segment was closed.
    """
    memory = place.segment.memory  # keeps it mapped during the copy
    if not memory:
        raise CopyAbandonedError
    if is_flat(source):
        ctypes.memmove(place.segment.address + place.offset, source.data_ptr(), source.nbytes)
    else:
        gather(source, _target(source, place))


def copy_in_threads(
    source: Source, place: Extent, is_abandoned: Callable[[], bool], helper: Executor
) -> None:
    """Copy a source of any size on this thread and, if it is large, on another one, too.

    Args:
        source: the tensor or array.
        place: the block to copy to, which has memory.
        is_abandoned: returns whether to stop; called between steps of a few megabytes.
        helper: runs a part of the steps.

    Raises:
        CopyAbandonedError: the segment was closed, or `is_abandoned` has returned True before the copy was
            complete.
    """
    memory = place.segment.memory  # keeps it mapped during the copy
    if not memory:
        raise CopyAbandonedError
    steps = deque(_copy_steps(source, place))  # both threads take steps from it; `popleft` is thread-safe

    def share() -> None:
        while not is_abandoned():
            try:
                step = steps.popleft()
            except IndexError:
                return
            step()

    other: Future[None] | None = None
    if source.nbytes >= _SHARED_COPY_BYTES:
        # If no thread can be started, the queued call runs before the next copy, when no steps are left.
        with contextlib.suppress(RuntimeError):
            other = helper.submit(share)
    try:
        share()
    finally:
        # Cancelling succeeds if the helper is still busy with another copy.
        if other is not None and not other.cancel():
            other.result()
        steps.clear()  # a share that is still queued must not keep the source alive
    if is_abandoned():
        raise CopyAbandonedError


def _copy_steps(source: Source, place: Extent) -> list[Callable[[], object]]:
    if not is_flat(source):
        gathering = Gathering(source, _target(source, place))
        return [partial(gathering.copy, box) for box in gathering.boxes]
    # The steps have only addresses: the caller keeps the memory alive.
    there, here = place.segment.address + place.offset, source.data_ptr()
    return [
        partial(ctypes.memmove, there + start, here + start, length)
        for start, length in _steps(source.nbytes)
    ]


def _steps(nbytes: int) -> list[tuple[int, int]]:
    """Divide a range into steps of (start, length), each a quarter of the rest, within limits."""
    steps, start = [], 0
    while start < nbytes:
        left = nbytes - start
        length = min(max(left // 4, _SHORTEST_STEP_BYTES), _LONGEST_STEP_BYTES, left)
        steps.append((start, length))
        start += length
    return steps


def _target(source: Source, place: Extent) -> RawBytes:
    return np.frombuffer(place.view(), np.uint8, source.nbytes)  # blocks may be rounded up to pages


Box: TypeAlias = tuple[slice, ...]
Array: TypeAlias = npt.NDArray[Any]

# Elements are copied as numbers of their size, bit for bit.
_RAW: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

# The dtypes whose negative and conjugate views differ from their memory only in sign bits, and the types of
# the numbers with one sign bit. A complex number consists of two of them. Computing the values instead would
# change the bits of signaling NaNs.
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
        raw = np.dtype(_RAW[itemsize])
        if isinstance(source, torch.Tensor):
            if source.is_neg() and source.dtype not in _SIGNED:
                source = source.resolve_neg()  # of integers: only torch's own tests make such views
            byte_strides = [stride * itemsize for stride in source.stride()]
        else:
            byte_strides = list(source.array.strides)
        shape, strides = _merged(source.shape, byte_strides)
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


# Copies a number of bytes from an address; twice as fast as through an array.
bytes_at: Callable[[int, int], bytes] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t
)(("PyBytes_FromStringAndSize", ctypes.pythonapi))


def bytes_of(source: Source) -> bytes:
    """Return a copy of the values of a source, in the order of its memory if it is flat, else row-major."""
    # As `is_flat`, without a call.
    if (source.is_contiguous() or memory_order(source)) and not source.is_conj() and not source.is_neg():
        return bytes_at(source.data_ptr(), source.nbytes)
    return gathered(source).tobytes()


def buffer_of(source: Source) -> RawBytes:
    """Return the bytes of a source: its own memory if it is flat, else a copy in row-major order."""
    return flat_bytes(source) if is_flat(source) else gathered(source)
