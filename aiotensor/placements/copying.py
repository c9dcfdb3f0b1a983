"""Copying the bytes of a tensor, exactly, and in slabs so that a copy can be given up half way."""

import threading
from collections.abc import Iterator

import torch

__all__ = ["CopyAbandonedError", "copy_exactly", "new_tensor"]

# Small enough that giving up is quick (a slab of fresh shared memory takes some 10 ms), large enough
# that the checks between slabs cost nothing.
_SLAB_BYTES = 8 << 20

_RAW_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class CopyAbandonedError(Exception):
    """Nobody wants the copy any more."""


def copy_exactly(
    source: torch.Tensor, target: torch.Tensor, abandoned: threading.Event | None = None
) -> None:
    """Copy the values of `source` into `target`, bit for bit.

    Args:
        source: a dense tensor of any strides, conjugate and negative views included; only read.
        target: a contiguous tensor of the same shape and dtype.
        abandoned: looked at between slabs.

    Raises:
        CopyAbandonedError: `abandoned` was set before the copy was complete.
    """
    source = source.detach()
    if not source.is_conj() and not source.is_neg():
        # As raw bytes, since torch has no copy for its narrowest dtypes and warns of some others.
        raw = _RAW_DTYPE[source.element_size()]
        source, target = source.view(raw), target.view(raw)
    for part, place in _slabs(source, target):
        if abandoned is not None and abandoned.is_set():
            raise CopyAbandonedError
        place.copy_(part)


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialized tensor, also of the dtypes that torch makes only with a warning."""
    return torch.empty(shape, dtype=_RAW_DTYPE[dtype.itemsize]).view(dtype)


def _slabs(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Cut both along the outermost dimension, and further in where one row is more than a slab."""
    rows = source.shape[0] if source.dim() else 0
    if target.nbytes <= _SLAB_BYTES or rows == 0:
        yield source, target
        return
    step = max(1, _SLAB_BYTES * rows // target.nbytes)
    if step == 1:
        for row in range(rows):
            yield from _slabs(source[row], target[row])
        return
    for row in range(0, rows, step):
        yield source[row : row + step], target[row : row + step]
