"""The sizes of tensors to allocate, and the errors for tensors that can never be sent."""

import math
import operator
import sys
from collections.abc import Sequence

import torch

from aiotensor.errors import TooLargeError, UnsupportedTensorError
from aiotensor.memory.dtypes import DTYPE_NAMES
from aiotensor.memory.raw import is_addressable, new_tensor

__all__ = ["new_empty", "sizes_of", "too_large"]


def sizes_of(shape: Sequence[int], dtype: torch.dtype, limit: int) -> tuple[tuple[int, ...], int]:
    """Return the sizes of a tensor to allocate in elements, and its size in bytes.

    Args:
        shape: the sizes of the tensor's dimensions, in elements.
        dtype: the type of the tensor's elements.
        limit: the maximum size of the tensor in bytes.

    Raises:
        TypeError: the dtype is not a torch dtype.
        UnsupportedTensorError: a tensor of this dtype cannot be sent.
        ValueError: a size is negative.
        TooLargeError: the tensor would have more bytes than `limit`.
    """
    sizes = tuple(map(operator.index, shape))
    if min(sizes, default=0) < 0:
        raise ValueError(f"the sizes of a shape must not be negative, got {sizes}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.uint8, got {dtype!r}")
    if dtype not in DTYPE_NAMES:
        raise UnsupportedTensorError(f"a tensor of {dtype} cannot be sent: allocate torch.uint8 and view it")
    nbytes = math.prod(sizes) * dtype.itemsize
    if nbytes > limit:
        raise too_large(nbytes, limit)
    return sizes, nbytes


def new_empty(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without elements.

    Raises:
        TooLargeError: the strides of the tensor cannot be computed.
    """
    if not is_addressable(sizes, dtype.itemsize):
        raise TooLargeError(
            f"an empty tensor of shape {sizes} has strides that cannot be computed: choose smaller sizes",
            limit=sys.maxsize,
            requested=math.prod(size for size in sizes if size) * dtype.itemsize,
        )
    return new_tensor(sizes, dtype)


def too_large(nbytes: int, limit: int) -> TooLargeError:
    """Return the error for a tensor that never fits into the arena."""
    return TooLargeError(
        f"{nbytes} bytes can never fit into arena_bytes={limit}: send smaller parts, or raise arena_bytes",
        limit=limit,
        requested=nbytes,
    )
