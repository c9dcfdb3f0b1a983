"""The placement of the bytes of a tensor: inline in the frame, or in the arena.

The sender calls `plan_placement` to determine the memory that a tensor needs, and the receiver calls
`open_tensor`. A new placement needs one module, and one branch in each of the two functions.
"""

from collections.abc import Mapping

import msgspec
import torch

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import ARENA, INLINE, OUT_OF_BAND, Put
from aiotensor.tensors.allocations import Allocation, Allocations
from aiotensor.tensors.arena import WHERE
from aiotensor.tensors.dtypes import DTYPES, dtype_from_name, unknown_dtype
from aiotensor.tensors.inline import MAX_INLINE_BYTES, open_buffer, open_inline
from aiotensor.tensors.mapping import MappedSegment
from aiotensor.tensors.source import Source
from aiotensor.tensors.views import Owner, with_attributes

__all__ = [
    "ArrivedTensor",
    "Placed",
    "Plan",
    "open_out_of_band",
    "open_tensor",
    "plan_placement",
]


class Plan(msgspec.Struct, frozen=True):
    """The plan for sending one tensor.

    Attributes:
        new_bytes: the number of bytes of shared memory that must be granted for a copy; 0 for no copy.
        allocation: the allocated block that contains the tensor, or None; the tensor is copied nevertheless
            unless the block can carry it.
    """

    new_bytes: int
    allocation: Allocation | None


class Placed(msgspec.Struct, frozen=True, gc=False):
    """The position of the bytes of a tensor, as its frame states it."""

    placement: str
    payload: bytes


_INLINE = Plan(0, None)


def plan_placement(source: Source, allocations: Allocations) -> Plan:
    """Choose how to send a tensor: in place if allocated, in the frame if small, otherwise as a copy."""
    nbytes = source.nbytes
    allocation = None
    if allocations.by_number and nbytes:
        allocation = allocations.find(source)
        if allocation is not None and allocation.can_carry(source):
            return Plan(0, allocation)
    return _INLINE if nbytes <= MAX_INLINE_BYTES else Plan(nbytes, allocation)


def open_out_of_band(put: Put, data: memoryview) -> torch.Tensor:
    """Return a tensor over the bytes that the transport has carried with its frame.

    Raises:
        ProtocolError: the frame describes an impossible tensor, or has another placement.
        OSError: no memory is left.
    """
    if put.placement != OUT_OF_BAND:
        raise ProtocolError(f"the peer sent the bytes of a tensor with the placement {put.placement[:64]!r}")
    tensor = open_buffer(data, dtype_from_name(put.dtype), put.shape)
    return tensor if put.attributes is None else with_attributes(tensor, put.attributes)


class ArrivedTensor(msgspec.Struct, frozen=True):
    """A tensor that has arrived; if it is in a segment, also its position and the owner of its storage."""

    tensor: torch.Tensor
    segment: int | None = None
    owner: Owner | None = None
    offset: int = 0


def open_tensor(
    placement: str,
    payload: bytes,
    dtype_name: str,
    shape: tuple[int, ...],
    segments: Mapping[int, MappedSegment],
) -> ArrivedTensor:
    """Open a tensor from the fields of its frame and the segments that the peer attached, by their numbers.

    Raises:
        ProtocolError: the frame describes an impossible tensor, or an unknown dtype, placement or segment.
    """
    dtype = DTYPES.get(dtype_name)
    if dtype is None:
        raise unknown_dtype(dtype_name)
    if placement == INLINE:
        return ArrivedTensor(open_inline(payload, dtype, shape))
    if placement != ARENA:
        raise ProtocolError(f"the peer used the unknown placement {placement[:64]!r} for a tensor")
    if len(payload) != WHERE.size:
        raise ProtocolError(f"the peer sent an invalid position of a tensor, of {len(payload)} bytes")
    number, offset = WHERE.unpack(payload)
    segment = segments.get(number)
    if segment is None:
        raise ProtocolError(f"the peer placed a tensor in segment {number}, which it never attached")
    view = segment.tensor(offset, dtype, shape)
    return ArrivedTensor(view.tensor, number, view.owner, offset)
