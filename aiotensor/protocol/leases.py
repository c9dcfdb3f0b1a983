"""Which blocks of memory are pinned, and by whom. A block is free when nothing pins it any more."""

from typing import Generic, TypeVar

from aiotensor.errors import ProtocolError

__all__ = ["Leases"]

G = TypeVar("G")


class _PinnedBlock(Generic[G]):
    __slots__ = ("grant", "is_owned", "sent")

    def __init__(self, grant: G) -> None:
        self.grant = grant
        self.is_owned = True
        self.sent = 0


class Leases(Generic[G]):
    """Count the pins of numbered blocks, and hand back what was granted for a block when it is free.

    A block is pinned by its owner (the copy that fills it, or the caller who allocated it) and once for
    each tensor announced over it; so it can be sent several times, or to several receivers, and nobody on
    the other side can free what is still being written here.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _PinnedBlock[G]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def sent(self) -> list[G]:
        """Return what was granted for the blocks that announcements pin."""
        return [block.grant for block in self._blocks.values() if block.sent]

    def own(self, grant: G) -> int:
        """Number a new block, whose owner may still write to it."""
        number = self._next
        self._next += 1
        self._blocks[number] = _PinnedBlock(grant)
        return number

    def grant_of(self, number: int) -> G:
        """Return what was granted for a block."""
        return self._blocks[number].grant

    def pin(self, number: int) -> None:
        """Pin a block for one more announcement."""
        self._blocks[number].sent += 1

    def unpin(self, number: int) -> G | None:
        """Take the pin of one announcement back; return the grant if that freed the block.

        Raises:
            ProtocolError: no announcement pins such a block.
        """
        block = self._blocks.get(number)
        if block is None or not block.sent:
            raise ProtocolError(f"block {number} was given back once too often")
        block.sent -= 1
        return self._freed(number, block)

    def disown(self, number: int) -> G | None:
        """Note that the owner let go of a block; return the grant if that freed it."""
        block = self._blocks[number]
        block.is_owned = False
        return self._freed(number, block)

    def unpin_all(self) -> list[G]:
        """Take back the pins of all announcements, since nobody is left to do so; return what that freed."""
        freed = []
        for number, block in list(self._blocks.items()):
            block.sent = 0
            freed.append(self._freed(number, block))
        return [one for one in freed if one is not None]

    def grants(self) -> dict[int, G]:
        """Return what was granted for each block in use, by its number."""
        return {number: block.grant for number, block in self._blocks.items()}

    def is_sent(self, number: int) -> bool:
        """Return whether an announcement pins a block."""
        return self._blocks[number].sent > 0

    def _freed(self, number: int, block: _PinnedBlock[G]) -> G | None:
        if block.is_owned or block.sent:
            return None
        del self._blocks[number]
        return block.grant
