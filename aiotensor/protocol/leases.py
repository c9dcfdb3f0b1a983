"""Which blocks of memory are pinned, and by whom. A block is free when nothing pins it any more."""

from collections.abc import Hashable
from typing import NamedTuple

from aiotensor.errors import ProtocolError

__all__ = ["Freed", "Leases"]


class Freed(NamedTuple):
    """The size of a block that became free, and whom the budget had granted its bytes to."""

    nbytes: int
    holder: Hashable


class _Block:
    __slots__ = ("holder", "is_owned", "nbytes", "sent")

    def __init__(self, nbytes: int, holder: Hashable, *, is_owned: bool) -> None:
        self.nbytes = nbytes
        self.holder = holder
        self.is_owned = is_owned
        self.sent = 0


class Leases:
    """Count the pins of numbered blocks.

    A block is pinned by its owner, if a caller allocated it and may still write to it, and once for each
    tensor announced over it; so it can be sent several times, or to several receivers.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def own(self, nbytes: int) -> int:
        """Number a new block that a caller owns."""
        return self._new(_Block(nbytes, None, is_owned=True))

    def open(self, nbytes: int, holder: Hashable) -> int:
        """Number a new block for one tensor, pinned by its announcement from the start."""
        number = self._new(_Block(nbytes, holder, is_owned=False))
        self.pin(number)
        return number

    def size_of(self, number: int) -> int:
        """Return the bytes of a block."""
        return self._blocks[number].nbytes

    def pin(self, number: int) -> None:
        """Pin a block for one more announcement."""
        self._blocks[number].sent += 1

    def unpin(self, number: int) -> Freed | None:
        """Take the pin of one announcement back; return what that freed.

        Raises:
            ProtocolError: no announcement pins such a block.
        """
        block = self._blocks.get(number)
        if block is None or not block.sent:
            raise ProtocolError(f"block {number} was given back once too often")
        block.sent -= 1
        return self._freed(number, block)

    def disown(self, number: int) -> Freed | None:
        """Note that the owner let go of a block; return what that freed."""
        block = self._blocks[number]
        block.is_owned = False
        return self._freed(number, block)

    def unpin_all(self) -> list[Freed]:
        """Take back the pins of all announcements, since nobody is left to do so; return what that freed."""
        freed = []
        for number, block in list(self._blocks.items()):
            block.sent = 0
            freed.append(self._freed(number, block))
        return [one for one in freed if one is not None]

    def _new(self, block: _Block) -> int:
        number = self._next
        self._next += 1
        self._blocks[number] = block
        return number

    def _freed(self, number: int, block: _Block) -> Freed | None:
        if block.is_owned or block.sent:
            return None
        del self._blocks[number]
        return Freed(block.nbytes, block.holder)
