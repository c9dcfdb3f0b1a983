"""The moves of blocks to a receiver on another machine; each pins its block until no byte is in transit."""

import asyncio
from collections.abc import Callable, Hashable

import msgspec

from aiotensor.memory.arena import Block
from aiotensor.memory.copying import CopyAbandonedError
from aiotensor.protocol.moves import Move
from aiotensor.protocol.network import Area
from aiotensor.transports.base import Mover

__all__ = ["Moves", "PendingMove"]


class PendingMove(msgspec.Struct, eq=False):
    """A move whose end has not been reported, or some of whose bytes are in transit."""

    mover: Mover
    holder: Hashable
    ended: Callable[[bool], object] | None
    move: Move[memoryview] | None = None

    def report(self, *, is_complete: bool) -> None:
        """Report the end, once."""
        ended, self.ended = self.ended, None
        if ended is not None:
            ended(is_complete)

    def stop(self) -> None:
        """Move no more bytes, and report the end at once; some bytes may still be in transit."""
        if self.move is not None:
            self.mover.cancel(self.move)
        self.report(is_complete=False)


class Moves:
    """Move bytes of blocks; belongs to the running loop.

    A block is pinned until no byte of it is in transit, even if its message ends earlier. Otherwise, these
    bytes could mix with those of the next block at the same place.

    Args:
        freed: called with each block whose last pin was that of a move.
    """

    def __init__(self, freed: Callable[[Block], object]) -> None:
        self._freed = freed
        self._pending: dict[PendingMove, None] = {}

    def begin(
        self,
        mover: Mover,
        block: Block,
        offset: int,
        data: memoryview,
        holder: Hashable,
        ended: Callable[[bool], object],
    ) -> PendingMove:
        """Begin to move bytes of a block, and return the move.

        Args:
            mover: the mover of the connection to the receiver.
            block: the block.
            offset: the position of the first byte in the block.
            data: the bytes.
            holder: the argument of `abandon` that stops this move.
            ended: called once, possibly during this call. The argument is True if the receiver will have the
                bytes before the next record, and the source may change; False if the move was stopped.
        """
        place = block.place
        pending = PendingMove(mover, holder, ended)

        def move_ended(is_complete: bool) -> None:
            del self._pending[pending]
            pending.move = None  # it refers to this function and to the bytes
            pending.report(is_complete=is_complete)  # which may announce the block
            block.moves -= 1
            if block.is_free:
                self._freed(block)

        block.moves += 1
        self._pending[pending] = None
        area = Area(place.segment.number, place.offset)
        pending.move = Move(area, place.nbytes, place.offset + offset, data, len(data), move_ended)
        mover.move(pending.move)
        return pending

    async def run(self, mover: Mover, block: Block, offset: int, data: memoryview, holder: Hashable) -> None:
        """Move bytes of a block, and wait until the source may change; a short move needs no wait.

        Cancellation stops the move between two steps. Arguments are those of `begin`.

        Raises:
            CopyAbandonedError: `abandon` was called for the holder, or the connection has ended.
        """
        moved: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def ended(is_complete: bool) -> None:
            if not moved.done():
                moved.set_result(is_complete)

        pending = self.begin(mover, block, offset, data, holder, ended)
        try:
            is_complete = await moved
        except BaseException:
            pending.stop()
            raise
        if not is_complete:
            raise CopyAbandonedError

    def abandon(self, holder: Hashable) -> None:
        """Stop the moves of a holder, and report their ends at once."""
        for pending in [pending for pending in self._pending if pending.holder is holder]:
            pending.stop()
