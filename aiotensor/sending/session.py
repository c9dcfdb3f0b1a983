"""One connection of a sender to a receiver: the transport, and the rules of the protocol on it.

A session begins when the transport connects, and ends with its first loss. All frames of one iteration of the
event loop share a record, unless `flush` writes them earlier.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.protocol.connection import Close, Loss
from aiotensor.protocol.frames import (
    ARENA,
    Discarded,
    Hello,
    Put,
    Release,
    StatisticsRequest,
    Taken,
    Welcome,
)
from aiotensor.protocol.sender import SenderConnection
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.logs import logger_of
from aiotensor.sending.message import Message, MessageState
from aiotensor.tensors.segments import Segment
from aiotensor.transports.base import Transport
from aiotensor.types import SenderStatistics

__all__ = ["MessageEvents", "Session", "SessionEvents"]

logger = logger_of("sender")


class SessionEvents(Protocol):
    """The callbacks of a session."""

    def session_admitted(self, session: "Session") -> None:
        """Handle that the receiver has admitted this sender."""

    def session_lost(self, session: "Session", loss: Loss) -> None:
        """Handle the end of the session."""

    def writing_resumed(self) -> None:
        """Handle that the transport accepts records again."""


class MessageEvents(Protocol):
    """The callbacks of a session that concern messages and their memory."""

    def message_ended(self, message: Message, state: MessageState) -> None:
        """Handle a message that the receiver took or discarded."""

    def blocks_released(self, blocks: Iterable[int]) -> None:
        """Handle blocks that the receiver released.

        Raises:
            ProtocolError: the receiver did not hold them.
        """


class Session:
    """Send the messages of one connection, and handle the frames of the receiver.

    Args:
        hello: the first frame.
        transport: the connection.
        events: the object that is notified of changes of the session.
        messages: the object that is notified of messages.
        statistics: called when the receiver requests the statistics of this sender; returns None if the
            sender was garbage-collected. The transport refers to this function, so it must not keep the
            sender alive.

    Raises:
        OSError: the first record could not be written.
    """

    def __init__(
        self,
        hello: Hello,
        transport: Transport,
        events: SessionEvents,
        messages: MessageEvents,
        statistics: Callable[[], SenderStatistics | None],
    ) -> None:
        self.transport = transport
        self.connection = SenderConnection(hello)
        self.announced: dict[int, Message] = {}  # the messages in flight, by their numbers
        self._events = events
        self._messages = messages
        self._statistics = statistics
        self._sender = hello.sender
        self._loop = asyncio.get_running_loop()
        self._is_flush_scheduled = False
        self._is_reply_due = False
        transport.start(self)
        for record in self.connection.data_to_send():
            transport.write(record)

    # Commands

    def attach(self, segment: Segment) -> None:
        """Share a segment with the receiver.

        Raises:
            OSError: the kernel refused the descriptor; nothing was sent.
        """
        self.flush()
        if self.transport.is_closed:
            return  # the flush failed; the caller finds its message lost
        # Written immediately and in a separate record, so that the caller receives any error.
        self.transport.write(
            self.connection.attach(segment.number, ARENA, segment.nbytes), [segment.descriptor]
        )
        segment.is_attached = True

    def put(self, message: Message, put: Put, *, flush: bool) -> None:
        """Announce a tensor; from this point the receiver owns it.

        Args:
            message: the message of the tensor.
            put: the frame.
            flush: whether to write it now rather than at the end of this iteration of the event loop.
        """
        self.announced[put.message] = message
        self.connection.put(put)
        if flush or self.connection.has_full_record:
            self.flush()
        else:
            self._schedule_flush()

    def end(self, message: int) -> None:
        """Make a message whole, after all its tensors."""
        self.connection.end(message)
        self._schedule_flush()

    def discard(self, message: int) -> None:
        """Withdraw a message; later answers to it have no effect."""
        del self.announced[message]
        self.connection.discard(message)
        self._schedule_flush()

    def flush(self) -> None:
        """Write the pending frames now rather than at the end of this iteration of the event loop."""
        try:
            for record in self.connection.data_to_send():
                self.transport.write(record)
        except OSError as error:
            self._end(self.connection.lost(f"writing to it failed: {error}", is_retried=True))

    def close(self, *, uses_memory: bool) -> None:
        """Write the last frame.

        Args:
            uses_memory: whether tensors allocated by this sender still exist.
        """
        self.connection.close(uses_memory=uses_memory)
        self.flush()

    def abort(self) -> None:
        """Close the transport without notifying the receiver or the owner of this session."""
        self.transport.close()

    # Events of the transport

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Handle the frames of a record."""
        if descriptors:
            close_all(descriptors)  # a receiver sends none
        try:
            for frame in self.connection.receive(data):
                match frame:
                    case Taken() | Discarded():
                        is_taken = isinstance(frame, Taken)
                        state = MessageState.TAKEN if is_taken else MessageState.DISCARDED
                        for number in frame.messages:
                            message = self.announced.pop(number, None)
                            if message is not None:  # otherwise this side has discarded it
                                self._messages.message_ended(message, state)
                    case Release():
                        self._messages.blocks_released(frame.blocks)
                    case StatisticsRequest():
                        self._is_reply_due = True
                        self._schedule_flush()
                    case Welcome(is_admitted=True):
                        self._events.session_admitted(self)
                    case Close():
                        self._end(self.connection.closed(frame))
        except RefusedError as error:
            self._end(Loss(error, is_retried=False))
        except ProtocolError as error:
            pid = self.connection.peer_pid
            logger.error(
                "the receiver (pid %s) broke the protocol: %s",
                pid,
                error,
                extra={
                    "event": "protocol_broken",
                    "sender_id": self._sender,
                    "peer_pid": pid,
                    "reason": str(error),
                },
            )
            self._end(self.connection.violated(error))

    def connection_lost(self, reason: str) -> None:
        """Handle a receiver that is gone."""
        self._end(self.connection.lost(reason, is_retried=True))

    def resume_writing(self) -> None:
        """Handle that the transport accepts records again."""
        if self._is_reply_due:
            self._schedule_flush()
        self._events.writing_resumed()

    def _schedule_flush(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._iteration_ended)

    def _iteration_ended(self) -> None:
        self._is_flush_scheduled = False
        if self.connection.is_closed:
            return
        if self._is_reply_due and self.transport.is_writable:
            # At most one reply is pending, so a receiver that does not read does not make the queue grow.
            self._is_reply_due = False
            statistics = self._statistics()
            if statistics is not None:
                self.connection.reply(statistics)
        self.flush()

    def _end(self, loss: Loss) -> None:
        self.transport.close()
        self._events.session_lost(self, loss)
