"""Small tensors ride in the frame itself: no shared memory, no descriptor, nothing to give back."""

import math

import torch

from aiotensor.errors import ProtocolError
from aiotensor.placements.raw import new_tensor, pieces

__all__ = ["MAX_INLINE_BYTES", "bytes_of", "open_inline"]

# Above this a copy into shared memory is cheaper than two copies through the socket.
MAX_INLINE_BYTES = 8 * 1024

# The dtypes that numpy knows too; none of them can be conjugate.
_PLAIN = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32}
    | {torch.float64, torch.bool}
)


def bytes_of(source: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values, in row-major order."""
    if source.dtype in _PLAIN and source.is_contiguous() and not source.requires_grad and not source.is_neg():
        return source.numpy().tobytes()  # what most small tensors are, at a fraction of the time
    return b"".join(piece.tobytes() for piece in pieces(source))


def open_inline(payload: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with memory of its own from the bytes of a frame.

    Raises:
        ProtocolError: the bytes are not as many as dtype and shape need.
    """
    needed = math.prod(shape) * dtype.itemsize
    if len(payload) != needed:
        raise ProtocolError(
            f"the peer sent {len(payload)} bytes for a tensor of {dtype} and shape {shape}, "
            f"which needs {needed}"
        )
    if not payload:
        return new_tensor(shape, dtype)
    return torch.frombuffer(bytearray(payload), dtype=dtype).view(shape)
