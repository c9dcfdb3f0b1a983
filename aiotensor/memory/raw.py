"""The bytes of contiguous tensors, and uninitialized memory."""

import errno
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["ArrayMemory", "RawBytes", "copy_of", "flat_bytes", "is_addressable", "new_bytes", "new_tensor"]

RawBytes = npt.NDArray[np.uint8]

_RAW_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class ArrayMemory:
    """Memory that numpy can view; arrays over this object keep it alive, and with it the owner.

    Args:
        owner: the object that the memory belongs to.
        interface: the fields of the array interface of numpy.
    """

    def __init__(self, owner: object, interface: Mapping[str, Any]) -> None:
        self._owner = owner
        self.__array_interface__ = {"version": 3, **interface}


def flat_bytes(tensor: torch.Tensor) -> RawBytes:
    """Return a view of the bytes of a flat tensor; see `is_flat`."""
    plain = tensor.detach().view(_RAW_DTYPE[tensor.element_size()])
    # Not `reshape`, which keeps unsuitable strides of a tensor with one element or none.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


def is_addressable(shape: Sequence[int], itemsize: int) -> bool:
    """Return whether torch can compute the strides of a tensor, even of an empty one."""
    numel = math.prod(shape) or math.prod(size for size in shape if size)
    return numel * itemsize < 2**63


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a flat tensor with its strides on this thread; torch would start several threads.

    Raises:
        OSError: no memory is left.
    """
    copy = new_tensor((tensor.numel(),), tensor.dtype)
    np.copyto(flat_bytes(copy), flat_bytes(tensor))
    return copy.as_strided_(tensor.shape, tensor.stride())


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor on the CPU, without the warnings of torch about some dtypes.

    It is never an inference tensor, for the same reason as in `view_over`.

    Raises:
        OSError: no memory is left.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return new_tensor(shape, dtype)
    try:
        return torch.empty(shape, dtype=_RAW_DTYPE[dtype.itemsize], device="cpu").view(dtype)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch has no class for this error
            raise
        raise _out_of_memory(math.prod(shape) * dtype.itemsize) from error


def new_bytes(nbytes: int) -> RawBytes:
    """Return an uninitialized array of bytes.

    Raises:
        OSError: no memory is left.
    """
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError as error:
        raise _out_of_memory(nbytes) from error


def _out_of_memory(nbytes: int) -> OSError:
    return OSError(errno.ENOMEM, f"{nbytes} bytes of memory cannot be allocated")
