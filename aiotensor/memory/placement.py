"""The placement of the bytes of a tensor, inline in the frame or in the arena, and the sizes that fit there.

The sender calls `plan_placement` to determine the memory that a tensor needs, and the receiver calls
`Mappings.open`. A new placement needs one module, and one branch in each of the two functions.
"""

import math
import operator
import sys
from collections.abc import Mapping, Sequence

import msgspec
import torch

from aiotensor.errors import TooLargeError, UnsupportedTensorError
from aiotensor.memory.arena import Block
from aiotensor.memory.mappings import Forwardable, find_leased, mapped_segments
from aiotensor.memory.source import Source, memory_order
from aiotensor.memory.tensors import DTYPE_NAMES, MAX_INLINE_BYTES, Watch, is_addressable, new_tensor


class Allocation(msgspec.Struct, frozen=True):
    """A block that a caller allocated, and the addresses of its memory in this process."""

    block: Block
    start: int
    stop: int
    watch: Watch

    def can_carry(self, source: Source) -> bool:
        """Return whether a tensor in the block can be announced without a copy."""
        if self.block.lost:
            return False  # a lost receiver may still read it
        # As `is_flat`, without a call.
        if not (source.is_contiguous() or memory_order(source)) or source.is_conj() or source.is_neg():
            return False
        # Receivers reject tensors that are misaligned or end in the next block, as numpy views may be.
        start = source.data_ptr()
        return start % source.dtype.itemsize == 0 and start + source.nbytes <= self.stop


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


def plan_placement(source: Source, allocations: Mapping[int, Allocation]) -> Plan:
    """Choose how to send a tensor: in place if allocated, in the frame if small, forwarded, or as a copy."""
    nbytes = source.nbytes
    allocation = None
    if allocations and nbytes:
        start = source.data_ptr()
        for one in allocations.values():
            if one.start <= start < one.stop:
                if one.can_carry(source):
                    return Plan(0, one)
                allocation = one
                break
    if nbytes <= MAX_INLINE_BYTES:
        return _INLINE
    return Plan(nbytes, allocation, find_leased(source) if mapped_segments else None)


def sizes_of(shape: Sequence[int], dtype: torch.dtype, limit: int) -> tuple[tuple[int, ...], int]:
    """Return the sizes of a tensor to allocate in elements, and its size in bytes.

    Args:
        shape: the sizes of the tensor's dimensions, in elements.
        dtype: the type of the tensor's elements.
        limit: the maximum size of the tensor in bytes.

    Raises:
        TypeError: the dtype is not a torch dtype.
        UnsupportedTensorError: a tensor of this dtype cannot be sent.
        ValueError: a size is negative.
        TooLargeError: the tensor would have more bytes than `limit`.
    """
    sizes = tuple(map(operator.index, shape))
    if min(sizes, default=0) < 0:
        raise ValueError(f"the sizes of a shape must not be negative, got {sizes}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.uint8, got {dtype!r}")
    if dtype not in DTYPE_NAMES:
        raise UnsupportedTensorError(f"a tensor of {dtype} cannot be sent: allocate torch.uint8 and view it")
    nbytes = math.prod(sizes) * dtype.itemsize
    if nbytes > limit:
        raise too_large(nbytes, limit)
    return sizes, nbytes


def new_empty(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without elements.

    Raises:
        TooLargeError: the strides of the tensor cannot be computed.
    """
    if not is_addressable(sizes, dtype.itemsize):
        raise TooLargeError(
            f"an empty tensor of shape {sizes} has strides that cannot be computed: choose smaller sizes",
            limit=sys.maxsize,
            requested=math.prod(size for size in sizes if size) * dtype.itemsize,
        )
    return new_tensor(sizes, dtype)


def too_large(nbytes: int, limit: int, name: str = "arena_bytes") -> TooLargeError:
    """Return the error for a tensor that never fits into the limit with this name."""
    return TooLargeError(
        f"{nbytes} bytes can never fit into {name}={limit}: send smaller parts, or raise {name}",
        limit=limit,
        requested=nbytes,
    )
