"""The messages in flight of one sender: their permits, their states, and the receiver that takes them.

A message holds its permit until the receiver has taken all its tensors or either side discarded it. When the
receiver is gone, all messages in flight are lost, and waiting calls raise an error. If the transport can
reconnect, later sends wait for the next receiver.
"""

import asyncio
import weakref
from collections.abc import Callable, Iterable

from aiotensor.errors import AioTensorError, ClosedError, DiscardedError, WouldBlockError, again
from aiotensor.protocol.credits import Ticket
from aiotensor.runtime.waiting import Waiters, at_most
from aiotensor.sending.gates import CapacityListener
from aiotensor.sending.grants import Grants
from aiotensor.sending.message import Message, MessageState
from aiotensor.sending.sessions import Sessions
from aiotensor.sending.settings import Settings
from aiotensor.tensors.allocations import Allocation
from aiotensor.transports.endpoints import Route
from aiotensor.types import SenderStatistics

__all__ = ["FEW_MESSAGES", "MessagesInFlight"]

# With so few messages in flight, the receiver probably waits for the next one, so it is sent immediately;
# with more, all messages announced in one iteration of the event loop share a record.
FEW_MESSAGES = 2


class MessagesInFlight:
    """The messages of one sender, from their permits to their ends; belongs to the running loop.

    Args:
        sender: the id of the sender.
        route: the way to the receiver.
        settings: the limits of the sender.
        counts: the counters of the sender.
        statistics: as for `Session`.
        listeners: the objects to notify when a new message may have become possible.

    Attributes:
        failure: the reason why no message can be sent any more.
        is_closed: whether the sender was closed.
        grants: the permits and the shared memory.
        sessions: the connections to receivers.
        counts: the counters of the sender.
    """

    def __init__(
        self,
        sender: str,
        route: Route,
        settings: Settings,
        counts: dict[str, int],
        statistics: Callable[[], SenderStatistics | None],
        listeners: "weakref.WeakSet[CapacityListener]",
    ) -> None:
        self.failure: AioTensorError | None = None
        self.is_closed = False
        self.counts = counts
        self._max_wait_s = settings.wait_limits.max_wait_s
        self.grants = Grants(settings, counts, lambda: self.sessions.receiver_pid)
        self._permits = self.grants.permits
        self._memory = self.grants.memory
        self._messages = self.grants.messages
        self._drainers = Waiters()
        self._listeners = listeners
        self._is_wake_scheduled = False
        self.sessions = Sessions(sender, route.connector, settings, self, counts, statistics)
        if listeners:
            self.notify_listeners()

    def open(self) -> None:
        """Begin to connect; errors are those of `Connector.connect`."""
        try:
            self.sessions.connect()
        except BaseException:
            self.abort()
            raise

    async def close(self) -> None:
        """End all waiting calls, and close the session; cancellation skips all waits."""
        self.is_closed = True
        self._memory.collect_freed()
        self._permits.fail(self.error)
        self._memory.gate.fail(self.error)
        try:
            self.abandon_all(MessageState.OPEN)
            # Before any other wait: without the last frame the receiver treats this sender as lost, together
            # with all messages that it sent.
            await self.sessions.close(uses_memory=self._memory.has_allocations)
            self.sessions.abort()
            await self._memory.aclose()
        finally:
            self.abort()

    def abort(self) -> None:
        """Close the session and release the memory without waiting."""
        self.is_closed = True
        self.sessions.abort()
        self._memory.close()
        self._drainers.wake()

    def check(self) -> None:
        """Raise an error if no message can be sent any more."""
        if self.failure is not None:
            raise again(self.failure)

    async def ready(self) -> None:
        """Wait until a receiver has admitted this sender, as `TensorSender.ready` does."""
        if self.sessions.is_admitted:
            return
        try:
            async with at_most(self._max_wait_s, self._not_ready):
                await self.sessions.admission()
        except WouldBlockError:
            if not self.sessions.is_admitted:  # it may have been admitted just as the time ran out
                raise

    def _not_ready(self) -> WouldBlockError:
        is_there = self.sessions.is_receiver_there
        reason = "the receiver has not answered" if is_there else "no receiver was here"
        return self.grants.holders.overdue(reason, 0, 0)

    # Messages

    async def begin(self, allocation: Allocation | None = None) -> Message:
        """Wait for a permit, and assign it to a new message.

        Args:
            allocation: the memory that the message will send, whose bytes cannot be freed during this wait.
        """
        permit = self._permits.try_acquire(1)
        if permit is None:
            waiting = self._permits.acquire(1) if allocation is None else self.grants.permit_with(allocation)
            permit = await waiting
        return self._new_message(permit)

    def begin_nowait(self, nbytes: int) -> Message:
        """Assign a permit to a new message, or raise `WouldBlockError`."""
        sessions = self.sessions
        if not sessions.is_ready:
            if sessions.current is None:
                reason = "no receiver is here"
            elif sessions.current.transport.is_writable:
                reason = "the receiver has not answered"
            else:
                reason = "the receiver is slow to read"
            raise sessions.refusal() or self.grants.holders.would_block(reason, 1, nbytes)
        permit = self._permits.try_acquire(1)
        if permit is None:
            raise self.grants.holders.would_block("no permit is free", 1, nbytes)
        return self._new_message(permit)

    def complete(self, message: Message) -> None:
        """Mark a message as whole after all its tensors were announced."""
        session = self.sessions.current
        if message.number is None or session is None:
            self._end(message, MessageState.DISCARDED)  # an empty message was never announced
            return
        session.end(message.number)
        if len(self._messages) <= FEW_MESSAGES:
            session.flush()
            self.check_open(message)
        self.make_whole(message)

    def abandon(self, message: Message) -> None:
        """Discard a message, including any tensors already announced."""
        if message.has_ended:
            return
        self._end(message, MessageState.DISCARDED)
        self.counts["messages_discarded"] += 1
        session = self.sessions.current
        if message.number is not None and session is not None:
            session.discard(message.number)

    def abandon_number(self, number: int) -> None:
        """Discard a message by its number, if it has not ended."""
        session = self.sessions.current
        message = None if session is None else session.announced.get(number)
        if message is not None:
            self.abandon(message)

    def abandon_all(self, *states: MessageState) -> int:
        """Discard every message in one of these states, and return their number."""
        messages = [message for message in self._messages if message.state in states]
        for message in messages:
            self.abandon(message)
        return len(messages)

    async def drain(self) -> None:
        """Wait until all messages now in flight have ended."""
        sent = set(self._messages)
        while any(not message.has_ended for message in sent):
            await self._drainers.wait()
            if self.is_closed:
                break
        # The receiver may have taken all of them and then closed: no message is lost in that case.
        for message in sent:
            if message.state is MessageState.LOST or not message.has_ended:
                raise self.error(message)

    async def receiver_reads(self, message: Message) -> None:
        """Wait until a receiver is connected and reads."""
        self.check_open(message)  # a message lost during its copy must not wait for the next receiver
        message.awaits_receiver += 1
        try:
            async with at_most(self._max_wait_s, self._nothing_read):
                while not self.sessions.is_ready:
                    await self.sessions.change()
                    self.check_open(message)
        except WouldBlockError:
            if not self.sessions.is_ready:  # it may have changed in this same iteration
                raise
            self.check_open(message)
        finally:
            message.awaits_receiver -= 1

    def _nothing_read(self) -> WouldBlockError:
        is_connected = self.sessions.current is not None
        return self.grants.holders.overdue(
            "the receiver read nothing" if is_connected else "no receiver was here", 1, 0
        )

    def check_open(self, message: Message) -> None:
        """Raise an error if a message has ended, either during a wait or because sending a record failed."""
        if message.state is not MessageState.OPEN:
            raise self.error(message)

    def _new_message(self, permit: Ticket[None]) -> Message:
        message = Message(permit)
        self._messages[message] = None
        return message

    def make_whole(self, message: Message) -> None:
        """Record that all tensors of a message were announced."""
        message.state = MessageState.WHOLE
        self.counts["messages_sent"] += 1
        if message.has_bytes:
            self._memory.gate.budget.settle(message)  # its bytes are released regardless of other waits

    def _end(self, message: Message, state: MessageState) -> None:
        """Release the permit, and stop sending any remaining part of the message."""
        was_open = message.state is MessageState.OPEN
        message.state = state
        del self._messages[message]
        if was_open:
            self._memory.abandon(message)
            self._memory.gate.budget.settle(message)
            if message.awaits_receiver and not self._is_wake_scheduled:
                self._is_wake_scheduled = True
                asyncio.get_running_loop().call_soon(self._wake_sessions)
        self._permits.release(message.permit)
        if self._drainers:
            self._drainers.wake()

    def _wake_sessions(self) -> None:
        """Wake the calls that wait for the receiver, once per iteration: their messages may have ended."""
        self._is_wake_scheduled = False
        self.sessions.wake()

    # Capacity for new messages

    @property
    def free_permits(self) -> int:
        """The number of messages that can begin immediately; 0 while calls wait for a permit or memory."""
        permits = self._permits.budget
        if self.sessions.current is None or self.sessions.needs_admission:
            return 0
        return 0 if permits.waiting or self._memory.gate.budget.waiting else permits.limit - permits.in_use

    def notify_listeners(self) -> None:
        """Begin to notify the listeners. Without any, the callbacks would cost two calls per message."""
        self._permits.on_release = self._memory.gate.on_release = self._capacity_changed

    def _capacity_changed(self) -> None:
        for listener in tuple(self._listeners):
            listener.capacity_changed()

    # Events of the sessions

    def receiver_found(self) -> None:
        """Handle a receiver that messages can be sent to."""
        self._capacity_changed()

    def message_ended(self, message: Message, state: MessageState) -> None:
        """Handle a message that the receiver took or discarded."""
        self.counts["messages_discarded"] += state is MessageState.DISCARDED
        self._end(message, state)

    def blocks_released(self, blocks: Iterable[int]) -> None:
        """Unpin the blocks that the receiver released."""
        self._memory.unpin(blocks)

    def receiver_lost(self, error: AioTensorError, pid: int | None) -> int:
        """End all messages in flight and all waiting calls."""
        if not self.sessions.can_reconnect:
            self.failure = error
            self._permits.fail(self.error)
            self._memory.gate.fail(self.error)
        else:
            self._permits.fail_waiting(lambda: again(error))
            self._memory.gate.fail_waiting(lambda: again(error))
        lost = list(self._messages)
        for message in lost:
            message.loss = error
            self._end(message, MessageState.LOST)
        self._memory.peer_lost(pid)
        self._drainers.wake()
        self._capacity_changed()
        return len(lost)

    def error(self, message: Message | None = None) -> AioTensorError:
        """Return the error to raise in a waiting call, with the reason why a message cannot be sent."""
        if message is not None and message.loss is not None:
            return again(message.loss)
        if self.failure is not None:
            return again(self.failure)
        if self.is_closed:
            return ClosedError("this TensorSender was closed")
        return DiscardedError("this message was discarded: begin a new one")
