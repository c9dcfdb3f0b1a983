"""The messages of a peer on another machine, in order, including the bytes of its steps."""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.protocol.moves import ReceivedBytes
from aiotensor.protocol.network import (
    ACK,
    BATCH,
    BYE,
    FREE,
    RECORD,
    STEP,
    Ack,
    Step,
    read_ack,
    read_area,
    read_batch,
    read_step,
)
from aiotensor.transports.base import Landing

__all__ = ["IncomingMessages", "MessageEvents"]


class MessageEvents(Protocol):
    """The callbacks of `IncomingMessages`."""

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed, so that messages are ignored."""

    @property
    def is_finishing(self) -> bool:
        """Whether this end is finishing; then all records are ignored, and so their segments are unknown."""

    def record_received(self, record: memoryview) -> None:
        """Called with a record."""

    def acknowledge(self, message: bytes) -> None:
        """Send an acknowledgement."""

    def acknowledged(self, ack: Ack) -> None:
        """Called with an acknowledgement of the peer."""

    def bye_received(self, reason: memoryview) -> None:
        """Called with the reason in the last message of the peer."""

    def violated(self, error: ProtocolError) -> None:
        """End the connection, because the peer broke the rules."""

    def failed(self, reason: str) -> None:
        """End the connection, because there is no memory for the bytes of the peer."""

    def ended(self, reason: str) -> None:
        """Called when the connection has ended, after all messages."""


class IncomingMessages:
    """Read the messages of the peer in order; a step that waits for memory delays the messages after it.

    Args:
        events: the callbacks for the messages.

    Attributes:
        landings: memory for the segments of the peer, by number.
        records: the number of records that have arrived.
    """

    def __init__(self, events: MessageEvents) -> None:
        self.landings: dict[int, Landing] = {}
        self.records = 0
        self._events = events
        self._received = ReceivedBytes()
        self._step: Step | None = None  # whose bytes are the next message
        self._is_held = False  # until there is memory for a step
        self._held: deque[memoryview] = deque()  # the messages after that step
        self._end_reason: str | None = None  # why the connection has ended after these messages

    def receive(self, message: memoryview) -> None:
        """Process a message, or keep it while an earlier step waits for memory."""
        if self._is_held:
            self._held.append(message)
        elif not self._events.is_closed:
            try:
                self._handle(message)
            except ProtocolError as error:
                self._events.violated(error)

    def end(self, reason: str) -> None:
        """Report the end of the connection, after the messages that arrived before it."""
        if self._is_held:
            self._end_reason = reason
        else:
            self._events.ended(reason)

    def clear(self) -> None:
        """Forget all messages, because this end was closed."""
        self._held.clear()
        self.landings.clear()

    def _handle(self, message: memoryview) -> None:
        events = self._events
        if self._step is not None:
            step, self._step = self._step, None
            if len(message) != step.length:
                raise ProtocolError(f"it sent {len(message)} bytes after a step of {step.length}")
            self._store(step, message)
            return
        kind = message[0] if message else -1
        if kind == RECORD:
            self._count(len(message) - 1)
            events.record_received(message[1:])
        elif kind == STEP:
            step, data = read_step(message)
            if data:
                self._store(step, data)
            else:
                self._step = step
        elif kind == ACK:
            events.acknowledged(read_ack(message))
        elif kind == FREE:
            area = read_area(message)
            landing = self.landings.get(area.segment)
            if landing is not None and not events.is_finishing:  # else it may be unknown
                landing.free(area.block)
        elif kind == BATCH:
            for part in read_batch(message):
                self.receive(part)
        elif kind == BYE:
            events.bye_received(message[1:])
        else:
            raise ProtocolError(f"it sent a message of the unknown kind {kind}")

    def _count(self, nbytes: int) -> None:
        """Count the bytes of a record, and acknowledge them if that is due."""
        if nbytes > MAX_RECORD_BYTES:
            raise ProtocolError(f"it sent a record of more than {MAX_RECORD_BYTES} bytes")
        self.records += 1
        if self._received.record(nbytes):
            self._events.acknowledge(self._received.ack())

    def _store(self, step: Step, data: memoryview) -> None:
        landing = self.landings.get(step.area.segment)
        if landing is None:
            if self._events.is_finishing:
                return
            raise ProtocolError(f"it moved bytes to segment {step.area.segment}, which it never attached")
        resume = self._resume_with(step, data)
        if landing.store(step.area.block, step.nbytes, step.start, data, resume):
            if self._received.step(step):
                self._events.acknowledge(self._received.ack())
        else:
            self._is_held = True

    def _resume_with(self, step: Step, data: memoryview) -> Callable[[str], None]:
        """Return the function that stores the bytes of a step when there is memory for them."""

        def resume(failure: str) -> None:
            self._is_held = False
            if failure:
                self._events.failed(failure)
            elif not self._events.is_closed:
                held, self._held = self._held, deque()
                try:
                    self._store(step, data)
                except ProtocolError as error:
                    self._events.violated(error)
                self._continue(held)

        return resume

    def _continue(self, held: deque[memoryview]) -> None:
        """Process the messages that were kept while a step waited for memory."""
        while held and not self._events.is_closed:
            self.receive(held.popleft())
        if self._end_reason is not None and not self._is_held:
            self._events.ended(self._end_reason)
