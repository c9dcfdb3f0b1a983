"""The pins of memory blocks; a block is free when it has no pin."""

from typing import Generic, TypeVar

import msgspec

from aiotensor.errors import ProtocolError

__all__ = ["Leases"]

G = TypeVar("G")


class _PinnedBlock(msgspec.Struct, Generic[G], eq=False):
    grant: G
    is_owned: bool = True
    sent: int = 0  # announcements that were not released
    moves: int = 0  # moves to another machine that are under way


class Leases(Generic[G]):
    """Count the pins of numbered blocks, and return the grant of a block when it is free.

    A block is pinned by its owner (the copy that fills it, or the tensor that the caller allocated in it),
    once for each tensor that was announced in it, and once for each move of its bytes to another machine. So
    it can be sent several times and to several receivers, and no peer can free memory that this side still
    writes or reads.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _PinnedBlock[G]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def own(self, grant: G) -> int:
        """Add a new block with the pin of its owner, and return the number of the block."""
        number = self._next
        self._next += 1
        self._blocks[number] = _PinnedBlock(grant)
        return number

    def grants(self) -> dict[int, G]:
        """Return the grants of all blocks, by the numbers of the blocks."""
        return {number: block.grant for number, block in self._blocks.items()}

    def grant_of(self, number: int) -> G:
        """Return the grant of a block."""
        return self._blocks[number].grant

    def is_sent(self, number: int) -> bool:
        """Return whether a block is pinned by an announcement."""
        return self._blocks[number].sent > 0

    def pin(self, number: int, count: int = 1) -> G:
        """Pin a block for one or more announcements, and return its grant."""
        block = self._blocks[number]
        block.sent += count
        return block.grant

    def unpin(self, number: int) -> G | None:
        """Remove the pin of one announcement; return the grant if the block is free now.

        Raises:
            ProtocolError: there is no such block, or no announcement pins it.
        """
        block = self._blocks.get(number)
        if block is None or not block.sent:
            raise ProtocolError(f"block {number} was released more often than it was announced")
        block.sent -= 1
        if block.is_owned or block.sent or block.moves:  # as `_freed`, without a call
            return None
        del self._blocks[number]
        return block.grant

    def disown(self, number: int) -> G | None:
        """Remove the pin of the owner; return the grant if the block is free now."""
        block = self._blocks[number]
        block.is_owned = False
        return None if block.sent else self._freed(number, block)

    def move_begun(self, number: int) -> None:
        """Pin a block for a move."""
        self._blocks[number].moves += 1

    def move_ended(self, number: int) -> G | None:
        """Remove the pin of a move; return the grant if the block is free now."""
        block = self._blocks[number]
        block.moves -= 1
        return self._freed(number, block)

    def _freed(self, number: int, block: _PinnedBlock[G]) -> G | None:
        if block.is_owned or block.sent or block.moves:
            return None
        del self._blocks[number]
        return block.grant
