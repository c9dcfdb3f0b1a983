"""The dtypes that can be sent, the bytes of contiguous tensors, and uninitialized memory."""

import errno
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aiotensor.errors import ProtocolError

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "ArrayMemory",
    "RawBytes",
    "dtype_from_name",
    "flat_bytes",
    "is_addressable",
    "new_bytes",
    "new_tensor",
    "unknown_dtype",
]

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
