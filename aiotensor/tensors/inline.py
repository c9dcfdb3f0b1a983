"""Small tensors ride in the frame itself: no shared memory, no descriptor, nothing to give back."""

import ctypes
import math

import torch

from aiotensor.errors import ProtocolError
from aiotensor.tensors.gathering import gathered
from aiotensor.tensors.raw import is_addressable, new_tensor
from aiotensor.tensors.source import Source
from aiotensor.tensors.views import view_over

__all__ = ["MAX_INLINE_BYTES", "bytes_of", "check_size", "open_inline"]

# Above this a copy into shared memory is cheaper than two copies through the socket.
MAX_INLINE_BYTES = 8 * 1024


def bytes_of(source: Source) -> bytes:
    """Return the bytes of a source's values, in row-major order."""
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        return ctypes.string_at(source.data_ptr(), source.nbytes)  # half the time of any array's
    return gathered(source).tobytes()


def open_inline(payload: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with memory of its own from the bytes of a frame.

    Raises:
        ProtocolError: the bytes are not as many as dtype and shape need, or there can be no such shape.
    """
    needed = check_size(len(payload), dtype, shape)
    if not needed:
        return new_tensor(shape, dtype)
    return view_over(bytearray(payload), 0, dtype, shape, needed).tensor


def check_size(nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor needs, which has to be what a peer sent for it.

    Raises:
        ProtocolError: it is not, or there can be no such shape.
    """
    needed = math.prod(shape) * dtype.itemsize
    if nbytes != needed:
        raise ProtocolError(
            f"the peer sent {nbytes} bytes for a tensor of {dtype} and shape {shape}, which needs {needed}"
        )
    if not needed and not is_addressable(shape, dtype.itemsize):
        raise ProtocolError(f"the peer sent a tensor of shape {shape}, which is more than can be addressed")
    return needed
