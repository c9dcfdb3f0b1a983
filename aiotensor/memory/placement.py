"""The placement of the bytes of a tensor: inline in the frame, or in the arena.

The sender calls `plan_placement` to determine the memory that a tensor needs, and the receiver calls
`Mappings.open`. A new placement needs one module, and one branch in each of the two functions.
"""

import msgspec
import torch

from aiotensor.memory.allocations import Allocation, Allocations
from aiotensor.memory.dtypes import DTYPE_NAMES
from aiotensor.memory.inline import MAX_INLINE_BYTES
from aiotensor.memory.leased import Forwardable, find_leased, mapped_segments
from aiotensor.memory.source import Source, attributes_of
from aiotensor.protocol.frames import Put
from aiotensor.types import TraceContext

__all__ = [
    "Plan",
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
    return Plan(nbytes, allocation, find_leased(source) if mapped_segments else None)


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
