"""One end of a connection between machines, which exchanges the messages of `aiotensor.protocol.network`.

    open --finish--> finishing --BYE of the peer, or too late--> finished --close--> closed
      |                 |                                           ^
      |                 '--the connection ends----------------------'
      '--BYE of the peer, violation, the connection ends--> closed (the handler is notified)

The kernel may discard data that a peer has not read when this side closes the connection. So after `finish`,
a side waits until the peer has read everything before it closes the connection.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from aiotensor.errors import ProtocolError
from aiotensor.protocol.moves import Move
from aiotensor.protocol.network import BYE, Ack, Area
from aiotensor.transports.base import Handler, Landing
from aiotensor.transports.tcp.batches import BatchWriter
from aiotensor.transports.tcp.buffers import keep_buffers
from aiotensor.transports.tcp.incoming import IncomingMessages
from aiotensor.transports.tcp.outgoing import OutgoingRecords, SteppedMoves

__all__ = ["TcpTransport"]

_BYE = bytes([BYE])
_MAX_REASON_BYTES = 1024
_MESSAGES_AT_ONCE = 64

# The maximum wait for the BYE of the peer. By then, its kernel has the records, unless the peer is gone.
_FINISH_S = 1.0


class TcpTransport:
    """One end of a connection between machines.

    Args:
        send: passes a message to ZeroMQ, together with whether ZeroMQ copies it; raises `OSError` if this
            process has no descriptors or threads left.
        shut: closes the connection; called once, at the end. ZeroMQ may discard messages that are unsent.
        read: reads a message that has arrived, and returns whether there was one.
        max_queued_bytes: the maximum bytes in the queue, for a writer that never waits; None for no limit.
    """

    peer_pid = None  # the peer may be on another machine

    def __init__(
        self,
        send: Callable[[bytes | memoryview, bool], object],
        shut: Callable[[], object],
        read: Callable[[], bool],
        max_queued_bytes: int | None = None,
    ) -> None:
        keep_buffers()
        self.is_writable = True
        self.is_closed = False
        self._writer = BatchWriter(send, self._writing_failed)
        self._shut = shut
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._handler: Handler | None = None
        self._records = OutgoingRecords(self._writer, max_queued_bytes)
        self._moves = SteppedMoves(self._writer, self._may_move)
        self._incoming = IncomingMessages(self)
        self.is_finishing = self._has_said_bye = False
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def mover(self) -> Self:
        """This object, which also moves bytes to the peer."""
        return self

    def start(self, handler: Handler) -> None:
        """Begin to read, or pass further records to another handler, as `Transport.start` does."""
        if not self.is_closed:
            self._handler = handler

    def read_now(self) -> None:
        """Read a record immediately, if one has arrived, and the messages before it."""
        before = self._incoming.records
        for _ in range(_MESSAGES_AT_ONCE):
            if self._incoming.records != before or not self._read():
                break

    # Records

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue a record, as `Transport.write` does."""
        if not (self.is_closed or self.is_finishing):
            self._records.write(data)
            self.is_writable = not self._records.are_queued

    def limit_queue(self, max_bytes: int) -> None:
        """Limit the bytes in the queue, as `Transport.limit_queue` does."""
        self._records.max_queued_bytes = max_bytes

    def finish(self) -> None:
        """Write no more records; `is_writable` becomes true once the peer has read all of them."""
        if self.is_closed or self.is_finishing:
            return
        self.is_finishing, self.is_writable = True, False
        if not self._records.are_queued:
            self._say_last_bye()

    def close(self) -> None:
        """Close at once, and discard the queued records."""
        if not self.is_closed:
            self._say_bye()
            self._stop()
            self._shut()

    def _say_bye(self, reason: str = "") -> None:
        if not self._has_said_bye:
            self._has_said_bye = True
            try:
                self._writer.write(_BYE + reason.encode(errors="replace")[:_MAX_REASON_BYTES])
            except OSError:
                return  # the end of the connection notifies the peer, too

    def _say_last_bye(self) -> None:
        """Send BYE, and begin to wait for the BYE of the peer, which has then read all records."""
        self._alarm = self._loop.call_later(_FINISH_S, self._finished)
        self._say_bye()

    def _finished(self) -> None:
        """End the wait that `finish` has begun."""
        if self._alarm is not None:
            self._alarm.cancel()
        if not self.is_writable:
            self.is_writable = True
            if self._handler is not None:
                self._handler.resume_writing()

    # Moves

    def land(self, segment: int, landing: Landing | None) -> None:
        """Store the bytes that arrive for a segment in a landing, as `Mover.land` does."""
        if landing is None:
            self._incoming.landings.pop(segment, None)
        elif not self.is_closed:
            self._incoming.landings[segment] = landing

    def move(self, move: Move[memoryview]) -> None:
        """Begin to move bytes, as `Mover.move` does."""
        if self.is_closed:
            move.ended(False)
        else:
            self._moves.begin(move)

    def cancel(self, move: Move[memoryview]) -> None:
        """Send no more bytes of a move, as `Mover.cancel` does."""
        self._moves.cancel(move)

    def free(self, segment: int, block: int) -> None:
        """Notify the peer that a block is no longer used, as `Mover.free` does."""
        if not (self.is_closed or self._has_said_bye):
            self._moves.free(Area(segment, block))

    def _may_move(self) -> bool:
        return not (self._has_said_bye or self._records.are_queued)

    # Messages of the peer; see `MessageEvents`

    def receive(self, message: memoryview) -> None:
        """Process a message of the peer, as `IncomingMessages.receive` does."""
        self._incoming.receive(message)

    def connection_ended(self, reason: str) -> None:
        """End this side after the end of the connection, and after the messages that arrived before it."""
        self._writer.close()
        self._incoming.end(reason)

    def record_received(self, record: memoryview) -> None:
        """Pass a record to the handler."""
        if self._handler is not None:
            self._handler.record_received(record, [])

    def acknowledge(self, message: bytes) -> None:
        """Send an acknowledgement."""
        self._writer.attempt(self._writer.write, message)

    def acknowledged(self, ack: Ack) -> None:
        """Send records and steps for which there is credit now."""
        self._moves.acknowledged(ack.steps)
        try:
            are_sent = self._records.acknowledged(ack.records)
        except OSError as error:
            self._writing_failed(error)
            return
        if are_sent and self.is_finishing:
            self._say_last_bye()
        elif are_sent and not self.is_closed:
            self.is_writable = True
            if self._handler is not None:
                self._handler.resume_writing()
        self._moves.send()

    def bye_received(self, reason: memoryview) -> None:
        """End the wait of `finish`, or the connection, after the last message of the peer."""
        if self.is_finishing:
            self._finished()
            return
        text = bytes(reason[:_MAX_REASON_BYTES]).decode(errors="replace")
        self.ended(f"it closed the connection: {text}" if text else "it closed the connection")

    # The end

    def violated(self, error: ProtocolError) -> None:
        """End the connection, because the peer broke the rules."""
        self._end(error, f"this side broke the protocol: {error}")

    def failed(self, reason: str) -> None:
        """End the connection, because this side cannot continue it."""
        self._end(reason, reason)

    def ended(self, reason: str) -> None:
        """End this side, because the peer has closed the connection or is gone."""
        self._end(reason)

    def _writing_failed(self, error: OSError) -> None:
        self._end(f"writing failed: {error}")

    def _end(self, reason: str | ProtocolError, farewell: str = "") -> None:
        """End the connection, and notify the handler.

        Args:
            reason: why the connection has ended, for the handler.
            farewell: why the connection has ended, for the peer; "" for no reason.
        """
        if self.is_closed:
            return
        handler, was_finishing = self._handler, self.is_finishing
        self._say_bye(farewell)
        self._stop()
        try:
            if was_finishing:
                self._handler = handler
                self._finished()
            elif handler is not None:
                handler.connection_lost(reason)
        finally:
            self._handler = None
            self._shut()

    def _stop(self) -> None:
        self.is_closed = True
        self._handler = None
        if self._alarm is not None:
            self._alarm.cancel()
        self._writer.close()
        self._records.clear()
        self._incoming.clear()
        self._moves.clear()
