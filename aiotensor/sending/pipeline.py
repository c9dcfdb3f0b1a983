"""The sending pipeline: permit, memory, placement, announcement and rollback.

    permit -> a receiver that reads -> bytes -> placement -> announcement    a failure rolls back all steps

A block of shared memory is pinned by the tensor announced over it until the receiver releases it.
"""

import weakref
from collections.abc import Awaitable, Callable, Sequence

import torch

from aiotensor.protocol.frames import ARENA, INLINE, Put
from aiotensor.runtime import tracing
from aiotensor.sending.gates import CapacityListener
from aiotensor.sending.grants import Grants
from aiotensor.sending.message import OPEN, Message, MessageState, put_of
from aiotensor.sending.readiness import Readiness
from aiotensor.sending.session import Session
from aiotensor.sending.sessions import Sessions
from aiotensor.sending.settings import Settings
from aiotensor.sending.sizes import new_empty, sizes_of, too_large
from aiotensor.statistics.counters import ErrorCounter
from aiotensor.tensors.allocations import Allocation, Block
from aiotensor.tensors.copying import CopyAbandonedError
from aiotensor.tensors.inline import bytes_of
from aiotensor.tensors.placement import (
    Placed,
    Plan,
    plan_placement,
)
from aiotensor.tensors.source import Sendable, Source, as_source
from aiotensor.transports.base import Mover
from aiotensor.transports.endpoints import Route
from aiotensor.types import TensorHandle

__all__ = ["FEW_MESSAGES", "Pipeline"]

# With at most this many messages in flight, the receiver probably waits for the next one, so it is sent
# immediately. With more, the messages announced in one iteration of the event loop share a record.
FEW_MESSAGES = 2


class Pipeline:
    """Send the tensors of one sender; belongs to the running loop.

    Args:
        sender: the id of the sender.
        route: makes the connector to the receiver.
        settings: the limits of the sender.
        counts: the counters of the sender.
        errors: counts the errors of the calls of the sender.
        listeners: the objects to notify when a new message may have become possible.

    Attributes:
        sender: the id of the sender.
        label: the address or the name of the endpoint.
        grants: the messages in flight, with their permits and memory.
        sessions: the connections to receivers.
        readiness: the waits for a receiver.
    """

    def __init__(
        self,
        sender: str,
        route: Route,
        settings: Settings,
        counts: dict[str, int],
        errors: ErrorCounter,
        listeners: "weakref.WeakSet[CapacityListener]",
    ) -> None:
        self.grants = Grants(
            settings, counts, errors, listeners, lambda: self.sessions.receiver_pid, route.label
        )
        self.sessions = Sessions(sender, route, self.grants)
        self.sender = sender
        self.label = route.label
        self._permits = self.grants.permits
        self._memory = self.grants.memory
        self._max_bytes = settings.max_bytes
        self.readiness = Readiness(self.sessions, self.grants, settings.max_wait_s)

    def open(self) -> None:
        """Begin to connect; errors are those of `Connector.connect`."""
        try:
            self.sessions.connect()
        except BaseException:
            self.abort()
            raise

    async def close(self, copied: Callable[[], Awaitable[None]]) -> None:
        """End all waiting calls, and close the session; cancellation skips all waits.

        Args:
            copied: called after the unfinished messages were discarded; waits until the tensors of posted
                messages are copied.
        """
        memory = self._memory
        memory.freed.collect_all()
        self.grants.is_closed = True
        self.grants.fail()
        try:
            for message in [one for one in self.grants.messages if one.state is MessageState.OPEN]:
                if not message.is_finished:
                    self.abandon(message)
            await copied()
            # The session is closed before any other wait: without its last frame, the receiver treats this
            # sender, and all messages that it sent, as lost.
            await self.sessions.close(uses_memory=bool(memory.allocations.by_number))
            self.sessions.abort()
            await memory.aclose()
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the session and release the memory without waiting."""
        self.grants.is_closed = True
        self.sessions.abort()
        self._memory.close()
        self.grants.drainers.wake()

    # Messages

    async def begin(self, allocation: Allocation | None = None) -> Message:
        """Wait for a permit, and assign it to a new message.

        Args:
            allocation: the block that the message will send, which cannot be freed during this wait; None for
                other tensors.
        """
        grants = self.grants
        if self.sessions.outage.is_too_long:
            raise self.sessions.unavailable()
        permit = self._permits.budget.try_request(1)
        if permit is None:
            waiting = self._permits.acquire(1) if allocation is None else grants.permit_with(allocation)
            permit = await waiting
        message = Message(permit)
        grants.messages[message] = None
        return message

    def begin_nowait(self, nbytes: int) -> Message:
        """Assign a permit to a new message without waiting, or raise an error.

        Args:
            nbytes: the bytes of shared memory that the call needs, for the text of the error.

        Raises:
            WouldBlockError: no permit is free, or no receiver is connected and reading.
            RefusedError: the last receiver refused this sender, and may still be running.
        """
        sessions = self.sessions
        if not sessions.is_ready:
            raise self.readiness.refusal(nbytes)
        permit = self._permits.budget.try_request(1)
        if permit is None:
            raise self.grants.holders.would_block("no permit is free", 1, nbytes)
        message = Message(permit)
        self.grants.messages[message] = None
        return message

    def complete(self, message: Message) -> None:
        """Complete a message after its last tensor: send an `End` frame, and mark the message as whole."""
        session = self.sessions.current
        if message.number is None or session is None:
            self.grants.end(message, MessageState.DISCARDED)  # an empty message was never announced
            return
        session.end(message.number)
        if len(self.grants.messages) <= FEW_MESSAGES:
            session.flush()
            self.grants.check_open(message)
        self.grants.make_whole(message)

    def abandon(self, message: Message) -> None:
        """Discard a message, including any tensors already announced."""
        if message.has_ended:
            return
        self.grants.end(message, MessageState.DISCARDED)
        self.grants.counts["messages_discarded"] += 1
        session = self.sessions.current
        if message.number is not None and session is not None:
            session.discard(message.number)

    def abandon_number(self, number: int) -> None:
        """Discard a message by its number, if it has not ended."""
        session = self.sessions.current
        message = None if session is None else session.announced.get(number)
        if message is not None:
            self.abandon(message)

    def abandon_all(self) -> int:
        """Discard every message in flight, and return their number."""
        messages = list(self.grants.messages)
        for message in messages:
            self.abandon(message)
        return len(messages)

    # Tensors

    def prepare(self, value: Sendable) -> tuple[Source, Plan]:
        """Validate a value, and plan how to send it; an error has no effect on any resource."""
        source = as_source(value)
        plan = plan_placement(source, self._memory.allocations)
        if plan.new_bytes > self._max_bytes:
            raise too_large(plan.new_bytes, self._max_bytes)
        return source, plan

    async def put(self, message: Message, source: Source, plan: Plan, *, last: bool) -> TensorHandle:
        """Wait for a receiver that reads and for memory, place a tensor, and announce it."""
        # Only this check bounds the transport's queue: no call adds to the queue while it is not empty.
        session = self.sessions.current
        if session is None or not session.transport.is_writable or self.sessions.needs_admission:
            await tracing.step("wait for a receiver", self.readiness.receiver_reads(message))
        if message.state is not OPEN:
            raise self.grants.error(message)
        allocation = plan.allocation
        if allocation is None:
            if not plan.new_bytes:
                return self._announce(message, source, Placed(INLINE, bytes_of(source)), None, last=last)
        elif not (plan.new_bytes or allocation.block.place.segment.is_retired):
            mover = self.sessions.mover
            if mover is not None:
                await self._move_allocated(mover, message, source, allocation)
            placed = Placed(ARENA, allocation.block.place.describe(source.data_ptr() - allocation.start))
            return self._announce(message, source, placed, allocation.block, last=last)
        block = self._memory.try_acquire(source.nbytes, message)
        if block is None:
            block = await self.grants.block(source.nbytes, message, allocation)
        return await self.put_into(block, message, source, last=last)

    def can_announce_now(self, plan: Plan) -> bool:
        """Return whether a tensor can be announced at once, because it need not be copied or moved."""
        sessions = self.sessions
        is_in_place = not plan.new_bytes and (plan.allocation is None or sessions.mover is None)
        return is_in_place and sessions.is_ready

    def announce_now(self, message: Message, source: Source, plan: Plan, *, last: bool) -> TensorHandle:
        """Announce a tensor without a copy; only after `can_announce_now` has returned True."""
        if plan.allocation is None:
            return self._announce(message, source, Placed(INLINE, bytes_of(source)), None, last=last)
        offset = source.data_ptr() - plan.allocation.start
        placed = Placed(ARENA, plan.allocation.block.place.describe(offset))
        return self._announce(message, source, placed, plan.allocation.block, last=last)

    def block_nowait(self, message: Message, nbytes: int) -> Block:
        """Pin a block for a tensor of a message, or raise `WouldBlockError`."""
        block = self._memory.try_acquire(nbytes, message)
        if block is None:
            raise self.grants.holders.would_block("not enough shared memory is free", 1, nbytes)
        return block

    def copy_now(self, source: Source, block: Block) -> None:
        """Copy a tensor to a block on this thread; an error removes the pin of the block's owner."""
        try:
            self._memory.copy_now(source, block)
        except BaseException:
            self._memory.unpin_owner(block.number)
            raise

    def announce_copy(self, block: Block, message: Message, source: Source, *, last: bool) -> TensorHandle:
        """Announce a tensor that is in a block, and remove the pin of the block's owner in any case."""
        try:
            placed = Placed(ARENA, block.place.describe(0))
            return self._announce(message, source, placed, block, last=last)
        finally:
            self._memory.unpin_owner(block.number)

    def begin_announced(self, message: Message) -> int:
        """Return the number of a message; announce it with a `Begin` frame if it has none."""
        if message.number is None:
            message.number = self._session().begin(message)
        return message.number

    async def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, message: Message | None = None
    ) -> torch.Tensor:
        """Wait for a block, and return a tensor over it, which owns the block.

        Args:
            shape: the sizes of the tensor's dimensions, in elements.
            dtype: the type of the tensor's elements.
            message: the open message to which the memory is accounted; None for no message.
        """
        sizes, nbytes = sizes_of(shape, dtype, self._max_bytes)
        if nbytes == 0:
            return new_empty(sizes, dtype)
        block = self._memory.try_acquire(nbytes, message)
        if block is None:
            block = await self.grants.block_to_allocate(nbytes, message)
        try:
            if message is not None:
                self.grants.check_open(message)  # it may have ended while waiting
        except BaseException:
            self._memory.unpin_owner(block.number)
            raise
        try:
            tensor = await self._memory.tensor_over(block, dtype, sizes, message)
        except CopyAbandonedError:
            raise self.grants.error(message) from None
        if self.grants.is_closed:
            raise self.grants.error()
        return tensor

    # Steps

    async def put_into(
        self, block: Block, message: Message, source: Source, *, last: bool, is_copied: bool = False
    ) -> TensorHandle:
        """Copy or move a tensor, announce it, and remove the pin of its block's owner in any case.

        Args:
            block: the block.
            message: the message.
            source: the tensor.
            last: whether it is the last tensor of the message.
            is_copied: whether the block already contains the tensor, so that it is only moved.
        """
        try:
            if message.state is not OPEN:  # it may have ended while waiting
                raise self.grants.error(message)
            mover = self.sessions.mover
            if mover is not None:
                self._attach(message, block)
        except BaseException:
            self._memory.unpin_owner(block.number)
            raise
        try:
            if mover is not None:
                await self._memory.move(mover, source, block, message, is_copied=is_copied)
            elif not is_copied:
                await self._memory.copy(source, block, message)
        except CopyAbandonedError:
            raise self.grants.error(message) from None
        try:
            if not self.sessions.is_ready:
                await tracing.step("wait for a receiver", self.readiness.receiver_reads(message))
            if message.state is not OPEN:
                raise self.grants.error(message)
        except BaseException:
            self._memory.unpin_owner(block.number)
            raise
        return self.announce_copy(block, message, source, last=last)

    async def _move_allocated(
        self, mover: Mover, message: Message, source: Source, allocation: Allocation
    ) -> None:
        """Move the bytes of a tensor from `allocate` to a receiver on another machine."""
        self._attach(message, allocation.block)
        offset = source.data_ptr() - allocation.start
        data = allocation.block.place.view()[offset : offset + source.nbytes]
        try:
            moving = self._memory.moves.run(mover, allocation.block, offset, data, message)
            await tracing.step("move", moving, len(data))
        except CopyAbandonedError:
            raise self.grants.error(message) from None
        self.grants.check_open(message)

    def _attach(self, message: Message, block: Block) -> None:
        """Share the segment of a block with the receiver, once."""
        if not block.place.segment.is_attached:
            self._session().attach(block.place.segment)
            self.grants.check_open(message)

    def _session(self) -> Session:
        """Return the current session; its loss would have ended the open message of the caller."""
        if self.sessions.current is None:
            raise AssertionError("an open message has no session")
        return self.sessions.current

    def _announce(
        self, message: Message, source: Source, placed: Placed, block: Block | None, *, last: bool
    ) -> TensorHandle:
        """Announce a tensor with a `Put` frame, after which the receiver decides when its memory is free."""
        trace = None if (tracer := tracing.tracer) is None else tracer.context()
        session, number = self.sessions.current, None
        if session is None:
            raise AssertionError("an open message has no session")
        if block is not None:
            number = block.number
            if not block.place.segment.is_attached:
                self._attach(message, block)
            self._memory.announced(number, message, is_whole=last)
        if message.number is None:
            message.number = session.connection.next_message
        put = put_of(message.number, message.count, source, placed, number, last=last, trace=trace)
        session.put(message, put, flush=last and len(self.grants.messages) <= FEW_MESSAGES)
        if message.state is not OPEN:  # writing the frame failed
            raise self.grants.error(message)
        return self._announced(message, source, put)

    def _announced(self, message: Message, source: Source, put: Put) -> TensorHandle:
        """Count a tensor whose `Put` was sent or will be sent, and return its handle."""
        grants = self.grants
        message.count += 1
        grants.counts["tensors_sent"] += 1
        grants.counts["bytes_sent"] += source.nbytes
        if put.last:
            grants.make_whole(message)
        return TensorHandle(self.sender, put.message, put.tensor, put.dtype, put.shape, put.device)
