"""A sender's shared memory: granted in order, filled in a worker, given back when the last pin is gone."""

import asyncio
from collections.abc import Callable, Hashable, Iterable
from functools import partial

import torch

from aiotensor.errors import AioTensorError
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.leases import Leases
from aiotensor.protocol.pages import Range
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.process_end import ProcessEnd
from aiotensor.runtime.worker import Worker
from aiotensor.sending.gates import Gate
from aiotensor.tensors.allocations import Allocations, Block
from aiotensor.tensors.arena import Arena, Extent
from aiotensor.tensors.copying import QUICK_BYTES, CopyAbandonedError, copy_in_threads, copy_now
from aiotensor.tensors.segments import Segment
from aiotensor.tensors.source import Source

__all__ = ["Memory"]

# The worker does longer copies apart from the others, which would wait for tens of milliseconds.
_SHORT_COPY_BYTES = 16 << 20


class _Copy:
    """A copy in the worker, or only the memory for one."""

    def __init__(self, block: Block, holder: Hashable, idle: list[Range], cold: list[Range]) -> None:
        self.block = block
        self.holder = holder
        self.idle = idle  # what is given back first
        self.cold = cold  # what has to be filled
        self.since = asyncio.get_running_loop().time()
        self.has_begun = False
        self.is_running = True
        self.filled: list[Range] = []
        self.is_abandoned = False
        self.unpins = False  # who asked for it has gone: the end of it takes the pin back


class Memory:
    """Grant blocks of the arena, copy into them, and take them back.

    Belongs to the event loop's thread, and to the loop that runs when it is made.

    Args:
        limit: bytes in use at once.
        gate: makes the gate over the arena.
        on_freed: told of the number of each allocated block whose tensor was freed; from any thread.
        keep_warm_s: after how many seconds idle memory goes back to the system; None for never.
        max_wait_s: after how many seconds a copy that the worker has not begun fails; None for never.
        overdue: makes that error, of the bytes to be copied.
    """

    def __init__(
        self,
        limit: int,
        gate: Callable[[Arena], Gate[Extent]],
        keep_warm_s: float | None,
        counts: dict[str, int],
        max_wait_s: float | None = None,
        overdue: Callable[[int], AioTensorError] = lambda nbytes: AioTensorError("waited for too long"),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._arena = Arena(limit, self._loop.time, self._release_segment)
        self.gate = gate(self._arena)
        self._freed: FreedItems[int] = FreedItems(self._loop, self.release_allocations)
        self.allocations = Allocations(self._freed)
        self._leases: Leases[Ticket[Extent]] = Leases()
        self._worker = Worker("aiotensor-sender")
        self._counts = counts
        self._copies: set[_Copy] = set()
        self._keep_warm_s = keep_warm_s
        self._max_wait_s = max_wait_s
        self._overdue = overdue
        self._trimming: asyncio.TimerHandle | None = None
        self._trims_soon = False
        self._readers: dict[Segment, ProcessEnd] = {}  # those of retired segments
        self._is_closed = False

    async def acquire(self, nbytes: int, holder: Hashable = None) -> Block:
        """Wait for a block, and pin it; errors are those of `Gate.acquire`.

        Raises:
            OSError: the machine has no descriptors or no addresses left.
        """
        return self._own(await self.gate.acquire(nbytes, holder))

    def try_acquire(self, nbytes: int, holder: Hashable = None) -> Block | None:
        """Pin a block if one is free and nobody waits in line."""
        ticket = self.gate.try_acquire(nbytes, holder)
        return None if ticket is None else self._own(ticket)

    def copy_now(self, source: Source, block: Block) -> None:
        """Copy a tensor on this thread."""
        if not block.place.is_warm:
            segment = block.place.segment
            idle, cold = self._arena.prepare(block.place)
            filled: list[Range] = []
            try:
                segment.return_memory(idle)
                for one in cold:
                    segment.fill([one])
                    filled.append(one)
            finally:
                segment.filled(cold, filled)
        copy_now(source, block.place)
        self._count(source)

    async def copy(self, source: Source, block: Block, holder: Hashable) -> None:
        """Copy a tensor, in the worker if that takes long; the pin is gone if this fails.

        Cancelling stops the copy; the block is free when the worker has let go of it.

        Raises:
            CopyAbandonedError: `abandon` was called for the holder.
            OSError: the machine has no memory left.
        """
        if source.nbytes <= QUICK_BYTES and source.is_contiguous() and block.place.is_warm:
            try:
                copy_now(source, block.place)
            except BaseException:
                self.unpin_owner(block.number)
                raise
        else:
            await self._run(block, holder, source)
        self._count(source)

    async def tensor_over(
        self, block: Block, dtype: torch.dtype, shape: tuple[int, ...], holder: Hashable
    ) -> torch.Tensor:
        """Get memory for a block, and return a tensor over it, which pins it; the pin is gone if this fails.

        Raises:
            CopyAbandonedError: `abandon` was called for the holder, or this was closed.
            OSError: the machine has no memory left.
        """
        if not block.place.is_warm:
            await self._run(block, holder, None)
        try:
            if self._is_closed:
                raise CopyAbandonedError
            return self.allocations.add(block, dtype, shape)
        except BaseException:
            self.unpin_owner(block.number)
            raise

    def abandon(self, holder: Hashable) -> None:
        """Stop the copies of a holder."""
        for copy in self._copies:
            if copy.holder is holder:
                copy.is_abandoned = True

    def unaccounted_bytes(self, numbers: Iterable[int]) -> int:
        """Count the bytes of blocks that are accounted to no open message."""
        tickets = map(self._leases.grant_of, numbers)
        return sum(ticket.amount for ticket in tickets if not self.gate.budget.holds(ticket))

    def announced(self, number: int, holder: Hashable, *, is_whole: bool) -> None:
        """Account an allocated block to the message that announces it.

        Args:
            number: of the block; if an open message has it already, it stays so.
            holder: the message.
            is_whole: whether the message needs nothing more, so that the block will come back in any case.
        """
        ticket, budget = self._leases.grant_of(number), self.gate.budget
        if ticket.holder is None or not budget.holds(ticket):
            if is_whole:
                ticket.holder = holder
            else:
                budget.reassign(ticket, holder)
                self.gate.refuse_if_stuck()

    def account(self, number: int, holder: Hashable) -> None:
        """Account a block to a holder, or to none."""
        self.gate.budget.reassign(self._leases.grant_of(number), holder)

    def pin(self, number: int) -> None:
        """Pin a block for an announcement."""
        self._leases.pin(number)

    def unpin(self, numbers: Iterable[int]) -> None:
        """Take the pins of announcements back.

        Raises:
            ProtocolError: no announcement pins such a block.
        """
        for number in numbers:
            self._release(self._leases.unpin(number))

    def unpin_owner(self, number: int) -> None:
        """Note that nobody writes to a block any more."""
        self._release(self._leases.disown(number))

    def collect_freed(self) -> None:
        """Release the blocks of all allocated tensors that were freed until now."""
        self._freed.collect_all()

    def release_allocations(self, numbers: Iterable[int]) -> None:
        """Release the blocks of allocated tensors that were freed."""
        for number in numbers:
            self.allocations.forget(number)
            self.unpin_owner(number)

    def peer_lost(self, pid: int | None) -> None:
        """Take back what the receiver had; what it may still read is not written to any more.

        Args:
            pid: of its process, whose end ends every view of the memory there; None if that is not known.
        """
        # Tensors that it received may live on, and nothing says when they end.
        sent = [ticket.place for ticket in self._leases.sent() if ticket.place is not None]
        retired = self._arena.detach(sent)
        for ticket in self._leases.unpin_all():
            self._release(ticket)
        if retired is not None and retired.used and not self._is_closed:
            self._trim_retired()
            if pid is not None:
                self._readers[retired] = ProcessEnd(pid, partial(self._reader_ended, retired))

    def holdings(self) -> list[tuple[Ticket[Extent], bool]]:
        """List what is in use, and whether it was allocated and no announcement pins it."""
        return [
            (ticket, number in self.allocations and not self._leases.is_sent(number))
            for number, ticket in self._leases.grants().items()
        ]

    @property
    def has_allocations(self) -> bool:
        """Return whether there are allocated tensors."""
        return bool(self.allocations)

    @property
    def largest_free(self) -> int:
        """Return the bytes of the largest block that could be granted now if no call waited."""
        budget = self.gate.budget
        return min(budget.limit - budget.in_use, self._arena.largest_free)

    @property
    def warm_bytes(self) -> int:
        """Count the bytes that the system has given, in use or kept warm."""
        return self._arena.warm_bytes

    @property
    def waiting_since(self) -> list[float]:
        """The times since when copies wait for the worker to begin them, by the loop's clock."""
        return [copy.since for copy in self._copies if not copy.has_begun]

    async def settle(self) -> None:
        """Wait until no copy runs."""
        await self._worker.settle()

    async def aclose(self) -> None:
        """Let go of all memory when no copy runs any more, and end the worker."""
        self._stop()
        self._arena.close()
        await self._worker.settle()
        self._worker.close()

    def close(self) -> None:
        """Do the same without waiting: copies that run are stopped, and end by themselves."""
        self._stop()
        self._arena.close()
        self._worker.close()

    def _stop(self) -> None:
        self._is_closed = True
        for copy in self._copies:
            copy.is_abandoned = True
        if self._trimming is not None:
            self._trimming.cancel()
            self._trimming = None
        for reader in self._readers.values():
            reader.cancel()
        self._readers.clear()

    def _count(self, copied: Source) -> None:
        self._counts["tensors_copied"] += 1
        self._counts["bytes_copied"] += copied.nbytes

    def _own(self, ticket: Ticket[Extent]) -> Block:
        place = ticket.place
        if place is None:
            raise AssertionError("bytes were granted without a place")
        try:
            place.segment.open()
        except BaseException:
            self.gate.release(ticket)
            raise
        return Block(self._leases.own(ticket), place)

    async def _run(self, block: Block, holder: Hashable, source: Source | None) -> None:
        """Fill a block in the worker; if that fails, the pin is gone when it has ended."""
        idle, cold = self._arena.prepare(block.place)
        copy = _Copy(block, holder, idle, cold)
        try:
            running = self._worker.submit(
                partial(self._work, copy, source),
                partial(self._copied, copy),
                takes_long=block.place.nbytes > _SHORT_COPY_BYTES,
            )
        except BaseException:
            block.place.segment.filled(cold, [])
            self.unpin_owner(block.number)
            raise
        self._copies.add(copy)
        alarm = (
            None
            if self._max_wait_s is None
            else self._loop.call_later(self._max_wait_s, self._end_wait, copy, running)
        )
        try:
            await running
        except BaseException:
            copy.is_abandoned = copy.unpins = True
            if not copy.is_running:
                self.unpin_owner(block.number)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
            # The error in the future refers to this frame and to those of the callers, with the source.
            del running, alarm

    def _end_wait(self, copy: _Copy, running: "asyncio.Future[None]") -> None:
        """End the wait of a copy that the worker has not begun."""
        if not copy.has_begun and not running.done():
            running.set_exception(self._overdue(copy.block.place.nbytes))

    def _work(self, copy: _Copy, source: Source | None) -> None:
        """Get memory for a block, and copy a tensor into it; in the worker."""
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
            self.unpin_owner(copy.block.number)

    def _release_segment(self, segment: Segment) -> None:
        """Unmap a segment: in the worker, behind the copies into it, since much memory takes milliseconds."""
        reader = self._readers.pop(segment, None)
        if reader is not None:
            reader.cancel()
        if segment.is_open:
            # A receiver may map it for long yet, because of a tensor that is small.
            free = segment.take_free() if segment.is_attached or segment.is_retired else []
            self._worker.begin("unmapping", partial(_close, segment, free))

    def _release(self, ticket: Ticket[Extent] | None) -> None:
        if ticket is None:
            return
        self.gate.release(ticket)
        if self._is_closed:
            return
        if ticket.place is not None and ticket.place.segment.is_retired:
            if not self._trims_soon:
                self._trims_soon = True
                self._loop.call_soon(self._trim_retired)
        elif self._trimming is None and self._keep_warm_s is not None:
            self._trimming = self._loop.call_later(self._keep_warm_s, self._trim)

    def _reader_ended(self, segment: Segment) -> None:
        """Note that the process of the receiver that a segment was retired for has ended."""
        self._readers.pop(segment, None)
        segment.reader_ended()
        self._trim_retired()

    def _trim_retired(self) -> None:
        """Give back what no block of a retired segment uses: nothing new is placed there."""
        self._trims_soon = False
        if self._is_closed:
            return
        for segment in self._arena.segments():
            if segment.is_retired:
                self._worker.begin("returning memory", partial(segment.return_memory, segment.take_free()))

    def _trim(self) -> None:
        """Give back what has been idle for long; come again if something may be by then."""
        self._trimming = None
        if self._keep_warm_s is None:
            return
        segment, idle = self._arena.take_idle(self._loop.time() - self._keep_warm_s)
        if idle:
            self._worker.begin("returning memory", partial(segment.return_memory, idle))
        if segment.has_idle:
            self._trimming = self._loop.call_later(self._keep_warm_s, self._trim)


def _close(segment: Segment, free: list[Range]) -> None:
    segment.return_memory(free)
    segment.close()
