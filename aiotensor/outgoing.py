"""The send gate: one place that takes, places, announces, and rolls back.

    permit -> room on the link -> bytes -> place -> announce      any step fails: all of it back

A message holds its permit until the receiver has taken all its tensors or either side discarded it. A
block of shared memory is pinned by the tensor announced over it until the receiver gives it back.

When the receiver is gone, whatever is in flight is lost, and whoever waits is told. A link that comes back
then waits for the next receiver, and so does what is sent from then on.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterable

import torch

from aiotensor import placements
from aiotensor.conversation import Conversation
from aiotensor.errors import AioTensorError, ClosedError, DiscardedError, WouldBlockError, again
from aiotensor.gates import RoomListener, Waiters, at_most
from aiotensor.grants import Grants
from aiotensor.ledger import Ledger, Patience
from aiotensor.links.base import SenderLink
from aiotensor.memory import Memory
from aiotensor.message import Message, State
from aiotensor.placements import Allocation, Block, Placed, Plan, Source
from aiotensor.protocol.credits import Ticket
from aiotensor.types import SenderStatistics, TensorHandle

__all__ = ["Outgoing"]

# With so few messages in flight somebody probably waits for the next one, so it goes out before anything else
# is done; with more, those that are announced in one turn of the loop share a record.
_FEW_MESSAGES = 2


class Outgoing:
    """Everything of one sender that is on its way; belongs to the event loop's thread.

    Args:
        sender: the sender's id.
        link: the road to the receiver.
        max_messages: the limit of permits.
        max_bytes: the limit of shared memory.
        keep_warm_s: after how many seconds idle shared memory goes back to the system; None for never.
        patience: how long somebody may wait.
    """

    def __init__(
        self,
        sender: str,
        link: SenderLink,
        max_messages: int,
        max_bytes: int,
        keep_warm_s: float | None,
        patience: Patience,
    ) -> None:
        self.failure: AioTensorError | None = None  # nothing can be sent any more
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
        self._listeners: weakref.WeakSet[RoomListener] = weakref.WeakSet()
        self._wakes_room = False
        self.conversation = Conversation(sender, link, max_messages, max_bytes, self)
        self.memory: Memory  # from `open` on: they belong to a loop
        self.ledger: Ledger

    async def open(
        self, on_freed: Callable[[int], None], statistics: Callable[[], SenderStatistics | None]
    ) -> None:
        """Begin to connect.

        Args:
            on_freed: called with each allocated block that was freed; from any thread.
            statistics: as of `Conversation.open`.
        """
        self._grants.open(on_freed, self._keep_warm_s, lambda: self.conversation.receiver_pid)
        self.memory, self.ledger = self._grants.memory, self._grants.ledger
        self._was_opened = True
        self._watch_gates()
        try:
            await self.conversation.open(statistics)
        except BaseException:
            self.memory.close()
            raise

    async def close(self) -> None:
        """End what waits, say goodbye, and close the link; cancelling waits for nothing more."""
        self._is_closed = True
        self.permits.fail(self.why_not)
        self.memory.gate.fail(self.why_not)
        try:
            self.abandon_all(State.OPEN)
            # First, and before anything is waited for: whoever goes without it is taken for lost, with all
            # that it had sent.
            await self.conversation.say_goodbye(uses_memory=self.memory.has_allocations)
            self.conversation.close()
            await self.memory.aclose()
        finally:
            self.conversation.close()
            self.memory.close()
            self._drainers.wake()

    # One message

    async def begin(self, allocation: Allocation | None = None) -> Message:
        """Wait for a permit, and give it to a new message.

        Args:
            allocation: what will be sent in it, whose bytes cannot come back while this waits.
        """
        permit = self.permits.try_acquire(1)
        if permit is None:
            waiting = self.permits.acquire(1) if allocation is None else self._grants.permit_with(allocation)
            permit = await waiting
        return self._new_message(permit)

    def begin_nowait(self, nbytes: int) -> Message:
        """Give a permit to a new message, or raise `WouldBlockError`."""
        if not self.conversation.has_room:
            if not self.conversation.is_connected:
                reason = "no receiver is here"
            elif self._link.is_ready:
                reason = "the receiver has not answered"
            else:
                reason = "the receiver is slow to read the link"
            raise self.conversation.ask_again() or self.ledger.would_block(reason, 1, nbytes)
        permit = self.permits.try_acquire(1)
        if permit is None:
            raise self.ledger.would_block("no permit is free", 1, nbytes)
        return self._new_message(permit)

    async def put(self, message: Message, source: Source, plan: Plan, *, last: bool) -> TensorHandle:
        """Take a tensor from its bytes to its announcement."""
        # The link's queue is bounded only by this: nobody adds to it while it is behind.
        if not self._link.is_ready or self.conversation.needs_admission:
            await self._room(message)
        self._check_open(message)
        allocation = plan.allocation
        if allocation is None:
            if not plan.new_bytes:
                return self._announce(message, source, placements.place_inline(source), None, last=last)
        elif allocation.can_carry(source):
            return self._announce_allocated(message, source, allocation, last=last)
        return await self._put_copy(message, source, allocation, last=last)

    def _announce_allocated(
        self, message: Message, source: Source, allocation: Allocation, *, last: bool
    ) -> TensorHandle:
        """Announce a tensor where it lies. From here on its memory is accounted to the message."""
        placed = placements.place_allocated(source, allocation)
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
        except placements.CopyAbandonedError:
            raise self.why_not(message) from None
        try:
            if not self._link.is_ready or self.conversation.needs_admission:
                await self._room(message)
            self._check_open(message)
            return self._announce(message, source, placements.place_copy(block.place), block, last=last)
        finally:
            self.memory.unpin_owner(block.number)

    def put_nowait(self, message: Message, source: Source, plan: Plan) -> TensorHandle:
        """Do the same for the one tensor of a message, on this thread, or raise `WouldBlockError`."""
        allocation = plan.allocation
        if allocation is not None and allocation.can_carry(source):
            return self._announce_allocated(message, source, allocation, last=True)
        if not plan.new_bytes:
            return self._announce(message, source, placements.place_inline(source), None, last=True)
        message.has_bytes = True
        block = self.memory.try_acquire(plan.new_bytes, message)
        if block is None:
            raise self.ledger.would_block("not enough shared memory is free", 1, plan.new_bytes)
        try:
            self.memory.copy_now(source, block)
            return self._announce(message, source, placements.place_copy(block.place), block, last=True)
        finally:
            self.memory.unpin_owner(block.number)

    def complete(self, message: Message) -> None:
        """Make a message whole, whose tensors are all announced."""
        if message.number is None:
            self._end(message, State.DISCARDED)  # an empty one: nobody has heard of it
            return
        self.conversation.complete(message)
        self._send_if_few(message)
        self._make_whole(message)

    def abandon(self, message: Message) -> None:
        """Discard a message, whatever of it was announced."""
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
        """Discard every message in one of these states, and count them."""
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
            dtype: of its elements.
            shape: in elements.
            message: the open message that the memory is for; None if it is for no message in particular.
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
        except placements.CopyAbandonedError:
            raise self.why_not(message) from None
        if self._is_closed:
            raise self.why_not()
        return tensor

    async def drain(self) -> None:
        """Wait until the messages of this moment have ended."""
        sent = set(self._messages)
        while any(not message.has_ended for message in sent):
            await self._drainers.wait()
            if self._is_closed:
                break
        # The receiver may have taken them all and closed since: that is no loss.
        for message in sent:
            if message.state is State.LOST or not message.has_ended:
                raise self.why_not(message)

    # The gate's steps

    async def _room(self, message: Message) -> None:
        """Wait until the receiver is there and reads."""
        self._check_open(message)  # lost while it was copied, it must not wait for the next receiver
        message.awaits_room += 1
        try:
            async with at_most(self._max_wait_s, self._no_room):
                while not self.conversation.has_room:
                    await self.conversation.room()
                    self._check_open(message)
        except WouldBlockError:
            if not self.conversation.has_room:  # it may have become so in this very turn
                raise
            self._check_open(message)
        finally:
            message.awaits_room -= 1

    def _no_room(self) -> WouldBlockError:
        return self._grants.no_room(is_connected=self.conversation.is_connected)

    def _check_open(self, message: Message) -> None:
        """Refuse to go on with a message that has ended: while it waited, or under a record that went out."""
        if message.state is not State.OPEN:
            raise self.why_not(message)

    def _new_message(self, permit: Ticket[None]) -> Message:
        message = Message(permit)
        self._messages[message] = None
        return message

    def _announce(
        self, message: Message, source: Source, placed: Placed, block: Block | None, *, last: bool
    ) -> TensorHandle:
        """Put the frame on the link. From here on the tensor is the receiver's."""
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
            self.memory.gate.budget.settle(message)  # what it holds comes back whatever else waits

    def _end(self, message: Message, state: State) -> None:
        """Give the permit back, and stop whatever of the message is still being sent."""
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
        """Tell those who wait for the link that their messages may have ended: once for all of a turn."""
        self._wakes_room = False
        self.conversation.wake()

    @property
    def free_permits(self) -> int:
        """Count the messages that can begin at once; 0 while calls wait for a permit or memory."""
        permits = self.permits.budget
        conversation = self.conversation
        if not conversation.is_connected or conversation.needs_admission:
            return 0
        return 0 if permits.waiting or self.memory.gate.budget.waiting else permits.limit - permits.in_use

    def listen(self, listener: RoomListener) -> None:
        """Call a listener, without keeping it alive, when a message may begin that could not before."""
        self._listeners.add(listener)
        self._watch_gates()

    def _watch_gates(self) -> None:
        if self._listeners and self._was_opened:  # it costs two calls for each message
            self.permits.on_release = self.memory.gate.on_release = self._room_changed

    def _room_changed(self) -> None:
        for listener in tuple(self._listeners):
            listener.room_changed()

    # What the receiver says

    def receiver_found(self) -> None:
        """Handle a receiver that messages can be sent to."""
        self._room_changed()

    def message_ended(self, message: Message, state: State) -> None:
        """Note that the receiver took a message, or gave it up."""
        self.messages_discarded += state is State.DISCARDED
        self._end(message, state)

    def blocks_released(self, blocks: Iterable[int]) -> None:
        """Take blocks back."""
        self.memory.unpin(blocks)

    def receiver_lost(self, error: AioTensorError, pid: int | None) -> int:
        """End what is on its way, and what waits."""
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
        self._room_changed()
        return len(lost)

    # Small things

    def why_not(self, message: Message | None = None) -> AioTensorError:
        """Make the error that tells why something cannot be sent, for whoever was waiting."""
        if message is not None and message.loss is not None:
            return again(message.loss)
        if self.failure is not None:
            return again(self.failure)
        if self._is_closed:
            return ClosedError("this TensorSender was closed")
        return DiscardedError("this message was discarded: begin a new one")
