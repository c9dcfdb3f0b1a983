"""Blocks that callers allocated, so that tensors in them are sent without a copy."""

from collections.abc import Callable

import msgspec
import torch

from aiotensor.tensors.arena import Extent
from aiotensor.tensors.source import Source
from aiotensor.tensors.views import Watch, watch_storage

__all__ = ["Allocation", "Allocations", "Block"]


class Block(msgspec.Struct, frozen=True):
    """A block of the arena, and the number of its lease."""

    number: int
    place: Extent


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
        if not source.is_contiguous() or source.is_conj() or source.is_neg():
            return False
        # Receivers reject tensors that are misaligned or end in the next block, as numpy views may be.
        start = source.data_ptr()
        return start % source.dtype.itemsize == 0 and start + source.nbytes <= self.stop


class Allocations:
    """The memory that callers allocated and still use.

    Args:
        on_freed: called with the number of a block whose tensors were freed, in any thread, perhaps by the
            garbage collector: it may only enqueue.

    Attributes:
        by_number: the allocations by the numbers of their blocks.
    """

    def __init__(self, on_freed: Callable[[int], None]) -> None:
        # Not a method, since a watch must not keep this object, and so the memory, alive.
        self._freed: Callable[[Watch], None] = lambda watch: on_freed(watch.number)
        self.by_number: dict[int, Allocation] = {}

    def add(self, block: Block, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over a new block, and watch its storage."""
        view = block.place.tensor(dtype, shape)
        start = view.tensor.data_ptr()
        self.by_number[block.number] = Allocation(
            block, start, start + block.place.nbytes, watch_storage(view.owner, self._freed, block.number)
        )
        return view.tensor

    def forget(self, number: int) -> None:
        """Remove a block whose tensors were freed; called in the event loop."""
        self.by_number.pop(number, None)

    def find(self, source: Source) -> Allocation | None:
        """Return the allocation in which a tensor begins, or None."""
        start = source.data_ptr()
        for allocation in self.by_number.values():
            if allocation.start <= start < allocation.stop:
                return allocation
        return None
