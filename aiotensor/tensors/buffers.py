"""Tensors whose bytes travel in a buffer of their own, beside the message that they belong to."""

import numpy as np
import torch

from aiotensor.tensors.gathering import gathered
from aiotensor.tensors.inline import check_size
from aiotensor.tensors.raw import RawBytes, flat_bytes, new_bytes, new_tensor
from aiotensor.tensors.source import Source, is_flat
from aiotensor.tensors.views import view_over

__all__ = ["buffer_of", "open_buffer"]


def buffer_of(source: Source) -> RawBytes:
    """Return the bytes of a source's values, in row-major order; the array keeps the memory alive.

    They are the source's own where it is flat, and copied otherwise.
    """
    return flat_bytes(source) if is_flat(source) else gathered(source)


def open_buffer(buffer: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a writable tensor over a buffer, which lives at least as long.

    It is copied only where it cannot be used as it is: it is read-only, or lies where the processor cannot
    load such elements.

    Raises:
        ProtocolError: the bytes are not as many as dtype and shape need, or there can be no such shape.
        OSError: no memory is left for a copy.
    """
    needed = check_size(buffer.nbytes, dtype, shape)
    if not needed:
        return new_tensor(shape, dtype)
    flat = np.frombuffer(buffer, np.uint8)
    if buffer.readonly or flat.__array_interface__["data"][0] % dtype.itemsize:
        copy = new_bytes(needed)
        np.copyto(copy, flat)
        flat = copy
    return view_over(flat.data, 0, dtype, shape, needed).tensor
