"""Tensors over memory that is not their own, and the notice of their end."""

import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Owner", "View", "Watch", "tensor_over", "view_over", "watch_storage"]

# What torch keeps until the storage of a view is freed.
Owner = npt.NDArray[Any]

# The dtypes that numpy knows too. Through an array a tensor has its shape at once; a second step, to give
# it a shape or a dtype, takes as long as the first.
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
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

    It is never an inference tensor, nor a view made without gradients: a task that waits inside
    `torch.inference_mode` or `torch.no_grad` leaves that mode on for all other tasks of its thread, and
    tensors made in it would stay so.

    Args:
        buffer: the memory.
        offset: where in it the tensor begins, in bytes.
        dtype: of its elements.
        shape: in elements.
        nbytes: of all of them; not 0.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return view_over(buffer, offset, dtype, shape, nbytes)
    known = _NUMPY.get(dtype)
    if known is not None and len(shape) <= _NUMPY_DIMENSIONS:
        owner = np.ndarray(shape, known, buffer, offset)
        return View(torch.from_numpy(owner), owner)
    owner = np.ndarray(nbytes, np.uint8, buffer, offset)
    with torch.enable_grad():
        return View(torch.from_numpy(owner).view(dtype).view(shape), owner)


def tensor_over(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor over the memory of a writable array; not an inference tensor, either."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return torch.from_numpy(array)
    return torch.from_numpy(array)


class Watch(weakref.ref[Owner]):
    """What notices the end of a view's storage; a plain finalizer costs ten times as much."""

    __slots__ = ("number",)

    number: int


def watch_storage(owner: Owner, callback: Callable[[Watch], object], number: int) -> Watch:
    """Call back when a view's storage is freed; in any thread, perhaps inside the garbage collector.

    Args:
        owner: of the view.
        callback: called with the watch, if that was kept until then.
        number: for the watch to carry.
    """
    one = Watch(owner, callback)
    one.number = number
    return one
