"""Tensors as bytes: those that lie in row-major order, and new ones."""

import errno
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["RawBytes", "copy_of", "flat_bytes", "is_addressable", "new_bytes", "new_tensor"]

RawBytes = npt.NDArray[np.uint8]

_RAW_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def flat_bytes(tensor: torch.Tensor) -> RawBytes:
    """Return the bytes of a contiguous tensor, neither conjugate nor negative, as they lie in memory."""
    plain = tensor.detach().view(_RAW_DTYPE[tensor.element_size()])
    # Not reshape: where there is one element, or none, it keeps strides that cannot be seen as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


def is_addressable(shape: Sequence[int], itemsize: int) -> bool:
    """Return whether torch can compute the strides of a tensor, which also an empty one has."""
    numel = math.prod(shape) or math.prod(size for size in shape if size)
    return numel * itemsize < 2**63


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous tensor on this thread alone; torch would start a team of threads for it.

    Raises:
        OSError: no memory is left.
    """
    copy = new_tensor(tuple(tensor.shape), tensor.dtype)
    raw = _RAW_DTYPE[tensor.element_size()]
    np.copyto(copy.view(raw).numpy(), tensor.detach().view(raw).numpy())
    return copy


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialized tensor on the CPU, also of the dtypes that torch makes only with a warning.

    It is never an inference tensor: a task that waits inside `torch.inference_mode` leaves that mode on for
    all other tasks of its thread, and tensors made in it would stay so.

    Raises:
        OSError: no memory is left.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return new_tensor(shape, dtype)
    try:
        return torch.empty(shape, dtype=_RAW_DTYPE[dtype.itemsize], device="cpu").view(dtype)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch has no type for it
            raise
        raise _out_of_memory(math.prod(shape) * dtype.itemsize) from error


def new_bytes(nbytes: int) -> RawBytes:
    """Make an array of bytes that are not initialized.

    Raises:
        OSError: no memory is left.
    """
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError as error:
        raise _out_of_memory(nbytes) from error


def _out_of_memory(nbytes: int) -> OSError:
    return OSError(errno.ENOMEM, f"{nbytes} bytes of memory cannot be allocated")
