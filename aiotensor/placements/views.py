"""Tensors over memory that is not their own, and the notice of their end."""

import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Owner", "View", "Watch", "view_over", "watch"]

# What torch keeps until the storage of a view is freed.
Owner = npt.NDArray[Any]

# The dtypes that numpy knows too. Through an array a tensor has its shape at once; a second step, to give
# it a shape or a dtype, takes as long as the first.
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    dtype: torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
}


_NUMPY_DIMENSIONS = 32  # of an array at most, in numpy 1


class View(msgspec.Struct, frozen=True):
    """A tensor, and the object that lives exactly as long as the tensor's storage."""

    tensor: torch.Tensor
    owner: Owner


def view_over(
    buffer: memoryview | bytearray, offset: int, dtype: torch.dtype, shape: tuple[int, ...], nbytes: int
) -> View:
    """Return a tensor over a writable buffer, which lives at least as long.

    Args:
        buffer: the memory.
        offset: where in it the tensor begins, in bytes.
        dtype: of its elements.
        shape: in elements.
        nbytes: of all of them; not 0.
    """
    known = _NUMPY.get(dtype)
    if known is not None and len(shape) <= _NUMPY_DIMENSIONS:
        owner = np.ndarray(shape, known, buffer, offset)
        return View(torch.from_numpy(owner), owner)
    owner = np.ndarray(nbytes, np.uint8, buffer, offset)
    return View(torch.from_numpy(owner).view(dtype).view(shape), owner)


class Watch(weakref.ref[Owner]):
    """What notices the end of a view's storage; a plain finalizer costs ten times as much."""

    __slots__ = ("number",)

    number: int


def watch(owner: Owner, callback: Callable[[Watch], object], number: int) -> Watch:
    """Call back when a view's storage is freed; in any thread, perhaps inside the garbage collector.

    Args:
        owner: of the view.
        callback: called with the watch, if that was kept until then.
        number: for the watch to carry.
    """
    one = Watch(owner, callback)
    one.number = number
    return one
