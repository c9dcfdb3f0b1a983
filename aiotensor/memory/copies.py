"""The copies into blocks of the arena, which a worker performs, and their states until they have stopped."""

import asyncio
import time
from collections.abc import Callable, Hashable
from functools import partial

import msgspec

from aiotensor.errors import AioTensorError
from aiotensor.memory.arena import Block, Extent
from aiotensor.memory.copying import CopyAbandonedError, copy_in_threads
from aiotensor.memory.source import Source
from aiotensor.protocol.pages import Range
from aiotensor.runtime.worker import Worker

__all__ = ["Copies"]

# Longer copies take tens of milliseconds. The worker performs them in a separate thread, so that they do not
# delay short copies.
_SHORT_COPY_BYTES = 16 << 20


class _Copy(msgspec.Struct, eq=False):
    """A copy in the worker, or only the preparation of the memory of a block."""

    block: Block
    holder: Hashable
    idle: list[Range]  # idle memory, which is returned to the system first
    cold: list[Range]  # the part of the block that has no memory yet
    since: float
    has_begun: bool = False
    is_running: bool = True
    filled: list[Range] = []
    is_abandoned: bool = False
    unpins: bool = False  # its call has failed or was cancelled: the end of the copy removes the pin
    running: "asyncio.Future[None] | None" = None  # set while the call waits


class Copies:
    """Copy tensors into blocks in a worker; belongs to the running loop.

    Args:
        worker: runs the copies.
        prepare: called with the place of a block; returns the ranges of memory to return to the system, and
            those to fill, as `Arena.prepare` does.
        unpin_owner: called with a block after a failed copy; removes the pin of its owner.
        max_wait_s: the time in seconds after which a copy that waits for the worker fails; None for never.
        overdue: called with the size of such a copy in bytes; returns the error to raise.
    """

    def __init__(
        self,
        worker: Worker,
        prepare: Callable[[Extent], tuple[list[Range], list[Range]]],
        unpin_owner: Callable[[Block], object],
        max_wait_s: float | None,
        overdue: Callable[[int], AioTensorError],
    ) -> None:
        self._worker = worker
        self._prepare = prepare
        self._unpin_owner = unpin_owner
        self._max_wait_s = max_wait_s
        self._overdue = overdue
        self._copies: set[_Copy] = set()

    @property
    def waiting_since(self) -> list[float]:
        """The submission times of the copies that the worker has not begun, by `time.monotonic`."""
        return [copy.since for copy in self._copies if not copy.has_begun]

    async def run(self, block: Block, holder: Hashable, source: Source | None) -> None:
        """Provide the memory of a block, and copy a tensor into it; an error removes the pin of its owner.

        Cancellation stops the copy; the pin is removed when the worker has stopped.

        Args:
            block: the block.
            holder: the argument of `abandon` that stops this copy.
            source: the tensor; None to provide only the memory.

        Raises:
            CopyAbandonedError: `abandon` or `abandon_all` was called.
            AioTensorError: the copy waited for the worker for longer than `max_wait_s`.
            OSError: the machine has no memory left.
        """
        idle, cold = self._prepare(block.place)
        copy = _Copy(block, holder, idle, cold, time.monotonic())
        try:
            running = self._worker.submit(
                partial(self._work, copy, source),
                partial(self._copied, copy),
                takes_long=block.place.nbytes > _SHORT_COPY_BYTES,
            )
        except BaseException:
            block.place.segment.filled(cold, [])
            self._unpin_owner(block)
            raise
        copy.running = running
        self._copies.add(copy)
        alarm = None
        if self._max_wait_s is not None:
            alarm = asyncio.get_running_loop().call_later(
                self._max_wait_s, self._end_wait, copy, partial(self._overdue, block.place.nbytes)
            )
        try:
            await running
        except BaseException:
            copy.is_abandoned = copy.unpins = True
            if not copy.is_running:
                self._unpin_owner(block)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
            # The future refers to the error, whose traceback would keep this frame and the frames of the
            # callers alive, with the source.
            copy.running = None
            del running, alarm

    def abandon(self, holder: Hashable) -> None:
        """Stop the copies of a holder; calls whose copies the worker has not begun raise at once."""
        for copy in self._copies:
            if copy.holder is holder:
                copy.is_abandoned = True
                self._end_wait(copy, CopyAbandonedError)

    def abandon_all(self) -> None:
        """Stop all copies."""
        for copy in self._copies:
            copy.is_abandoned = True

    def _end_wait(self, copy: _Copy, make_error: Callable[[], Exception]) -> None:
        """Raise an error in the call of a copy, unless the worker has begun the copy."""
        if not copy.has_begun and copy.running is not None and not copy.running.done():
            copy.running.set_exception(make_error())

    def _work(self, copy: _Copy, source: Source | None) -> None:
        """Provide the memory of a block, and copy a tensor into it; runs in the worker."""
        copy.has_begun = True
        place = copy.block.place
        place.segment.return_memory(copy.idle)
        place.segment.make_way(copy.cold)
        for one in copy.cold:
            if copy.is_abandoned:
                raise CopyAbandonedError
            place.segment.fill([one])
            copy.filled.append(one)
        if source is not None:
            copy_in_threads(source, place, lambda: copy.is_abandoned, self._worker.helper)

    def _copied(self, copy: _Copy) -> None:
        copy.is_running = False
        self._copies.discard(copy)
        copy.block.place.segment.filled(copy.cold, copy.filled)
        if copy.unpins:
            self._unpin_owner(copy.block)
