"""The messages in flight of a sender and their resources: a permit for each, and shared memory.

A message holds its permit until the receiver has taken all its tensors or either side has discarded it. When
the receiver is gone, all messages in flight are lost, and waiting calls raise an error. If the transport can
reconnect, later sends wait for the next receiver.

Permits and memory are granted in the order of the calls. A wait that could never end is refused: if messages
that wait for more memory hold all of it, one of them raises an error.
"""

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiotensor.errors import AioTensorError, ClosedError, DiscardedError, again
from aiotensor.protocol.credits import Ticket
from aiotensor.runtime.process_end import WatchProcess
from aiotensor.runtime.waiting import Waiters
from aiotensor.sending.gates import CapacityListener, Gate, StuckError
from aiotensor.sending.holders import Holders
from aiotensor.sending.memory import Memory
from aiotensor.sending.message import LOST, OPEN, WHOLE, Message, MessageState, innermost_block
from aiotensor.sending.settings import Settings
from aiotensor.statistics.counters import ErrorCounter, WaitCounter, snapshot
from aiotensor.tensors.allocations import Allocation, Block
from aiotensor.tensors.arena import Arena, Extent
from aiotensor.types import SenderStatistics

__all__ = ["Grants", "unopened_statistics"]

_STUCK = (
    "all shared memory is held by messages that wait for more of it, including this one, so the wait would "
    "never end: raise arena_bytes or lower max_concurrent_videos"
)
_STUCK_IN_COPY = (
    "this tensor from allocate() must be copied because it has gaps or is not aligned, or an earlier "
    "receiver may still read it, and its own memory leaves no room for the copy: send a clone of it, and "
    "free it"
)


class Grants:
    """The messages, permits and shared memory of one sender; belongs to the running loop.

    Args:
        settings: the limits of the sender.
        counts: the counters of the sender.
        errors: counts the errors of the calls of the sender.
        listeners: the objects to notify when a new message may have become possible.
        receiver_pid: returns the process id of the receiver, or None if none has answered.
        label: the address or the name of the endpoint.

    Attributes:
        is_closed: whether the sender was closed.
        messages: the messages in flight, the oldest first.
        drainers: the calls that wait for messages to end.
        changes: the calls that wait for a receiver.
        permits: the waits for permits.
        memory: the shared memory.
        holders: reports the holders of permits and memory.
    """

    def __init__(
        self,
        settings: Settings,
        counts: dict[str, int],
        errors: ErrorCounter,
        listeners: "weakref.WeakSet[CapacityListener]",
        receiver_pid: Callable[[], int | None],
        label: str,
    ) -> None:
        self.settings = settings
        self.counts = counts
        self.is_closed = False
        self.messages: dict[Message, None] = {}
        self.drainers = Waiters()
        self.changes = Waiters()
        self._errors = errors
        self._listeners = listeners
        self._is_wake_scheduled = False
        self._capacity_waits = 0  # the number of calls in `capacity`
        # The numbers of the allocated blocks whose sends wait, for a permit or for bytes. Such a block is not
        # freed during the wait, because the send refers to its tensor.
        self._await_permits: Counter[int] = Counter()
        self._await_bytes: Counter[int] = Counter()
        self.permits: Gate[None] = Gate(
            settings.max_messages,
            stuck_elsewhere=None,
            long_wait_s=settings.long_wait_s,
            on_long_wait=lambda _: self.holders.log_wait("a permit"),
            max_wait_s=settings.max_wait_s,
            overdue=lambda _: self.holders.overdue("no permit was free", 1, 0),
            step="wait for a permit",
        )
        self.memory = Memory(
            settings.max_bytes,
            self._gate_over,
            settings.keep_warm_s,
            counts,
            settings.max_wait_s,
            lambda nbytes: self.holders.overdue("other copies were in progress", 0, nbytes),
        )
        self.holders = Holders(self.messages, self.permits, self.memory, settings, receiver_pid, label)
        if listeners:
            self.notify_listeners()

    def _gate_over(self, arena: Arena) -> Gate[Extent]:
        settings = self.settings
        return Gate(
            settings.max_bytes,
            space=arena,
            stuck_elsewhere=self._stuck_in_sends,
            long_wait_s=settings.long_wait_s,
            on_long_wait=lambda nbytes: self.holders.log_wait(f"{nbytes} bytes of shared memory"),
            max_wait_s=settings.max_wait_s,
            overdue=lambda nbytes: self.holders.overdue("not enough shared memory was free", 0, nbytes),
        )

    def statistics(self) -> SenderStatistics:
        """Return the current usage of the sender, and its totals since opening."""
        memory, holders = self.memory, self.holders
        permits, budget = self.permits.budget, memory.gate.budget
        return snapshot(
            SenderStatistics,
            self.counts,
            max_concurrent_videos=permits.limit,
            in_flight=permits.in_use,
            peak_in_flight=permits.peak,
            waiting=permits.waiting + budget.waiting + len(memory.waiting_since),
            longest_wait_s=holders.longest_wait_s(),
            holders=tuple(holders.list()),
            arena_bytes=budget.limit,
            bytes_in_use=budget.in_use,
            peak_bytes_in_use=budget.peak,
            warm_bytes=memory.warm_bytes,
            largest_free_bytes=memory.largest_free,
            permit_waits=self.permits.waited.waits(),
            memory_waits=memory.gate.waited.waits(),
            errors=self._errors.counts(),
        )

    def fail_waiting(self, make_error: Callable[[], AioTensorError]) -> None:
        """End all current waits, each with a new error."""
        self.permits.fail_waiting(make_error)
        self.memory.gate.fail_waiting(make_error)
        self.changes.wake()

    def fail(self) -> None:
        """End all current and future waits for resources."""
        self.permits.fail(self.error)
        self.memory.gate.fail(self.error)

    # Messages

    async def drain(self) -> None:
        """Wait until all messages now in flight have ended."""
        sent = set(self.messages)
        while any(not message.has_ended for message in sent):
            await self.drainers.wait()
            if self.is_closed:
                break
        # The receiver may have taken all of them and then closed: no message is lost in that case.
        for message in sent:
            if message.state is LOST or not message.has_ended:
                raise self.error(message)

    def check_open(self, message: Message) -> None:
        """Raise an error if a message has ended, either during a wait or because sending a record failed."""
        if message.state is not OPEN:
            raise self.error(message)

    def error(self, message: Message | None = None) -> AioTensorError:
        """Return the error to raise in a waiting call, with the reason why a message cannot be sent."""
        if message is not None and message.loss is not None:
            return again(message.loss)
        if self.is_closed:
            return ClosedError("this TensorSender was closed")
        return DiscardedError("this message was discarded: begin a new one")

    def make_whole(self, message: Message) -> None:
        """Record that all tensors of a message were announced."""
        message.state = WHOLE
        self.counts["messages_sent"] += 1
        if message in self.memory.gate.budget.held:
            self.memory.gate.budget.settle(message)  # no wait delays the release of its bytes

    def end(self, message: Message, state: MessageState) -> None:
        """End a message with a final state: stop its copies and moves, and release its permit."""
        was_open = message.state is OPEN
        message.state = state
        del self.messages[message]
        if was_open or self.memory.movers:
            self.memory.abandon(message)
        if was_open:
            self.memory.gate.budget.settle(message)
            if message.awaits_receiver and not self._is_wake_scheduled:
                self._is_wake_scheduled = True
                asyncio.get_running_loop().call_soon(self._wake)
        self.permits.release(message.permit)
        if self.drainers:
            self.drainers.wake()

    def _wake(self) -> None:
        """Wake the calls that wait for a receiver, once per iteration: their messages may have ended."""
        self._is_wake_scheduled = False
        self.changes.wake()

    def receiver_lost(self, error: AioTensorError, watch: WatchProcess | None) -> int:
        """End all messages in flight and all waits, and return the number of messages.

        Args:
            error: the reason.
            watch: watches the process of the receiver; None if there was no receiver.
        """
        self.fail_waiting(lambda: again(error))
        lost = list(self.messages)
        for message in lost:
            message.loss = error
            self.end(message, LOST)
        self.memory.receiver_lost(watch)
        self.drainers.wake()
        self.changes.wake()
        self.capacity_changed()
        return len(lost)

    # Capacity for new messages

    def notify_listeners(self) -> None:
        """Notify the listeners from now on.

        Without listeners, the callbacks would cost two calls per message.
        """
        self.permits.on_release = self.memory.gate.on_release = self.capacity_changed

    def capacity_changed(self) -> None:
        """Notify the listeners, and the calls of `capacity`, that a new message may have become possible."""
        for listener in tuple(self._listeners):
            listener.capacity_changed()
        if self._capacity_waits:
            self.changes.wake()

    def shortage(self, nbytes: int) -> str | None:
        """Return the reason why a tensor must wait for a permit or memory; None if it need not."""
        permits, memory = self.permits.budget, self.memory.gate.budget
        if permits.waiting or permits.in_use == permits.limit:
            return "no permit was free"
        if nbytes and (memory.waiting or nbytes > self.memory.largest_free):
            return "not enough shared memory was free"
        return None

    async def capacity(self) -> None:
        """Wait until a new message may have become possible, or the receiver has changed.

        Raises:
            AioTensorError: the sender was closed.
        """
        self._capacity_waits += 1
        self.notify_listeners()
        try:
            await self.changes.wait()
        finally:
            self._capacity_waits -= 1
            if not self._capacity_waits and not self._listeners:
                self.permits.on_release = self.memory.gate.on_release = None
        if self.is_closed:
            raise self.error()

    # Permits

    async def permit_with(self, allocation: Allocation) -> Ticket[None]:
        """Wait for a permit to send allocated memory, which cannot be freed during the wait."""
        with _counted(self._await_permits, allocation):
            self.memory.gate.refuse_if_stuck()
            return await self.permits.acquire(1)

    def _stuck_in_sends(self) -> int:
        """Return the bytes of allocated blocks whose sends wait, directly or indirectly, for other bytes."""
        blocks = set(self._await_bytes)
        waiting = sum(message.awaits_bytes > 0 for message in self.messages)
        if waiting == self.permits.budget.in_use:
            blocks.update(self._await_permits)
        return self.memory.unaccounted_bytes(blocks)

    # Memory

    async def block(self, nbytes: int, message: Message, allocation: Allocation | None = None) -> Block:
        """Wait for a block of shared memory for a message, and pin it.

        Args:
            nbytes: the size of the block.
            message: the message.
            allocation: the allocated memory that will be copied to the block; None for other tensors.

        Raises:
            WouldBlockError: the wait would never end, or exceeded `max_wait_s`.
            OSError: the machine has no descriptors or no addresses left.
        """
        message.awaits_bytes += 1
        try:
            if allocation is None:
                return await self.memory.acquire(nbytes, message)
            with _counted(self._await_bytes, allocation):
                return await self.memory.acquire(nbytes, message)
        except StuckError:
            reason = _STUCK if allocation is None else _STUCK_IN_COPY
            raise self.holders.would_block(reason, 0, nbytes, for_receiver=False) from None
        finally:
            message.awaits_bytes -= 1

    async def block_to_allocate(self, nbytes: int, message: Message | None) -> Block:
        """Wait for a block that a caller will own, and pin it; errors are those of `block`.

        Args:
            nbytes: the size of the block.
            message: the open message to which the memory is accounted. If it is None, the wait is accounted
                to the message in whose `async with` block this task runs, because the block cannot end during
                the wait. The memory is then accounted to no message, because another task may free it.
        """
        waiting = message or innermost_block(self.messages)
        block = await (self.memory.acquire(nbytes) if waiting is None else self.block(nbytes, waiting))
        self.memory.account(block.number, message)
        return block


@contextmanager
def _counted(blocks: Counter[int], allocation: Allocation) -> Iterator[None]:
    """Count a send of an allocated block as waiting during the `with` block."""
    number = allocation.block.number
    blocks[number] += 1
    try:
        yield
    finally:
        blocks[number] -= 1
        if not blocks[number]:
            del blocks[number]


def unopened_statistics(settings: Settings, errors: ErrorCounter) -> SenderStatistics:
    """Return the statistics of a sender that was not opened."""
    waits = WaitCounter().waits()
    return snapshot(
        SenderStatistics,
        dict.fromkeys(SenderStatistics.__struct_fields__, 0),
        max_concurrent_videos=settings.max_messages,
        longest_wait_s=0.0,
        holders=(),
        arena_bytes=settings.max_bytes,
        largest_free_bytes=settings.max_bytes,
        permit_waits=waits,
        memory_waits=waits,
        errors=errors.counts(),
    )
