"""The placement of the bytes of a tensor: inline in the frame, or in the arena.

The sender calls `plan_placement` to determine the memory that a tensor needs, and the receiver calls
`open_tensor`. A new placement needs one module, and one branch in each of the two functions.
"""

from collections.abc import Mapping

import msgspec
import torch

from aiotensor.errors import ProtocolError
from aiotensor.memory.allocations import Allocation, Allocations
from aiotensor.memory.arena import WHERE
from aiotensor.memory.dtypes import DTYPE_NAMES, DTYPES, unknown_dtype
from aiotensor.memory.inline import MAX_INLINE_BYTES, open_inline
from aiotensor.memory.leased import Forwardable, find_leased, leased
from aiotensor.memory.mapping import MappedSegment
from aiotensor.memory.source import Source, attributes_of
from aiotensor.memory.views import Owner
from aiotensor.protocol.frames import ARENA, INLINE, Put
from aiotensor.types import TraceContext

__all__ = [
    "ArrivedTensor",
    "Plan",
    "open_tensor",
    "plan_placement",
    "put_of",
]


class Plan(msgspec.Struct, frozen=True):
    """The plan for sending one tensor.

    Attributes:
        new_bytes: the number of bytes of shared memory that must be granted for a copy; 0 for no copy.
        allocation: the allocated block that contains the tensor, or None; the tensor is copied nevertheless
            unless the block can carry it.
        forwardable: the block of a peer that contains the tensor, or None; the tensor is copied nevertheless
            if this process has written to it after forwarding it, or to a peer on another machine.
    """

    new_bytes: int
    allocation: Allocation | None
    forwardable: Forwardable | None = None


_INLINE = Plan(0, None)


def plan_placement(source: Source, allocations: Allocations) -> Plan:
    """Choose how to send a tensor: in place if allocated, in the frame if small, forwarded, or as a copy."""
    nbytes = source.nbytes
    allocation = None
    if allocations.by_number and nbytes:
        allocation = allocations.find(source)
        if allocation is not None and allocation.can_carry(source):
            return Plan(0, allocation)
    if nbytes <= MAX_INLINE_BYTES:
        return _INLINE
    return Plan(nbytes, allocation, find_leased(source) if leased else None)


def put_of(
    message: int,
    tensor: int,
    source: Source,
    placement: str,
    payload: bytes,
    block: int | None,
    *,
    last: bool,
    trace: TraceContext | None = None,
) -> Put:
    """Return the `Put` frame of a tensor.

    Args:
        message: the number of its message.
        tensor: its number in the message.
        source: the tensor.
        placement: the placement of its bytes.
        payload: its bytes, or their position.
        block: the number of its block; None for a tensor without one.
        last: whether it is the last tensor of the message.
        trace: the trace context of the call; None without tracing.
    """
    attributes, shape = None, tuple(source.shape)
    # Nearly all tensors have no attributes, which this finds out without a call.
    if type(source) is not torch.Tensor or source.requires_grad or 1 in shape or not source.is_contiguous():
        attributes = attributes_of(source)
    return Put(
        message,
        tensor,
        DTYPE_NAMES[source.dtype],
        shape,
        "cpu" if source.is_cpu else str(source.device),
        placement,
        payload,
        block,
        last,
        attributes,
        trace,
    )


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
        if len(payload) > MAX_INLINE_BYTES:
            raise ProtocolError(f"the peer sent {len(payload)} bytes inline, more than {MAX_INLINE_BYTES}")
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
