"""A sender's shared memory: granted in order, filled in a worker, given back when the last pin is gone."""

import asyncio
from collections.abc import Callable, Hashable, Iterable
from functools import partial

import torch

from aiotensor import placements
from aiotensor.gates import Gate
from aiotensor.placements import Allocations, Block, CopyAbandonedError, Place, Segment
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.leases import Leases
from aiotensor.worker import Worker

__all__ = ["Memory"]


class _Copy:
    """A copy in the worker, or only the memory for one."""

    def __init__(self, block: Block, holder: Hashable, cold: list[int]) -> None:
        self.block = block
        self.holder = holder
        self.cold = cold
        self.is_running = True
        self.filled: list[int] = []  # those of the cold chunks that have memory now
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
    """

    def __init__(
        self,
        limit: int,
        gate: Callable[[placements.Arena], Gate[Place]],
        on_freed: Callable[[int], None],
        keep_warm_s: float | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._arena = placements.Arena(limit, self._loop.time, self._let_go)
        self.gate = gate(self._arena)
        self.allocations = Allocations(on_freed)
        self._leases: Leases[Ticket[Place]] = Leases()
        self._worker = Worker("aiotensor-sender")
        self.tensors_copied = self.bytes_copied = 0
        self._copies: set[_Copy] = set()
        self._keep_warm_s = keep_warm_s
        self._trimming: asyncio.TimerHandle | None = None
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

    def copy_now(self, source: torch.Tensor, block: Block) -> None:
        """Copy a tensor on this thread."""
        segment = block.place.segment
        for chunk in block.place.cold:
            segment.fill([chunk])
            segment.filled([chunk])
        placements.copy_now(source, block.place)
        self._count(source)

    async def copy(self, source: torch.Tensor, block: Block, holder: Hashable) -> None:
        """Copy a tensor, in the worker if that takes long; the pin is gone if this fails.

        Cancelling stops the copy; the block is free when the worker has let go of it.

        Raises:
            CopyAbandonedError: `abandon` was called for the holder.
            OSError: the machine has no memory left.
        """
        if source.nbytes <= placements.QUICK_BYTES and source.is_contiguous() and block.place.is_warm:
            try:
                placements.copy_now(source, block.place)
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

    def size_of(self, number: int) -> int:
        """Return the bytes granted for a block."""
        return self._leases.grant_of(number).amount

    def is_held(self, number: int) -> bool:
        """Return whether a block is accounted to a holder that may still wait for more."""
        return self.gate.budget.holds(self._leases.grant_of(number))

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
            self._give_back(self._leases.unpin(number))

    def unpin_owner(self, number: int) -> None:
        """Note that nobody writes to a block any more."""
        self._give_back(self._leases.disown(number))

    def disowned(self, numbers: Iterable[int]) -> None:
        """Note that callers let go of blocks that they had allocated."""
        for number in numbers:
            self.allocations.forget(number)
            self.unpin_owner(number)

    def peer_lost(self) -> None:
        """Take back what the other side had; what it may still read is not written to any more."""
        # Tensors that it received may live on, with nobody left to say when they end.
        self._arena.detach(retire=self._leases.are_sent)
        for ticket in self._leases.unpin_all():
            self._give_back(ticket)

    def holdings(self) -> list[tuple[Ticket[Place], bool]]:
        """List what is in use, and whether it was allocated and no announcement pins it."""
        return [
            (ticket, number in self.allocations and not self._leases.is_sent(number))
            for number, ticket in self._leases.grants().items()
        ]

    @property
    def warm_bytes(self) -> int:
        """Count the bytes that the system has given, in use or kept warm."""
        return self._arena.warm_bytes

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

    def _count(self, copied: torch.Tensor) -> None:
        self.tensors_copied += 1
        self.bytes_copied += copied.nbytes

    def _own(self, ticket: Ticket[Place]) -> Block:
        place = ticket.place
        if place is None:
            raise AssertionError("bytes were granted without a place")
        try:
            place.segment.open()
        except BaseException:
            self.gate.release(ticket)
            raise
        return Block(self._leases.own(ticket), place)

    async def _run(self, block: Block, holder: Hashable, source: torch.Tensor | None) -> None:
        """Fill a block in the worker; if that fails, the pin is gone when it has ended."""
        copy = _Copy(block, holder, block.place.cold)
        try:
            running = self._worker.submit(partial(self._work, copy, source), partial(self._copied, copy))
        except BaseException:
            self.unpin_owner(block.number)
            raise
        self._copies.add(copy)
        try:
            await running
        except BaseException:
            copy.is_abandoned = copy.unpins = True
            if not copy.is_running:
                self.unpin_owner(block.number)
            raise
        finally:
            del running  # it has the error, whose traceback has this frame, and the callers' with the source

    def _work(self, copy: _Copy, source: torch.Tensor | None) -> None:
        """Get memory for a block, and copy a tensor into it; in the worker."""
        place = copy.block.place
        for chunk in copy.cold:
            if copy.is_abandoned:
                raise CopyAbandonedError
            place.segment.fill([chunk])
            copy.filled.append(chunk)
        if source is not None:
            placements.copy_in_threads(source, place, lambda: copy.is_abandoned, self._worker.helper)

    def _copied(self, copy: _Copy) -> None:
        copy.is_running = False
        self._copies.discard(copy)
        copy.block.place.segment.filled(copy.filled)
        if copy.unpins:
            self.unpin_owner(copy.block.number)

    def _let_go(self, segment: Segment) -> None:
        """Unmap a segment: in the worker, behind the copies into it, since much memory takes milliseconds."""
        if segment.is_open:
            self._worker.begin("unmapping", segment.close)

    def _give_back(self, ticket: Ticket[Place] | None) -> None:
        if ticket is None:
            return
        self.gate.release(ticket)
        if self._trimming is None and self._keep_warm_s is not None and not self._is_closed:
            self._trimming = self._loop.call_later(self._keep_warm_s, self._trim)

    def _trim(self) -> None:
        """Give back what has been idle for long; come again if something may be by then."""
        self._trimming = None
        if self._keep_warm_s is None:
            return
        segment, chunks = self._arena.take_idle(self._loop.time() - self._keep_warm_s)
        if chunks:
            self._worker.begin("giving memory back", partial(segment.give_back, chunks))
        if segment.has_idle:
            self._trimming = self._loop.call_later(self._keep_warm_s, self._trim)
