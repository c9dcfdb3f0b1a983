"""Shared memory for tensors to send: granted in order, filled by a worker, released with the last pin."""

import asyncio
import ctypes
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import torch

from aiotensor.errors import ProtocolError
from aiotensor.memory.arena import Arena, Block, Extent, Segment
from aiotensor.memory.copying import QUICK_BYTES, CopyAbandonedError, copy_in_threads, copy_now
from aiotensor.memory.gates import Gate, WaitLimits
from aiotensor.memory.mapping import TokenEnd
from aiotensor.memory.mappings import (
    ForeignExtent,
    ForeignSegment,
    Forwardable,
    ForwardedBlock,
    LeasedSegment,
)
from aiotensor.memory.pages import Range
from aiotensor.memory.placement import Allocation
from aiotensor.memory.source import Source, is_flat
from aiotensor.memory.tensors import Watch, flat_bytes, view_over
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.frames import MAX_TOKENS
from aiotensor.protocol.network import Area, Move
from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.descriptors import Descriptor
from aiotensor.runtime.worker import Worker
from aiotensor.transports.base import Mover

_GRACE_S = 0.5  # longer than a killed process takes to end
_MAX_FOREIGN = 8  # segments; with that of the arena, at most `MAX_SEGMENTS` of the protocol
# Longer copies take tens of milliseconds. The worker performs them in a separate thread, so that they do not
# delay short copies.
_SHORT_COPY_BYTES = 16 << 20


class _Copy(msgspec.Struct, eq=False):
    """A copy in the worker, or only the preparation of the memory of a block."""

    block: Block
    holder: Hashable
    cold: list[Range]  # the part of the block that has no memory yet
    filled: list[Range] = []
    has_begun: bool = False
    is_abandoned: bool = False
    unpins: bool = False  # its call has failed or was cancelled: the end of the copy removes the pin
    running: "asyncio.Future[None] | None" = None  # set while the call waits


class _Departure(msgspec.Struct, eq=False):
    """The blocks of one segment that a lost reader may read, once for each pin, until it cannot any more."""

    blocks: Sequence[Block | ForwardedBlock]
    end: TokenEnd | None = None
    timer: asyncio.TimerHandle | None = None
    is_overdue: bool = False  # the reader has the segment for longer than `_GRACE_S`
    keeps_bytes: bool = True  # the blocks are pinned; otherwise, only their places are kept

    def cancel(self) -> None:
        """Stop waiting."""
        if self.end is not None:
            self.end.cancel()
        if self.timer is not None:
            self.timer.cancel()


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


class Memory:
    """Grant blocks of the arena, copy into them, and release them; belongs to the running loop.

    Args:
        limit: the maximum number of bytes in use.
        keep_warm_s: the idle time in seconds after which memory is returned to the system; None for never.
        counts: the counters `tensors_copied`, `bytes_copied` and `bytes_forwarded`, among others.
        limits: the limits on waits for bytes.
        stuck_elsewhere: detects deadlocks; see `Gate`.
        segment_closed: called with each segment of a peer in which no block is in use, and none will be.

    Attributes:
        gate: the waits for bytes.
        freed: the blocks of freed tensors from `allocate`, which are still to be released.
        allocations: the blocks that callers own, by their numbers.
        blocks: the blocks in use, by their numbers.
        movers: the objects that move bytes to peers on other machines.
    """

    def __init__(
        self,
        limit: int,
        keep_warm_s: float | None,
        counts: dict[str, int],
        limits: WaitLimits = WaitLimits(),  # noqa: B008 - it is immutable
        *,
        stuck_elsewhere: Callable[[], int] | None = int,
        segment_closed: Callable[[ForeignSegment], object] = lambda segment: None,
    ) -> None:
        self._arena = Arena(limit)
        self._segment_closed = segment_closed
        self.gate: Gate[Extent] = Gate(
            limit,
            limits,
            space=self._arena,
            stuck_elsewhere=stuck_elsewhere,
            what="shared memory",
            reason="not enough shared memory was free",
            step="wait for memory",
        )
        self.freed: FreedItems[Watch] = FreedItems(self._release_allocations)
        self.allocations: dict[int, Allocation] = {}
        self.blocks: dict[int, Block | ForwardedBlock] = {}
        self._numbers = itertools.count()
        self.movers: set[Mover] = set()
        self._moves: dict[PendingMove, None] = {}
        self._worker = Worker("aiotensor-sender")
        self._counts = counts
        self._copies: set[_Copy] = set()  # those that have not ended
        self._keep_warm_s = keep_warm_s
        self._trimming: asyncio.TimerHandle | None = None
        self._departures: dict[_Departure, None] = {}
        self._foreign: dict[LeasedSegment, ForeignSegment] = {}
        self._foreign_numbers = itertools.count(self._arena.number + 1)
        self._unmapped: FreedItems[ForeignSegment] = FreedItems(self._foreign_unmapped)
        self._is_closed = False

    def bind(self) -> None:
        """Pass freed tensors to the running loop; called once, when the object that owns the memory opens."""
        self.freed.bind()
        self._unmapped.bind()

    async def acquire(self, nbytes: int, holder: Hashable = None) -> Block:
        """Wait for a block, and pin it for its owner; errors are those of `Gate.acquire`.

        Raises:
            OSError: the machine has no descriptors or no addresses left.
        """
        return self._own(await self.gate.acquire(nbytes, holder))

    def try_acquire(self, nbytes: int, holder: Hashable = None) -> Block | None:
        """Return a block that is pinned for its owner; None if none is free or calls are waiting."""
        ticket = self.gate.try_request(nbytes, holder)
        if ticket is None:
            return None
        place = ticket.place
        if place is None or not place.segment.memory:
            return self._own(ticket)
        number = next(self._numbers)  # as `_own`, without a call
        block = self.blocks[number] = Block(number, place=place, ticket=ticket)
        return block

    def copy_now(self, source: Source, block: Block) -> None:
        """Copy a tensor to a block on this thread; an error leaves the pin of the owner.

        Raises:
            OSError: the machine has no memory left.
        """
        place, segment = block.place, block.place.segment
        if not segment.warm.has(place.offset, place.nbytes):
            cold = self._arena.prepare(place.offset, place.nbytes, self._arena.memory_limit)
            filled: list[Range] = []
            try:
                segment.provide(cold, filled)
            finally:
                segment.filled(cold, filled)
        copy_now(source, place)
        self._count(source)

    async def copy(self, source: Source, block: Block, holder: Hashable) -> None:
        """Copy a tensor to a block, in a worker unless this is quick; an error removes the pin of the owner.

        Cancellation stops the copy; the pin is removed when the worker has stopped.

        Raises:
            CopyAbandonedError: `abandon` was called for the holder, or this object was closed.
            OSError: the machine has no memory left.
        """
        place, segment = block.place, block.place.segment
        is_warm = source.nbytes <= QUICK_BYTES and segment.warm.has(place.offset, place.nbytes)
        if is_warm and is_flat(source):
            memory = segment.memory  # keeps it mapped during the copy
            if not memory:
                self.unpin_owner(block)
                raise CopyAbandonedError
            ctypes.memmove(segment.address + place.offset, source.data_ptr(), source.nbytes)
        else:
            await tracing.step("copy", self._fill(block, holder, source), source.nbytes)
        self._counts["tensors_copied"] += 1
        self._counts["bytes_copied"] += source.nbytes

    async def tensor_over(
        self, block: Block, dtype: torch.dtype, shape: tuple[int, ...], holder: Hashable
    ) -> torch.Tensor:
        """Return a tensor over a block, which becomes its owner; an error removes the pin of the owner.

        Raises:
            CopyAbandonedError: `abandon` was called for the holder, or this object was closed.
            OSError: the machine has no memory left.
        """
        place = block.place
        if not place.segment.warm.has(place.offset, place.nbytes):
            await tracing.step("provide memory", self._fill(block, holder, None), place.nbytes)
        try:
            if self._is_closed:
                raise CopyAbandonedError
            tensor, owner = view_over(place.segment.memory, place.offset, dtype, shape)
        except BaseException:
            self.unpin_owner(block)
            raise
        watch = Watch(owner, self.freed)
        watch.number = block.number
        start = place.segment.address + place.offset
        self.allocations[block.number] = Allocation(block, start, start + place.nbytes, watch)
        return tensor

    async def _fill(self, block: Block, holder: Hashable, source: Source | None) -> None:
        """Provide the memory of a block, and copy a tensor into it unless it is None, in the worker.

        Cancellation and errors are those of `copy`.
        """
        place, segment = block.place, block.place.segment
        cold = self._arena.prepare(place.offset, place.nbytes, self._arena.memory_limit)
        copy = _Copy(block, holder, cold)
        try:
            running = self._worker.submit(
                partial(self._work, copy, source),
                partial(self._copied, copy),
                takes_long=place.nbytes > _SHORT_COPY_BYTES,
            )
        except BaseException:
            segment.filled(cold, [])
            self.unpin_owner(block)
            raise
        copy.running = running
        self._copies.add(copy)
        try:
            await running
        except BaseException:
            copy.is_abandoned = copy.unpins = True
            if copy not in self._copies:
                self.unpin_owner(block)
            raise
        finally:
            # The future refers to the error, whose traceback would keep this frame and the frames of the
            # callers alive, with the source.
            copy.running = None
            del running

    def _work(self, copy: _Copy, source: Source | None) -> None:
        """Provide the memory of a block, and copy a tensor into it; runs in the worker."""
        copy.has_begun = True
        place = copy.block.place
        place.segment.provide(copy.cold, copy.filled, lambda: copy.is_abandoned)
        if copy.is_abandoned:
            raise CopyAbandonedError
        if source is not None:
            copy_in_threads(source, place, lambda: copy.is_abandoned, self._worker.helper)

    def _copied(self, copy: _Copy) -> None:
        self._copies.discard(copy)
        copy.block.place.segment.filled(copy.cold, copy.filled)
        if copy.unpins:
            self.unpin_owner(copy.block)

    async def move(
        self, mover: Mover, source: Source, block: Block, holder: Hashable, *, is_copied: bool = False
    ) -> None:
        """Move a tensor to a peer on another machine; if it is not flat, copy it to its block first.

        An error removes the pin of the owner. Cancellation stops the copy and the move.

        Args:
            mover: the mover of the connection to the peer.
            source: the tensor.
            block: its block.
            holder: the argument of `abandon` that stops the copy and the move.
            is_copied: whether the block already contains the tensor, which may have changed since.

        Raises:
            CopyAbandonedError: `abandon` was called for the holder, or the peer is gone.
            OSError: the machine has no memory left.
        """
        if is_flat(source) and not is_copied:
            data = flat_bytes(source).data
            self._count(source)
        else:
            if not is_copied:
                await self.copy(source, block, holder)
            data = block.place.view()[: source.nbytes]
        try:
            await tracing.step("move", self.run_move(mover, block, 0, data, holder), len(data))
        except BaseException:
            self.unpin_owner(block)
            raise

    def begin_move(
        self,
        mover: Mover,
        block: Block,
        offset: int,
        data: memoryview,
        holder: Hashable,
        ended: Callable[[bool], object],
    ) -> PendingMove:
        """Begin to move bytes of a block to a peer on another machine, and return the move.

        The block is pinned until no byte of it is in transit, even if its message ends earlier. Otherwise,
        these bytes could mix with those of the next block at the same place.

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
            del self._moves[pending]
            pending.move = None  # it refers to this function and to the bytes
            pending.report(is_complete=is_complete)  # which may announce the block
            block.moves -= 1
            if not (block.is_owned or block.sent or block.moves):
                self._release(block)

        block.moves += 1
        self._moves[pending] = None
        area = Area(place.segment.number, place.offset)
        pending.move = Move(area, place.nbytes, place.offset + offset, data, len(data), move_ended)
        mover.move(pending.move)
        return pending

    async def run_move(
        self, mover: Mover, block: Block, offset: int, data: memoryview, holder: Hashable
    ) -> None:
        """Move bytes of a block, and wait until the source may change; a short move needs no wait.

        Cancellation stops the move between two steps. Arguments are those of `begin_move`.

        Raises:
            CopyAbandonedError: `abandon` was called for the holder, or the connection has ended.
        """
        moved: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def ended(is_complete: bool) -> None:
            if not moved.done():
                moved.set_result(is_complete)

        pending = self.begin_move(mover, block, offset, data, holder, ended)
        try:
            is_complete = await moved
        except BaseException:
            pending.stop()
            raise
        if not is_complete:
            raise CopyAbandonedError

    async def forward(self, source: Source, found: Forwardable) -> ForwardedBlock | None:
        """Return the block of a peer that contains a tensor, pinned for its owner; None if it must be copied.

        Raises:
            OSError: no thread can be started.
        """
        if found.segment.mapped.is_quick(*found.pages(source)):
            return self.forward_now(source, found)
        is_possible = await self._worker.submit(partial(found.isolate, source))
        return self._forwarded(source, found) if is_possible else None

    def forward_now(self, source: Source, found: Forwardable) -> ForwardedBlock | None:
        """Do the same on this thread."""
        return self._forwarded(source, found) if found.isolate(source) else None

    def _forwarded(self, source: Source, found: Forwardable) -> ForwardedBlock | None:
        leased = found.segment
        foreign = self._foreign.get(leased)
        if foreign is None:
            locks, tokens, owner = leased.mapped.locks, leased.mapped.tokens, leased.owner
            if locks is None or owner is None or len(tokens) + 2 > MAX_TOKENS or self._is_closed:
                return None
            if len(self._foreign) >= _MAX_FOREIGN:
                idle = next((one for one in self._foreign.values() if not one.in_use), None)
                if idle is None:
                    return None
                self._close_foreign(idle)
            foreign = ForeignSegment(next(self._foreign_numbers), leased, locks, owner, tokens)
            self._foreign[leased] = leased.forwards[self._unmapped] = foreign
        pages = found.pages(source)
        if foreign.overlaps(*pages):
            return None
        self._counts["bytes_forwarded"] += source.nbytes
        place = ForeignExtent(foreign, found.offset, source.nbytes)
        block = ForwardedBlock(next(self._numbers), place=place, source=source)
        self.blocks[block.number] = block
        foreign.in_use[block] = pages
        return block

    def _foreign_unmapped(self, segments: Sequence[ForeignSegment]) -> None:
        for foreign in segments:
            foreign.is_unmapped = True
            if not foreign.in_use:
                self._close_foreign(foreign)

    def _close_foreign(self, foreign: ForeignSegment) -> None:
        """Detach a segment of a peer from all readers; no forwarded block in it is in use."""
        if self._foreign.pop(foreign.segment, None) is not None:
            foreign.segment.forwards.pop(self._unmapped, None)
            self._segment_closed(foreign)
            foreign.close()

    def abandon(self, holder: Hashable) -> None:
        """Stop the copies and moves of a holder; calls whose copies have not begun raise at once."""
        for copy in self._copies:
            if copy.holder is holder:
                copy.is_abandoned = True
                if not (copy.has_begun or copy.running is None or copy.running.done()):
                    copy.running.set_exception(CopyAbandonedError())
        for move in [move for move in self._moves if move.holder is holder]:
            move.stop()

    def unaccounted_bytes(self, blocks: Iterable[Block]) -> int:
        """Return how many bytes of the given blocks are accounted to no open message."""
        tickets = [block.ticket for block in blocks]
        return sum(ticket.amount for ticket in tickets if ticket.holder not in self.gate.held)

    def account(self, block: Block, holder: Hashable) -> None:
        """Account a block to a holder; None accounts it to no holder."""
        self.gate.reassign(block.ticket, holder)

    def pin(self, numbers: Iterable[int], count: int = 1) -> None:
        """Pin blocks for announcements that are accounted to no message."""
        for number in numbers:
            self.blocks[number].sent += count

    def unpin(self, numbers: Iterable[int], pins: dict[int, int] | None = None) -> None:
        """Remove the pin of one announcement from each block.

        Args:
            numbers: the numbers of the blocks.
            pins: the number of announcements of each block that a peer has not released, which is counted
                down; None to count nothing.

        Raises:
            ProtocolError: the peer has released a block more often than it was announced.
        """
        for number in numbers:
            if pins is not None:
                count = pins.pop(number, 0)
                if count > 1:
                    pins[number] = count - 1
                elif not count:
                    raise ProtocolError(f"it released block {number} more often than it was announced")
            block = self.blocks[number]
            block.sent -= 1
            if block.is_owned or block.sent or block.moves:
                self.gate.refuse_if_stuck()  # perhaps only the owner holds the block now
            else:
                self._release(block)

    def unpin_owner(self, block: Block | ForwardedBlock) -> None:
        """Remove the pin of the owner, because this side no longer writes to the block."""
        block.is_owned = False
        if not (block.sent or block.moves):
            self._release(block)

    def _release_allocations(self, watches: Iterable[Watch]) -> None:
        for watch in watches:
            self.allocations.pop(watch.number, None)
            block = self.blocks[watch.number]
            block.is_owned = False  # as `unpin_owner`, without a call
            if not (block.sent or block.moves):
                self._release(block)

    def reader_lost(self, pins: Sequence[int], readings: Mapping[int, Descriptor]) -> None:
        """Keep the blocks that a lost reader may still read until it cannot any more.

        A killed process ends within moments. A process that lives on may have closed its connection and still
        use tensors: after `_GRACE_S`, the bytes of these blocks are granted again, at other places. They stay
        in use if too few addresses would remain for a block of any size.

        Args:
            pins: the numbers of the blocks, once for each announcement that the reader has not released.
            readings: the reading ends of the tokens of the segments that the reader may have, by their
                numbers.
        """
        if self._is_closed:
            return
        by_segment: dict[Segment | ForeignSegment, list[int]] = {}
        for number in pins:
            by_segment.setdefault(self.blocks[number].place.segment, []).append(number)
        for segment, numbers in by_segment.items():
            reading = readings.get(segment.number)
            if reading is None:
                self.unpin(numbers)
                continue
            departure = _Departure([self.blocks[number] for number in numbers])
            self._departures[departure] = None
            if isinstance(segment, Segment):
                loop = asyncio.get_running_loop()
                departure.timer = loop.call_later(_GRACE_S, self._stays_on, departure)
            departure.end = TokenEnd(reading, partial(self._departed, departure))

    def _stays_on(self, departure: _Departure) -> None:
        departure.is_overdue = True
        for block in departure.blocks:
            block.lost += 1
        self._grant_again(departure)

    def _grant_again(self, departure: _Departure) -> None:
        """Unpin the blocks of an overdue departure, unless too few addresses would remain."""
        kept = [one for one in self._departures if one is departure or not one.keeps_bytes]
        places = [block.place for one in kept for block in one.blocks]
        if self._arena.has_space_beside((place.offset, place.nbytes) for place in places):
            departure.keeps_bytes = False
            self.unpin(block.number for block in departure.blocks)

    def _departed(self, departure: _Departure) -> None:
        del self._departures[departure]
        departure.cancel()
        if departure.is_overdue:
            for block in departure.blocks:
                block.lost -= 1
        if departure.keeps_bytes:
            self.unpin(block.number for block in departure.blocks)
            return
        for block in {*departure.blocks}:
            if isinstance(block, Block) and not (block.lost or block.number in self.blocks):
                self._arena.lost_bytes -= block.place.nbytes
                self.gate.release(block.ticket)
        for other in list(self._departures):
            if other.is_overdue and other.keeps_bytes:
                self._grant_again(other)
        self._arena.take_excess(self._arena.memory_limit)
        self._trim()

    @property
    def kept_bytes(self) -> int:
        """The number of bytes in use of blocks that lost readers may still read."""
        blocks = {block for one in self._departures if one.keeps_bytes for block in one.blocks}
        return sum(block.ticket.amount for block in blocks if isinstance(block, Block))

    def holdings(self) -> list[tuple[Ticket[Extent], bool]]:
        """Return each grant in use, and whether its block belongs to a caller and no announcement pins it."""
        return [
            (block.ticket, number in self.allocations and not block.sent)
            for number, block in self.blocks.items()
            if isinstance(block, Block)
        ]

    def segments(self) -> Iterator[Segment | ForeignSegment]:
        """Iterate over the arena and the segments of peers."""
        yield self._arena
        yield from self._foreign.values()

    @property
    def largest_free(self) -> int:
        """The size in bytes of the largest block that could be granted now if no call waited."""
        budget = self.gate
        return min(budget.limit - budget.in_use, self._arena.blocks.largest_free)

    @property
    def warm_bytes(self) -> int:
        """The number of bytes that are backed by memory of the system, in use or kept warm."""
        return self._arena.warm.nbytes

    def usage(self, others: Gate[None], waiting: int = 0) -> dict[str, object]:
        """Return the fields of statistics about this memory, and about all waits of its object.

        Args:
            others: the gate for which calls of the object also wait.
            waiting: the number of further calls that wait.
        """
        gate = self.gate
        return {
            "waiting": others.waiting + gate.waiting + waiting,
            "longest_wait_s": max(others.longest_wait_s(), gate.longest_wait_s()),
            "arena_bytes": gate.limit,
            "bytes_in_use": gate.in_use,
            "peak_bytes_in_use": gate.peak,
            "warm_bytes": self.warm_bytes,
            "largest_free_bytes": self.largest_free,
            "memory_waits": gate.waited.waits(),
        }

    def describe(self, nbytes: int) -> str:
        """Describe the usage of this memory, and the bytes that a call has requested, for its error."""
        gate, requested = self.gate, f"{nbytes} bytes requested, " if nbytes else ""
        free = f"{self.largest_free} bytes free in one piece"
        return f"{gate.in_use} of {gate.limit} bytes in use, {requested}{free}"

    async def aclose(self) -> None:
        """Stop all copies, release all memory, wait for the worker and end it."""
        self._stop()
        await self._worker.settle()
        self._worker.close()

    def close(self) -> None:
        """Stop all copies, release all memory and end the worker, without waiting for running copies."""
        self._stop()
        self._worker.close()

    def _stop(self) -> None:
        self._is_closed = True
        for copy in self._copies:
            copy.is_abandoned = True
        if self._trimming is not None:
            self._trimming.cancel()
            self._trimming = None
        for departure in self._departures:
            sources = [block.source for block in departure.blocks if isinstance(block, ForwardedBlock)]
            if departure.end is not None and sources:
                # The readers of a peer's memory may still read it: only the tensors outlive this object.
                departure.end.ended = sources.clear
            else:
                departure.cancel()
        self._departures.clear()
        for block in self.blocks.values():
            if isinstance(block, ForwardedBlock):
                block.source = None
            else:
                block.ticket.holder = None  # a message, which may refer to the owner of this object
        self.gate.held.clear()
        for foreign in list(self._foreign.values()):
            self._close_foreign(foreign)
        arena = self._arena
        if arena.memory:
            # Another process may keep the segment mapped for a long time because of a small tensor, so the
            # unused pages are returned now. In the worker, since it takes milliseconds, and after all copies.
            arena.take_free()
            self._worker.begin("returning memory", arena.return_memory)
            self._worker.begin("unmapping", arena.close)

    def _count(self, copied: Source) -> None:
        self._counts["tensors_copied"] += 1
        self._counts["bytes_copied"] += copied.nbytes

    def _own(self, ticket: Ticket[Extent]) -> Block:
        place = ticket.place
        if place is None:
            raise AssertionError("bytes were granted without a place")
        if not place.segment.memory:
            try:
                place = ticket.place = self._arena.open_for(place)
            except BaseException:
                self.gate.release(ticket)
                raise
        block = Block(next(self._numbers), place=place, ticket=ticket)
        self.blocks[block.number] = block
        return block

    def _release(self, block: Block | ForwardedBlock) -> None:
        del self.blocks[block.number]
        if isinstance(block, ForwardedBlock):
            foreign = block.place.segment
            del foreign.in_use[block]
            block.source = None
            if foreign.is_unmapped and not foreign.in_use:
                self._close_foreign(foreign)
            return
        place = block.place
        for mover in tuple(self.movers):
            mover.free(place.segment.number, place.offset)
        grant = block.ticket
        if block.lost:  # only the bytes are released; another ticket keeps the place
            self._arena.lost_bytes += place.nbytes
            block.ticket = Ticket(0, None, 0.0, granted=True, place=place)
            grant.place = None
        self.gate.release(grant)
        if self._trimming is None and self._keep_warm_s is not None and not self._is_closed:
            self._trimming = asyncio.get_running_loop().call_later(self._keep_warm_s, self._trim)

    def _trim(self) -> None:
        """Return memory that was idle for `keep_warm_s` to the system; check again later if more is idle."""
        if self._trimming is not None:
            self._trimming.cancel()
            self._trimming = None
        arena = self._arena
        if self._keep_warm_s is not None:
            arena.take_idle(self._keep_warm_s)
            if arena.has_idle:
                self._trimming = asyncio.get_running_loop().call_later(self._keep_warm_s, self._trim)
        if arena.taken:
            self._worker.begin("returning memory", arena.return_memory)
