"""Blocks that callers allocated, so that sending one of them, or a part of it, copies nothing."""

from collections.abc import Callable

import msgspec
import torch

from aiotensor.tensors.arena import Extent
from aiotensor.tensors.source import Source
from aiotensor.tensors.views import Watch, watch_storage

__all__ = ["Allocation", "Allocations", "Block"]


class Block(msgspec.Struct, frozen=True):
    """A place in the arena, and the number that it is pinned by."""

    number: int
    place: Extent


class Allocation(msgspec.Struct, frozen=True):
    """A block that a caller has, and the addresses of its memory here."""

    block: Block
    start: int
    stop: int
    watch: Watch

    def can_carry(self, source: Source) -> bool:
        """Say whether a tensor that lies in the block can be announced where it lies."""
        if self.block.place.segment.is_retired:
            return False  # a receiver that is gone may still read it
        if not source.is_contiguous() or source.is_conj() or source.is_neg():
            return False
        # Views made by numpy, unlike those by torch, may be misaligned or end in the next block. No receiver
        # accepts that.
        start = source.data_ptr()
        return start % source.dtype.itemsize == 0 and start + source.nbytes <= self.stop


class Allocations:
    """Know the memory that callers allocated and still have.

    Args:
        on_freed: called with the block's number when its storage was freed, in whichever thread that
            happens, perhaps inside the garbage collector: it may only enqueue.
    """

    def __init__(self, on_freed: Callable[[int], None]) -> None:
        # Not a method: nothing that watches may keep this, and through it the memory, alive.
        self._freed: Callable[[Watch], None] = lambda watch: on_freed(watch.number)
        self._by_number: dict[int, Allocation] = {}

    def add(self, block: Block, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor over a new block, and watch for the end of its storage."""
        view = block.place.tensor(dtype, shape)
        start = view.tensor.data_ptr()
        self._by_number[block.number] = Allocation(
            block, start, start + block.place.nbytes, watch_storage(view.owner, self._freed, block.number)
        )
        return view.tensor

    def forget(self, number: int) -> None:
        """Note, in the event loop, that a block's storage was freed."""
        self._by_number.pop(number, None)

    def __len__(self) -> int:
        return len(self._by_number)

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def find(self, source: Source) -> Allocation | None:
        """Return the block in which a tensor begins, or None."""
        if not self._by_number:
            return None
        start = source.data_ptr()
        for allocation in self._by_number.values():
            if allocation.start <= start < allocation.stop:
                return allocation
        return None
