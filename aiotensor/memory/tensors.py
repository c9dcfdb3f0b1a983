"""Tensors as bytes: the dtypes that can be sent, uninitialized memory, and tensors over memory of others."""

import errno
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import Parameter

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import Attributes

# The names of dtypes; one that a peer sent is looked up only here.
_NAMES = """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64
    float16 bfloat16 float32 float64 complex32 complex64 complex128
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
    int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7
    bits8 bits16 bits1x8 bits2x4 bits4x2
"""

# Older releases of torch lack some of the newest names.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

RawBytes = npt.NDArray[np.uint8]

_RAW_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype with the name that a peer sent.

    Raises:
        ProtocolError: no dtype that can be sent has this name.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise unknown_dtype(name)
    return dtype


def unknown_dtype(name: str) -> ProtocolError:
    """Return the error for a dtype name from a peer that is not in `DTYPES`."""
    return ProtocolError(f"the peer sent a tensor of unknown dtype {name[:64]!r}")


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


# The array that torch keeps alive until the storage of a view is freed.
Owner = npt.NDArray[Any]

# The dtypes that numpy has, too. Their tensors get the dtype and the shape from the array, because each
# further view takes as long as the first.
_IN_NUMPY = "bool uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128"
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name) for name in _IN_NUMPY.split()
}

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


# Above this size, a copy into shared memory is cheaper than two copies through the socket.
MAX_INLINE_BYTES = 8 * 1024


def open_empty(nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor without bytes, or raise the error for a wrong number of bytes.

    Raises:
        ProtocolError: the number of bytes differs from the size of the tensor, or the shape is too large.
    """
    _check_size(nbytes, dtype, shape)
    return new_tensor(shape, dtype)


def open_buffer(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a writable tensor over a buffer, and keep the buffer alive.

    The tensor is a copy if the buffer is read-only, or not aligned for the dtype.

    Raises:
        ProtocolError: the number of bytes differs from the size of the tensor, or the shape is too large.
        OSError: no memory is left for a copy.
    """
    needed = _check_size(buffer.nbytes, dtype, shape)
    if not needed:
        return new_tensor(shape, dtype)
    flat = np.frombuffer(buffer, np.uint8)
    if buffer.readonly or flat.__array_interface__["data"][0] % dtype.itemsize:
        copy = new_bytes(needed)
        np.copyto(copy, flat)
        flat = copy
    return view_over(flat.data, 0, dtype, shape)[0]


def _check_size(nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Check that a peer sent as many bytes as a tensor needs, and return that number."""
    needed = math.prod(shape) * dtype.itemsize
    if nbytes != needed:
        raise ProtocolError(
            f"the peer sent {nbytes} bytes for a tensor of {dtype} and shape {shape}, which needs {needed}"
        )
    if not needed and not is_addressable(shape, dtype.itemsize):
        raise ProtocolError(f"the peer sent a tensor of shape {shape}, which is more than can be addressed")
    return needed
