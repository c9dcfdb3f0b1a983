"""The dtypes that can be sent, by name. A name from a peer is looked up only here."""

import torch

from aiotensor.errors import ProtocolError

__all__ = ["DTYPES", "DTYPE_NAMES", "dtype_from_name", "unknown_dtype"]

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
