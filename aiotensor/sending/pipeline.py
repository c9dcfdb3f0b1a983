"""The send gate: acquires resources, places and announces tensors, and rolls back on failure.

    permit -> space on the link -> bytes -> place -> announce      any failure rolls back all steps

A message holds its permit until the receiver has taken all its tensors or either side discarded it. A
block of shared memory is pinned by the tensor announced over it until the receiver releases it.

When the receiver is gone, all messages in flight are lost, and waiting calls raise an error. A link that
reconnects then waits for the next receiver, and so do later sends.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterable

import torch

from aiotensor.errors import AioTensorError, ClosedError, DiscardedError, WouldBlockError, again
from aiotensor.protocol.credits import Ticket
from aiotensor.runtime.waiting import Waiters, at_most
from aiotensor.sending.conversation import Conversation
from aiotensor.sending.gates import CapacityListener
from aiotensor.sending.grants import Grants
from aiotensor.sending.holders import Holders, WaitLimits
from aiotensor.sending.memory import Memory
from aiotensor.sending.message import Message, State
from aiotensor.tensors.allocations import Allocation, Block
from aiotensor.tensors.copying import CopyAbandonedError
from aiotensor.tensors.placement import Placed, Plan, place_allocated, place_copy, place_inline
from aiotensor.tensors.source import Source
from aiotensor.transports.base import SenderLink
from aiotensor.types import SenderStatistics, TensorHandle

__all__ = ["Outgoing"]

# With so few messages in flight, the receiver probably waits for the next one, so it is sent immediately;
# with more, all messages announced in one iteration of the event loop share a record.
_FEW_MESSAGES = 2


class Outgoing:
    """The messages that one sender has in flight; use only on the event loop's thread.

    Args:
        sender: the sender's id.
        link: the connection to the receiver.
        max_messages: the number of permits.
        max_bytes: the limit of shared memory.
        keep_warm_s: the idle time in seconds before shared memory is returned to the system; None for never.
        patience: the limits on waiting times.
    """

    def __init__(
        self,
        sender: str,
        link: SenderLink,
        max_messages: int,
        max_bytes: int,
        keep_warm_s: float | None,
        patience: WaitLimits,
    ) -> None:
        self.failure: AioTensorError | None = None  # no message can be sent any more
        self.messages_sent = self.messages_discarded = self.tensors_sent = self.bytes_sent = 0
        self.max_bytes = max_bytes
        self._link = link
        self._max_wait_s = patience.max_wait_s
        self._keep_warm_s = keep_warm_s
        self._grants = Grants(max_messages, max_bytes, patience)
        self.permits = self._grants.permits
        self._messages = self._grants.messages
        self._is_closed = self._was_opened = False
        self._drainers = Waiters()
        self._listeners: weakref.WeakSet[CapacityListener] = weakref.WeakSet()
        self._wakes_room = False
        self.conversation = Conversation(sender, link, max_messages, max_bytes, self)
        self.memory: Memory  # both set by `open`, because they belong to a loop
        self.holders: Holders

    async def open(
        self, on_freed: Callable[[int], None], statistics: Callable[[], SenderStatistics | None]
    ) -> None:
        """Start connecting.

        Args:
            on_freed: called with each allocated block that was freed; from any thread.
            statistics: as for `Conversation.open`.
        """
        self._grants.open(on_freed, self._keep_warm_s, lambda: self.conversation.receiver_pid)
        self.memory, self.holders = self._grants.memory, self._grants.holders
        self._was_opened = True
        self._watch_gates()
        try:
            await self.conversation.open(statistics)
        except BaseException:
            self.memory.close()
            raise

    async def close(self) -> None:
        """End all waiting calls, send the closing frame, and close the link; cancellation skips all waits."""
        self._is_closed = True
        self.permits.fail(self.why_not)
        self.memory.gate.fail(self.why_not)
        try:
            self.abandon_all(State.OPEN)
            # Before any other wait: without the closing frame the receiver treats this sender as lost,
            # together with all messages that it sent.
            await self.conversation.say_goodbye(uses_memory=self.memory.has_allocations)
            self.conversation.close()
            await self.memory.aclose()
        finally:
            self.conversation.close()
            self.memory.close()
            self._drainers.wake()

    # One message

    async def begin(self, allocation: Allocation | None = None) -> Message:
        """Wait for a permit, and assign it to a new message.

        Args:
            allocation: the memory that the message will send, whose bytes cannot be freed during this wait.
        """
        permit = self.permits.try_acquire(1)
        if permit is None:
            waiting = self.permits.acquire(1) if allocation is None else self._grants.permit_with(allocation)
            permit = await waiting
        return self._new_message(permit)

    def begin_nowait(self, nbytes: int) -> Message:
        """Assign a permit to a new message, or raise `WouldBlockError`."""
        if not self.conversation.has_room:
            if not self.conversation.is_connected:
                reason = "no receiver is here"
            elif self._link.is_ready:
                reason = "the receiver has not answered"
            else:
                reason = "the receiver is slow to read the link"
            raise self.conversation.ask_again() or self.holders.would_block(reason, 1, nbytes)
        permit = self.permits.try_acquire(1)
        if permit is None:
            raise self.holders.would_block("no permit is free", 1, nbytes)
        return self._new_message(permit)

    async def put(self, message: Message, source: Source, plan: Plan, *, last: bool) -> TensorHandle:
        """Acquire bytes for a tensor, place the tensor, and announce it."""
        # Only this check bounds the link's queue: no call adds to the queue while the link is behind.
        if not self._link.is_ready or self.conversation.needs_admission:
            await self._room(message)
        self._check_open(message)
        allocation = plan.allocation
        if allocation is None:
            if not plan.new_bytes:
                return self._announce(message, source, place_inline(source), None, last=last)
        elif allocation.can_carry(source):
            return self._announce_allocated(message, source, allocation, last=last)
        return await self._put_copy(message, source, allocation, last=last)

    def _announce_allocated(
        self, message: Message, source: Source, allocation: Allocation, *, last: bool
    ) -> TensorHandle:
        """Announce a tensor in place. From this point its memory is charged to the message."""
        placed = place_allocated(source, allocation)
        self.memory.announced(allocation.block.number, message, is_whole=last)
        message.has_bytes = True
        return self._announce(message, source, placed, allocation.block, last=last)

    async def _put_copy(
        self, message: Message, source: Source, allocation: Allocation | None, *, last: bool
    ) -> TensorHandle:
        block = await self._grants.block(source.nbytes, message, allocation)
        try:
            self._check_open(message)  # it may have ended while waiting
        except BaseException:
            self.memory.unpin_owner(block.number)
            raise
        try:
            await self.memory.copy(source, block, message)
        except CopyAbandonedError:
            raise self.why_not(message) from None
        try:
            if not self._link.is_ready or self.conversation.needs_admission:
                await self._room(message)
            self._check_open(message)
            return self._announce(message, source, place_copy(block.place), block, last=last)
        finally:
            self.memory.unpin_owner(block.number)

    def put_nowait(self, message: Message, source: Source, plan: Plan) -> TensorHandle:
        """Send the only tensor of a message without waiting, on this thread, or raise `WouldBlockError`."""
        allocation = plan.allocation
        if allocation is not None and allocation.can_carry(source):
            return self._announce_allocated(message, source, allocation, last=True)
        if not plan.new_bytes:
            return self._announce(message, source, place_inline(source), None, last=True)
        message.has_bytes = True
        block = self.memory.try_acquire(plan.new_bytes, message)
        if block is None:
            raise self.holders.would_block("not enough shared memory is free", 1, plan.new_bytes)
        try:
            self.memory.copy_now(source, block)
            return self._announce(message, source, place_copy(block.place), block, last=True)
        finally:
            self.memory.unpin_owner(block.number)

    def complete(self, message: Message) -> None:
        """Mark a message as whole after all its tensors were announced."""
        if message.number is None:
            self._end(message, State.DISCARDED)  # an empty message was never announced
            return
        self.conversation.complete(message)
        self._send_if_few(message)
        self._make_whole(message)

    def abandon(self, message: Message) -> None:
        """Discard a message, including any tensors already announced."""
        if message.has_ended:
            return
        self._end(message, State.DISCARDED)
        self.messages_discarded += 1
        self.conversation.discard(message)

    def abandon_number(self, number: int) -> None:
        """Discard a message by its number, if it has not ended."""
        message = self.conversation.find(number)
        if message is not None:
            self.abandon(message)

    def abandon_all(self, *states: State) -> int:
        """Discard every message in one of these states, and return their number."""
        messages = [message for message in self._messages if message.state in states]
        for message in messages:
            self.abandon(message)
        return len(messages)

    async def allocate(
        self, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...], message: Message | None = None
    ) -> torch.Tensor:
        """Wait for a block that the caller owns, and return a tensor over it.

        Args:
            nbytes: the size of the tensor.
            dtype: the type of its elements.
            shape: its sizes, in elements.
            message: the open message that the memory is for; None if it is for no particular message.
        """
        block = await self._grants.block_to_allocate(nbytes, message)
        try:
            if message is not None:
                self._check_open(message)  # it may have ended while waiting
        except BaseException:
            self.memory.unpin_owner(block.number)
            raise
        try:
            tensor = await self.memory.tensor_over(block, dtype, shape, message)
        except CopyAbandonedError:
            raise self.why_not(message) from None
        if self._is_closed:
            raise self.why_not()
        return tensor

    async def drain(self) -> None:
        """Wait until all messages now in flight have ended."""
        sent = set(self._messages)
        while any(not message.has_ended for message in sent):
            await self._drainers.wait()
            if self._is_closed:
                break
        # The receiver may have taken all of them and then closed: no message is lost in that case.
        for message in sent:
            if message.state is State.LOST or not message.has_ended:
                raise self.why_not(message)

    # The steps of the gate

    async def _room(self, message: Message) -> None:
        """Wait until a receiver is connected and reads from the link."""
        self._check_open(message)  # a message lost during its copy must not wait for the next receiver
        message.awaits_room += 1
        try:
            async with at_most(self._max_wait_s, self._no_room):
                while not self.conversation.has_room:
                    await self.conversation.room()
                    self._check_open(message)
        except WouldBlockError:
            if not self.conversation.has_room:  # it may have changed in this same iteration
                raise
            self._check_open(message)
        finally:
            message.awaits_room -= 1

    def _no_room(self) -> WouldBlockError:
        return self._grants.no_room(is_connected=self.conversation.is_connected)

    def _check_open(self, message: Message) -> None:
        """Raise an error if a message has ended, either during a wait or because sending a record failed."""
        if message.state is not State.OPEN:
            raise self.why_not(message)

    def _new_message(self, permit: Ticket[None]) -> Message:
        message = Message(permit)
        self._messages[message] = None
        return message

    def _announce(
        self, message: Message, source: Source, placed: Placed, block: Block | None, *, last: bool
    ) -> TensorHandle:
        """Add the frame to the link. From this point the receiver owns the tensor."""
        number: int | None = None
        if block is not None:
            number = block.number
            self.conversation.attach(block)
            self._check_open(message)
            self.memory.pin(number)
        handle = self.conversation.announce(message, source, placed, number, last=last)
        if last:
            self._send_if_few(message)
        else:
            self._check_open(message)
        message.count += 1
        self.tensors_sent += 1
        self.bytes_sent += source.nbytes
        if last:
            self._make_whole(message)
        return handle

    def _send_if_few(self, message: Message) -> None:
        if len(self._messages) <= _FEW_MESSAGES:
            self.conversation.flush()
        self._check_open(message)

    def _make_whole(self, message: Message) -> None:
        message.state = State.WHOLE
        self.messages_sent += 1
        if message.has_bytes:
            self.memory.gate.budget.settle(message)  # its bytes are released regardless of other waits

    def _end(self, message: Message, state: State) -> None:
        """Release the permit, and stop sending any remaining part of the message."""
        was_open = message.state is State.OPEN
        message.state = state
        del self._messages[message]
        self.conversation.forget(message)
        if was_open:
            self.memory.abandon(message)
            self.memory.gate.budget.settle(message)
            if message.awaits_room and not self._wakes_room:
                self._wakes_room = True
                asyncio.get_running_loop().call_soon(self._wake_room)
        self.permits.release(message.permit)
        if self._drainers:
            self._drainers.wake()

    def _wake_room(self) -> None:
        """Wake the calls that wait for the link once per iteration, because their messages may have ended."""
        self._wakes_room = False
        self.conversation.wake()

    @property
    def free_permits(self) -> int:
        """Return how many messages can begin immediately; 0 while calls wait for a permit or memory."""
        permits = self.permits.budget
        conversation = self.conversation
        if not conversation.is_connected or conversation.needs_admission:
            return 0
        return 0 if permits.waiting or self.memory.gate.budget.waiting else permits.limit - permits.in_use

    def listen(self, listener: CapacityListener) -> None:
        """Call a listener, held by a weak reference, whenever a new message may have become possible."""
        self._listeners.add(listener)
        self._watch_gates()

    def _watch_gates(self) -> None:
        if self._listeners and self._was_opened:  # the callbacks cost two calls per message
            self.permits.on_release = self.memory.gate.on_release = self._capacity_changed

    def _capacity_changed(self) -> None:
        for listener in tuple(self._listeners):
            listener.capacity_changed()

    # Events from the receiver

    def receiver_found(self) -> None:
        """Handle a receiver that messages can be sent to."""
        self._capacity_changed()

    def message_ended(self, message: Message, state: State) -> None:
        """Handle a message that the receiver took or discarded."""
        self.messages_discarded += state is State.DISCARDED
        self._end(message, state)

    def blocks_released(self, blocks: Iterable[int]) -> None:
        """Unpin the blocks that the receiver released."""
        self.memory.unpin(blocks)

    def receiver_lost(self, error: AioTensorError, pid: int | None) -> int:
        """End all messages in flight and all waiting calls."""
        if not self._link.comes_back:
            self.failure = error
            self.permits.fail(self.why_not)
            self.memory.gate.fail(self.why_not)
        else:
            self.permits.fail_waiting(lambda: again(error))
            self.memory.gate.fail_waiting(lambda: again(error))
        lost = list(self._messages)
        for message in lost:
            message.loss = error
            self._end(message, State.LOST)
        self.memory.peer_lost(pid)
        self._drainers.wake()
        self._capacity_changed()
        return len(lost)

    # Helpers

    def why_not(self, message: Message | None = None) -> AioTensorError:
        """Return the error to raise in a waiting call, with the reason why a message cannot be sent."""
        if message is not None and message.loss is not None:
            return again(message.loss)
        if self.failure is not None:
            return again(self.failure)
        if self._is_closed:
            return ClosedError("this TensorSender was closed")
        return DiscardedError("this message was discarded: begin a new one")
