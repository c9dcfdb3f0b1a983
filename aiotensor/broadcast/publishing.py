"""The publishing pipeline: a turn, encoding, memory, placement and announcement.

    turn -> encoding -> memory, copies -> announcement to all subscribers     a failure rolls back all steps

Publications are numbered in the order of the calls, so one call at a time has the turn. With ``slow="wait"``,
a turn ends only when no subscriber is full, and further calls wait for it in their order.
"""

import asyncio
import mmap
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import torch

from aiotensor.broadcast.placement import Placement
from aiotensor.broadcast.reports import Reports
from aiotensor.broadcast.settings import PublisherSettings
from aiotensor.broadcast.subscribers import Subscribers
from aiotensor.codec.payload import Payload, pack
from aiotensor.errors import AioTensorError, ClosedError, TooLargeError, WouldBlockError
from aiotensor.protocol.audience import Item
from aiotensor.protocol.broadcast import Content, Publish
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.frames import ARENA, INLINE, encode_record
from aiotensor.runtime import tracing
from aiotensor.runtime.waiting import at_most
from aiotensor.sending.gates import Gate, StuckError
from aiotensor.sending.memory import Memory
from aiotensor.sending.sizes import new_empty, sizes_of, too_large
from aiotensor.statistics.counters import ErrorCounter
from aiotensor.tensors.allocations import Allocation, Block
from aiotensor.tensors.arena import Arena, Extent
from aiotensor.tensors.copying import QUICK_BYTES, CopyAbandonedError
from aiotensor.tensors.inline import MAX_INLINE_BYTES
from aiotensor.tensors.placement import Placed, plan_placement
from aiotensor.tensors.segments import Segment, whole_pages
from aiotensor.tensors.source import Source, as_source
from aiotensor.types import Published, PublisherStatistics

__all__ = ["Publishing"]

# Longer content is placed in shared memory, once for all subscribers.
_MAX_RECORD_CONTENT_BYTES = 2 * MAX_INLINE_BYTES

# The maximum number of tensors placed in one iteration of the event loop. Each takes a few microseconds.
_QUICK_TENSORS = 64
_QUICK_PLANS = 256  # the same for planning their placement

_STUCK = (
    "all shared memory is used by this message and by tensors from allocate() that no subscriber uses and "
    "that can only be published after this message: publish them first, free them, or raise arena_bytes; an "
    "allocated tensor is copied if it has gaps or is not aligned, or if an earlier publication of it is in "
    "use"
)


class Publishing:
    """Publish the messages of one publisher; belongs to the running loop.

    Args:
        publisher: the id of the publisher.
        settings: its limits.
        counts: its counters.
        errors: counts the errors of its calls.

    Attributes:
        memory: its shared memory.
        subscribers: its subscribers.
        is_closed: whether it was closed.
    """

    def __init__(
        self,
        publisher: str,
        settings: PublisherSettings,
        counts: dict[str, int],
        errors: ErrorCounter,
    ) -> None:
        self.is_closed = False
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._counts = counts
        self._max_bytes = whole_pages(settings.max_bytes)
        self._kept_turn: Ticket[None] | None = None  # kept until no subscriber is full
        self.memory = Memory(
            self._max_bytes,
            self._gate_over,
            settings.keep_warm_s,
            counts,
            settings.max_wait_s,
            lambda nbytes: self._reports.overdue("other copies were in progress", nbytes),
            alignment=mmap.PAGESIZE,  # subscribers drop the pages of one block without changing others
            segment_closed=self._segment_closed,
        )
        self._turns: Gate[None] = Gate(
            1,
            stuck_elsewhere=None,
            long_wait_s=settings.long_wait_s,
            on_long_wait=lambda _: self._reports.log_wait("slow subscribers, or earlier calls"),
            max_wait_s=settings.max_wait_s,
            overdue=lambda _: self._reports.overdue("subscribers were slow, or earlier calls waited", 0),
            step="wait for a turn",
        )
        self.subscribers = Subscribers(
            publisher, settings, counts, self.memory, self.statistics, self._subscribers_progressed
        )
        self._reports = Reports(settings, counts, errors, self._turns, self.memory, self.subscribers)

    def _gate_over(self, arena: Arena) -> Gate[Extent]:
        settings = self._settings
        return Gate(
            self._max_bytes,
            space=arena,
            stuck_elsewhere=self._held_by_callers,
            long_wait_s=settings.long_wait_s,
            on_long_wait=lambda nbytes: self._reports.log_wait(f"{nbytes} bytes of shared memory"),
            max_wait_s=settings.max_wait_s,
            overdue=lambda nbytes: self._reports.overdue("not enough shared memory was free", nbytes),
        )

    def end_calls(self) -> None:
        """End all waiting calls, and refuse further ones."""
        self.memory.freed.collect_all()
        self.is_closed = True
        self._turns.fail(_closed)
        self.memory.gate.fail(_closed)
        self.subscribers.changes.wake()

    async def close(self) -> None:
        """Release all memory, after the connections were closed; cancellation skips all waits."""
        self.end_calls()
        try:
            await self.memory.aclose()
        finally:
            self.memory.close()

    # Messages

    async def publish(self, message: object) -> Published:
        """Publish a message, as `Publisher.publish` does."""
        turn = await self._turns.acquire(1)
        placement = Placement()
        try:
            payload = await pack([message], has_sender=True, max_inline_bytes=sys.maxsize)
            del message
            self._check_open()
            if payload.tensors:
                await self._place(payload, placement)
            content = self._content_of(payload, placement)
            if len(placement.blocks) > _QUICK_PLANS:  # encoding and announcing them take milliseconds each
                await asyncio.sleep(0)
                self._check_open()
            if len(content) > _MAX_RECORD_CONTENT_BYTES:
                block = await self._copy(as_source(np.frombuffer(content, np.uint8)), placement)
                return self._announce_placed(placement, block, len(content))
            return self._announce(placement, INLINE, content, len(content), None)
        finally:
            self._end(turn, placement)

    def publish_nowait(self, message: object) -> Published:
        """Publish a message on this thread, as `Publisher.publish_nowait` does."""
        turn = self._turns.budget.try_request(1)
        if turn is None:
            raise self._reports.would_block("a subscriber is slow, or another call is publishing", 0)
        placement = Placement()
        try:
            payload = Payload(has_sender=True, max_inline_bytes=sys.maxsize)
            payload.encode([message])
            del message
            for source, allocation in list(self._plan(payload)):
                if not self._place_allocated(source, allocation, placement):
                    placement.add(source, *self._copy_now(source, placement))
            content = self._content_of(payload, placement)
            if len(content) > _MAX_RECORD_CONTENT_BYTES:
                _, block = self._copy_now(as_source(np.frombuffer(content, np.uint8)), placement)
                return self._announce_placed(placement, block, len(content))
            return self._announce(placement, INLINE, content, len(content), None)
        finally:
            self._end(turn, placement)

    async def wait_for_subscribers(self, count: int) -> None:
        """Wait until `count` subscribers are connected, as `Publisher.wait_for_subscribers` does."""
        try:
            async with at_most(self._settings.max_wait_s, lambda: self._reports.too_few(count)):
                while len(self.subscribers.connected) < count:
                    await self.subscribers.changes.wait()
                    self._check_open()
        except WouldBlockError:
            if len(self.subscribers.connected) < count:  # the last may have connected just now
                raise

    async def drain(self) -> None:
        """Wait until every subscriber has taken or lost all earlier publications."""
        before, backlogs = self.subscribers.next_number, self.subscribers.audience.backlogs
        while any(one.oldest is not None and one.oldest.number < before for one in backlogs.values()):
            await self.subscribers.changes.wait()
            self._check_open()

    async def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over a block that the caller owns, as `Publisher.allocate` does."""
        sizes, nbytes = sizes_of(shape, dtype, self._max_bytes)
        if nbytes == 0:
            return new_empty(sizes, dtype)
        block = await self._block(whole_pages(nbytes), None)
        try:
            tensor = await self.memory.tensor_over(block, dtype, sizes, None)
        except CopyAbandonedError:
            raise _closed() from None
        self._check_open()
        self.memory.gate.refuse_if_stuck()
        return tensor

    # Steps

    def _plan(self, payload: Payload) -> Iterator[tuple[Source, Allocation | None]]:
        """Plan the placement of each tensor; at the end, reject a message that can never be published."""
        used: dict[int, int] = {}
        body_bytes = len(payload.parts[0])
        new_bytes = whole_pages(body_bytes) if body_bytes > _MAX_RECORD_CONTENT_BYTES else 0
        for value in payload.tensors:
            source = as_source(value)
            allocation = plan_placement(source, self.memory.allocations).allocation
            if allocation is None or not self._can_carry(allocation, source):
                new_bytes += whole_pages(source.nbytes)
            else:
                used[allocation.block.number] = allocation.block.place.nbytes
            yield source, allocation
        self._check_fits(new_bytes, sum(used.values()))

    def _check_fits(self, new_bytes: int, allocated_bytes: int) -> None:
        """Check that a message fits into the arena, and into the memory that a subscriber may use."""
        if new_bytes > self._max_bytes:
            raise too_large(new_bytes, self._max_bytes)
        nbytes, limit = new_bytes + allocated_bytes, self._settings.max_held_bytes
        if limit is not None and nbytes > limit:
            raise TooLargeError(
                f"this message has {nbytes} bytes, more than max_held_bytes={limit} allows each subscriber "
                "to use: publish smaller parts, or raise max_held_bytes",
                limit=limit,
                requested=nbytes,
            )

    async def _place(self, payload: Payload, placement: Placement) -> None:
        planned = []
        for one in self._plan(payload):
            planned.append(one)
            if len(planned) % _QUICK_PLANS == 0:
                await asyncio.sleep(0)
                self._check_open()
        tensors = nbytes = 0  # placed in this iteration of the event loop, unless a copy has waited
        for source, allocation in planned:
            if tensors == _QUICK_TENSORS or nbytes > QUICK_BYTES:
                tensors = nbytes = 0
                await asyncio.sleep(0)
                self._check_open()
            tensors += 1
            if not self._place_allocated(source, allocation, placement):
                nbytes += source.nbytes
                block = await self._copy(source, placement)
                placement.add(source, Placed(ARENA, block.place.describe(0)), block)

    def _can_carry(self, allocation: Allocation, source: Source) -> bool:
        # While an earlier publication of the block is in use, a subscriber that has written to it keeps its
        # own copies of the pages, which would hide the new publication.
        return allocation.can_carry(source) and not self.memory.leases.is_sent(allocation.block.number)

    def _place_allocated(self, source: Source, allocation: Allocation | None, placement: Placement) -> bool:
        """Place an allocated tensor in its own block; return whether that was possible."""
        if allocation is None or not self._can_carry(allocation, source):
            return False
        placed = Placed(ARENA, allocation.block.place.describe(source.data_ptr() - allocation.start))
        placement.add(source, placed, allocation.block)
        return True

    async def _copy(self, source: Source, placement: Placement) -> Block:
        """Copy a source to a new block."""
        block = await self._block(whole_pages(source.nbytes), placement)
        try:
            await self.memory.copy(source, block, placement)
        except CopyAbandonedError:
            raise _closed() from None
        placement.owned.add(block.number)
        self._check_open()
        return block

    def _copy_now(self, source: Source, placement: Placement) -> tuple[Placed, Block]:
        """Copy a source to a new block on this thread."""
        nbytes = whole_pages(source.nbytes)
        self._make_space(nbytes)
        block = self.memory.try_acquire(nbytes, placement)
        if block is None:
            raise self._reports.would_block("not enough shared memory is free", nbytes)
        placement.owned.add(block.number)
        self.memory.copy_now(source, block)
        return Placed(ARENA, block.place.describe(0)), block

    async def _block(self, nbytes: int, holder: Placement | None) -> Block:
        """Wait for a block, and pin it."""
        self._make_space(nbytes)
        block = self.memory.try_acquire(nbytes, holder)
        if block is not None:
            return block
        self._loop.call_soon(self.subscribers.departures.make_way)
        try:
            return await self.memory.acquire(nbytes, holder)
        except StuckError:
            raise self._reports.would_block(_STUCK, nbytes) from None

    def _make_space(self, nbytes: int) -> None:
        """Forget the oldest publications of the history until there is space for a block."""
        while self.memory.largest_free < nbytes and self.subscribers.forget_oldest():
            pass

    def _content_of(self, payload: Payload, placement: Placement) -> bytes:
        """Encode the content of a message, and check that it fits into memory together with its tensors."""
        content = msgspec.msgpack.encode(Content(memoryview(payload.parts[0]), tuple(placement.tensors)))
        if len(content) > _MAX_RECORD_CONTENT_BYTES:  # many tensors make it longer than its body
            sizes, owned = dict(placement.blocks), placement.owned
            new_bytes = whole_pages(len(content)) + sum(sizes[block] for block in owned)
            self._check_fits(new_bytes, sum(size for block, size in sizes.items() if block not in owned))
        return content

    def _held_by_callers(self) -> int:
        """Count the bytes of tensors from `allocate` that no subscriber uses.

        Publishing them would wait for the call that has the turn, which waits for this memory.
        """
        self.memory.freed.collect_all()
        return sum(ticket.amount for ticket, is_unsent in self.memory.holdings() if is_unsent)

    def _announce_placed(self, placement: Placement, block: Block, nbytes: int) -> Published:
        """Announce a message whose content is in a block."""
        placement.use(block)
        return self._announce(placement, ARENA, block.place.describe(0), nbytes, block.number)

    def _announce(
        self, placement: Placement, kind: str, payload: bytes, nbytes: int, block: int | None
    ) -> Published:
        """Announce a message to all subscribers; from this point on, nothing is rolled back."""
        trace = None if (tracer := tracing.tracer) is None else tracer.context()
        subscribers = self.subscribers
        number = subscribers.next_number
        record = encode_record([Publish(number, kind, payload, nbytes, block, trace)])
        blocks, segments = tuple(placement.blocks), tuple(placement.segments)
        dropped = subscribers.publish(Item(number, record, time.monotonic(), blocks, segments))
        self._counts["published"] += 1
        inline_bytes = nbytes if block is None else 0
        self._counts["bytes_published"] += inline_bytes + sum(nbytes for _, nbytes in blocks)
        return Published(number, len(subscribers.connected), len(dropped))

    def _end(self, turn: Ticket[None], placement: Placement) -> None:
        """Release the memory that no subscriber uses, and the turn unless a slow subscriber delays it."""
        self.memory.gate.budget.settle(placement)
        for number in placement.owned:
            self.memory.unpin_owner(number)
        if self.subscribers.audience.delaying() and not self.is_closed:
            self._kept_turn = turn
        else:
            self._turns.release(turn)

    # Events

    def _subscribers_progressed(self) -> None:
        """Release the turn if the subscribers that delayed it have caught up."""
        turn = self._kept_turn
        if turn is not None and not self.subscribers.audience.delaying():
            self._kept_turn = None
            self._turns.release(turn)

    def _segment_closed(self, segment: Segment) -> None:
        if not self.is_closed:
            self.subscribers.detach(segment)

    def statistics(self) -> PublisherStatistics:
        """Return the current usage of the publisher, and its totals since opening."""
        return self._reports.statistics()

    def _check_open(self) -> None:
        if self.is_closed:
            raise _closed()


def _closed() -> AioTensorError:
    return ClosedError("this Publisher was closed")
