"""Tensors whose bytes are sent in a frame, or in a separate buffer of a message."""

import ctypes
import math

import numpy as np
import torch

from aiotensor.errors import ProtocolError
from aiotensor.memory.gathering import gathered
from aiotensor.memory.raw import RawBytes, flat_bytes, is_addressable, new_bytes, new_tensor
from aiotensor.memory.source import Source, is_flat, memory_order
from aiotensor.memory.views import view_over

__all__ = ["MAX_INLINE_BYTES", "buffer_of", "bytes_of", "open_buffer", "open_inline"]

# Above this size, a copy into shared memory is cheaper than two copies through the socket.
MAX_INLINE_BYTES = 8 * 1024

_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def bytes_of(source: Source) -> bytes:
    """Return a copy of the values of a source, in the order of its memory if it is flat, else row-major."""
    # As `is_flat`, without a call.
    if (source.is_contiguous() or memory_order(source)) and not source.is_conj() and not source.is_neg():
        data: bytes = _bytes_at(source.data_ptr(), source.nbytes)  # twice as fast as through an array
        return data
    return gathered(source).tobytes()


def open_inline(payload: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with a copy of the bytes of a frame.

    Raises:
        ProtocolError: the number of bytes differs from the size of the tensor, or the shape is too large.
    """
    nbytes = len(payload)
    if not nbytes or nbytes != math.prod(shape) * dtype.itemsize:
        _check_size(nbytes, dtype, shape)
        return new_tensor(shape, dtype)
    return view_over(bytearray(payload), 0, dtype, shape)[0]


def buffer_of(source: Source) -> RawBytes:
    """Return the bytes of a source: its own memory if it is flat, else a copy in row-major order."""
    return flat_bytes(source) if is_flat(source) else gathered(source)


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
