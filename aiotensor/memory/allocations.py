"""Blocks that callers allocated, so that tensors in them are sent without a copy."""

from collections.abc import Callable

import msgspec
import torch

from aiotensor.memory.arena import Block
from aiotensor.memory.source import Source, memory_order
from aiotensor.memory.views import Watch, view_over

__all__ = ["Allocation", "Allocations"]


class Allocation(msgspec.Struct, frozen=True):
    """A block that a caller allocated, and the addresses of its memory in this process."""

    block: Block
    start: int
    stop: int
    watch: Watch

    def can_carry(self, source: Source) -> bool:
        """Return whether a tensor in the block can be announced without a copy."""
        if self.block.place.segment.is_retired:
            return False  # a lost receiver may still read it
        # As `is_flat`, without a call.
        if not (source.is_contiguous() or memory_order(source)) or source.is_conj() or source.is_neg():
            return False
        # Receivers reject tensors that are misaligned or end in the next block, as numpy views may be.
        start = source.data_ptr()
        return start % source.dtype.itemsize == 0 and start + source.nbytes <= self.stop


class Allocations:
    """The memory that callers allocated and still use.

    Args:
        on_freed: called with the watch of a block whose tensors were freed; the number of the watch is that
            of the block. Any thread may call it, perhaps during a garbage collection, so it may only enqueue
            the watch. It must not refer to this object, because a watch would then keep the memory alive.

    Attributes:
        by_number: the allocations by the numbers of their blocks; `Memory` removes freed ones.
    """

    def __init__(self, on_freed: Callable[[Watch], object]) -> None:
        self._on_freed = on_freed
        self.by_number: dict[int, Allocation] = {}

    def add(self, block: Block, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over a new block, and watch its storage."""
        place = block.place
        tensor, owner = view_over(place.segment.memory, place.offset, dtype, shape)
        watch = Watch(owner, self._on_freed)
        watch.number = block.number
        start = place.segment.address + place.offset
        self.by_number[block.number] = Allocation(block, start, start + place.nbytes, watch)
        return tensor

    def find(self, source: Source) -> Allocation | None:
        """Return the allocation in which a tensor begins, or None."""
        start = source.data_ptr()
        for allocation in self.by_number.values():
            if allocation.start <= start < allocation.stop:
                return allocation
        return None
