"""Tensors over memory that they do not own, and the end of their storage."""

import math
import weakref
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import Parameter

from aiotensor.errors import ProtocolError
from aiotensor.memory.raw import flat_bytes, new_tensor
from aiotensor.protocol.frames import Attributes

__all__ = ["Owner", "View", "Watch", "own_copy", "tensor_over", "view_over", "with_attributes"]

# The array that torch keeps alive until the storage of a view is freed.
Owner = npt.NDArray[Any]

# The dtypes that numpy has, too. Their tensors get the dtype and the shape from the array, because each
# further view takes as long as the first.
_NAMES = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {getattr(torch, name): np.dtype(name) for name in _NAMES.split()}

_NUMPY_DIMENSIONS = 32  # the most dimensions of an array in numpy 1


# A tensor, and the object with the same lifetime as its storage. A named tuple would cost a call.
View: TypeAlias = tuple[torch.Tensor, Owner]


def view_over(
    buffer: memoryview | bytearray, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> View:
    """Return a tensor of at least one byte over a writable buffer at an offset; it keeps the buffer alive.

    It is never an inference tensor, nor a view made without gradients: a task that waits inside
    `torch.inference_mode` or `torch.no_grad` leaves that mode on for all other tasks of its thread, and
    tensors made in it would keep its properties.
    """
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return view_over(buffer, offset, dtype, shape)
    known = _NUMPY.get(dtype)
    if known is not None and len(shape) <= _NUMPY_DIMENSIONS:
        owner = np.ndarray(shape, known, buffer, offset)
        return torch.from_numpy(owner), owner
    owner = np.ndarray(math.prod(shape) * dtype.itemsize, np.uint8, buffer, offset)
    with torch.enable_grad():
        return torch.from_numpy(owner).view(dtype).view(shape), owner


def tensor_over(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor over the memory of a writable array; never an inference tensor, as in `view_over`."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            return torch.from_numpy(array)
    return torch.from_numpy(array)


class Watch(weakref.ref[Owner]):
    """A weak reference that detects the end of the storage of a view; ten times as fast as a finalizer.

    Its callback is called with the watch when the storage is freed, in any thread, perhaps by the garbage
    collector. It is not called after the watch itself was freed.

    Attributes:
        number: set by the creator, to identify the storage in the callback.
    """

    __slots__ = ("number",)

    number: int


def with_attributes(tensor: torch.Tensor, attributes: Attributes) -> torch.Tensor:
    """Return a received tensor with its attributes; the argument is in row-major order.

    Raises:
        ProtocolError: the order does not contain each dimension once, or a tensor of this dtype cannot
            require a gradient.
    """
    requires_grad, order = attributes.requires_grad, attributes.order
    if order:
        if sorted(order) != list(range(tensor.dim())):
            raise ProtocolError(f"the peer sent a tensor of {tensor.dim()} dimensions in the order {order}")
        strides, stride = [0] * len(order), 1
        for dimension in reversed(order):
            strides[dimension] = stride
            stride *= tensor.shape[dimension]
        tensor.as_strided_(tensor.shape, strides)  # a new view would not be independent of the current modes
    if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ProtocolError(f"the peer sent a tensor of {tensor.dtype} that requires a gradient")
    if attributes.is_parameter:
        return Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad)


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a received tensor on this thread, with its attributes for autograd.

    Raises:
        OSError: no memory is left.
    """
    copy = new_tensor((tensor.numel(),), tensor.dtype)
    np.copyto(flat_bytes(copy), flat_bytes(tensor))  # torch would start several threads
    attributes = Attributes(tensor.requires_grad, isinstance(tensor, Parameter))
    return with_attributes(copy.as_strided_(tensor.shape, tensor.stride()), attributes)
