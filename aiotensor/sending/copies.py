"""Copies into blocks of the arena that a worker performs, each with the state until it has stopped."""

import asyncio
from collections.abc import Callable, Hashable
from functools import partial

import msgspec

from aiotensor.errors import AioTensorError
from aiotensor.protocol.pages import Range
from aiotensor.runtime.worker import Worker
from aiotensor.tensors.allocations import Block
from aiotensor.tensors.arena import Extent
from aiotensor.tensors.copying import CopyAbandonedError, copy_in_threads
from aiotensor.tensors.source import Source

__all__ = ["Copies"]

# Longer copies take tens of milliseconds, so the worker performs them in a thread of their own.
_SHORT_COPY_BYTES = 16 << 20


class _Copy(msgspec.Struct, eq=False):
    """A copy in the worker, or only the preparation of its memory."""

    block: Block
    holder: Hashable
    idle: list[Range]  # returned to the system first
    cold: list[Range]  # has to be filled
    since: float
    has_begun: bool = False
    is_running: bool = True
    filled: list[Range] = []
    is_abandoned: bool = False
    unpins: bool = False  # its caller was cancelled: its end removes the pin
    running: "asyncio.Future[None] | None" = None  # while its caller waits


class Copies:
    """Fill blocks in a worker; belongs to the running loop.

    Args:
        worker: runs the copies.
        prepare: returns the ranges to return and to fill for a block, as `Arena.prepare` does.
        unpin_owner: removes the pin of the owner of a block after a copy that failed.
        max_wait_s: the seconds that a copy waits for the worker; None for no limit.
        overdue: returns the error of a longer wait, given the bytes of the copy.
    """

    def __init__(
        self,
        worker: Worker,
        prepare: Callable[[Extent], tuple[list[Range], list[Range]]],
        unpin_owner: Callable[[int], object],
        max_wait_s: float | None,
        overdue: Callable[[int], AioTensorError],
    ) -> None:
        self._worker = worker
        self._prepare = prepare
        self._unpin_owner = unpin_owner
        self._max_wait_s = max_wait_s
        self._overdue = overdue
        self._copies: set[_Copy] = set()
        self._loop = asyncio.get_running_loop()

    @property
    def waiting_since(self) -> list[float]:
        """The times since when copies wait for the worker to begin them, by the loop's clock."""
        return [copy.since for copy in self._copies if not copy.has_begun]

    async def run(self, block: Block, holder: Hashable, source: Source | None) -> None:
        """Fill a block with memory, and copy a tensor into it; an error removes the pin of its owner.

        Cancellation stops the copy; the pin is removed when the worker has stopped.

        Args:
            block: the block.
            holder: for `abandon`.
            source: the tensor; None to prepare the memory only.

        Raises:
            CopyAbandonedError: `abandon` or `abandon_all` was called.
            AioTensorError: it has waited for the worker for too long.
            OSError: the machine has no memory left.
        """
        idle, cold = self._prepare(block.place)
        copy = _Copy(block, holder, idle, cold, self._loop.time())
        try:
            running = self._worker.submit(
                partial(self._work, copy, source),
                partial(self._copied, copy),
                takes_long=block.place.nbytes > _SHORT_COPY_BYTES,
            )
        except BaseException:
            block.place.segment.filled(cold, [])
            self._unpin_owner(block.number)
            raise
        copy.running = running
        self._copies.add(copy)
        alarm = None
        if self._max_wait_s is not None:
            alarm = self._loop.call_later(
                self._max_wait_s, self._end_wait, copy, partial(self._overdue, block.place.nbytes)
            )
        try:
            await running
        except BaseException:
            copy.is_abandoned = copy.unpins = True
            if not copy.is_running:
                self._unpin_owner(block.number)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
            # The error in the future refers to this frame and to those of the callers, with the source.
            copy.running = None
            del running, alarm

    def abandon(self, holder: Hashable) -> None:
        """Stop the copies of a holder; copies that the worker has not begun end at once."""
        for copy in self._copies:
            if copy.holder is holder:
                copy.is_abandoned = True
                self._end_wait(copy, CopyAbandonedError)

    def abandon_all(self) -> None:
        """Stop all copies."""
        for copy in self._copies:
            copy.is_abandoned = True

    def _end_wait(self, copy: _Copy, make_error: Callable[[], Exception]) -> None:
        """End the wait of a copy that the worker has not begun."""
        if not copy.has_begun and copy.running is not None and not copy.running.done():
            copy.running.set_exception(make_error())

    def _work(self, copy: _Copy, source: Source | None) -> None:
        """Fill a block with memory, and copy a tensor into it; runs in the worker."""
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
            self._unpin_owner(copy.block.number)
