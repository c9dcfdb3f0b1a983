"""One connection of a sender to a receiver: the transport, and the rules of the protocol on it.

A session begins when the transport connects, and ends when the connection is lost. The frames of one
iteration of the event loop share a record, unless `flush` writes them earlier.
"""

import asyncio
from collections.abc import Callable, Sequence

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.protocol.connection import CLOSED, Close, Loss
from aiotensor.protocol.frames import (
    ARENA,
    Discarded,
    Hello,
    Put,
    Release,
    Taken,
    Welcome,
)
from aiotensor.protocol.sender import SenderConnection
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.logs import logger_of
from aiotensor.sending.grants import Grants
from aiotensor.sending.message import DISCARDED, TAKEN, Message
from aiotensor.tensors.segments import Segment
from aiotensor.transports.base import Transport

__all__ = ["Session"]

logger = logger_of("sender")


class Session:
    """Send the messages of one connection, and handle the frames of the receiver.

    Args:
        hello: the first frame to send.
        transport: the connection, which has not been started yet.
        grants: the messages and memory that the answers of the receiver release.
        admitted: called when the receiver has admitted this sender.
        lost: called with the session and the reason when the connection is lost.

    Attributes:
        transport: the connection.
        connection: the rules of the protocol.
        announced: the messages in flight, by their numbers.

    Raises:
        OSError: the first record could not be written.
    """

    def __init__(
        self,
        hello: Hello,
        transport: Transport,
        grants: Grants,
        admitted: Callable[[], None],
        lost: Callable[["Session", Loss], None],
    ) -> None:
        self.transport = transport
        self.connection = SenderConnection(hello)
        self.announced: dict[int, Message] = {}
        self._grants = grants
        self._admitted = admitted
        self._lost = lost
        self._sender = hello.sender
        self._loop = asyncio.get_running_loop()
        self._is_flush_scheduled = False
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
            return  # the flush has failed, and the message of the caller is lost
        # Written immediately and in a separate record, so that this call raises any error.
        self.transport.write(
            self.connection.attach(segment.number, ARENA, segment.nbytes), [segment.descriptor]
        )
        segment.is_attached = True

    def begin(self, message: Message) -> int:
        """Begin a message before its first tensor, and return its number."""
        number = self.connection.begin()
        self.announced[number] = message
        self._schedule_flush()
        return number

    def put(self, message: Message, put: Put, *, flush: bool) -> None:
        """Announce a tensor; with `flush`, write the frame now."""
        self.announced[put.message] = message
        connection = self.connection
        connection.put(put)
        if flush:
            self._write(connection.data_to_send())
            return
        if connection.has_full_record:
            self._write(connection.full_records())
        self._schedule_flush()

    def end(self, message: int) -> None:
        """Complete a message after its last tensor."""
        self.connection.end(message)
        self._schedule_flush()

    def discard(self, message: int) -> None:
        """Withdraw a message; later answers to it have no effect."""
        del self.announced[message]
        self.connection.discard(message)
        self._schedule_flush()

    def flush(self) -> None:
        """Write the pending frames now rather than at the end of this iteration of the event loop."""
        self._write(self.connection.data_to_send())

    def _write(self, records: Sequence[bytes]) -> None:
        try:
            for record in records:
                self.transport.write(record)
        except OSError as error:
            self._end(self.connection.lost(f"writing to it failed: {error}", is_retried=True))

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
                        state = TAKEN if is_taken else DISCARDED
                        for number in frame.messages:
                            message = self.announced.pop(number, None)
                            if message is not None:  # otherwise this side has discarded it
                                self._grants.counts["messages_discarded"] += not is_taken
                                self._grants.end(message, state)
                    case Release():
                        self._grants.memory.unpin(frame.blocks)
                    case Welcome(is_admitted=True):
                        self._admitted()
                    case Close():
                        self._end(self.connection.closed(frame))
        except RefusedError as error:
            self._end(Loss(error, is_retried=False))
        except ProtocolError as error:
            self._violated(error)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """End the session, because the connection has ended."""
        if isinstance(reason, ProtocolError):
            self._violated(reason)
        else:
            self._end(self.connection.lost(reason, is_retried=True))

    def resume_writing(self) -> None:
        """Wake the calls that wait until the receiver reads."""
        self._grants.changes.wake()

    def _schedule_flush(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._iteration_ended)

    def _iteration_ended(self) -> None:
        self._is_flush_scheduled = False
        if self.connection.state is not CLOSED:
            self._write(self.connection.data_to_send())

    def _violated(self, error: ProtocolError) -> None:
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

    def _end(self, loss: Loss) -> None:
        try:
            self._lost(self, loss)  # before `close`, because it uses the transport to watch the receiver
        finally:
            self.transport.close()
