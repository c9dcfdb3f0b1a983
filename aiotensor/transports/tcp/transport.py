"""One end of a connection between machines, with the messages of `aiotensor.protocol.network`.

    open --finish--> finishing --BYE of the peer, or too late--> finished --close--> closed
      |                 |                                           ^
      |                 '--the connection ends----------------------'
      '--BYE of the peer, violation, the connection ends--> closed (the handler is notified)

The kernel may discard data that a peer has not read when this side closes the connection. So a side that
finishes closes it only after the peer has read everything.
"""

import asyncio
import errno
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from aiotensor.errors import ProtocolError
from aiotensor.protocol.moves import Move, OutgoingMoves, ReceivedBytes, RecordWindow
from aiotensor.protocol.network import (
    ACK,
    BATCH,
    BYE,
    DATA,
    FREE,
    RECORD,
    STEP,
    Area,
    Step,
    encode_area,
    encode_data,
    encode_step,
    read_ack,
    read_area,
    read_batch,
    read_data,
    read_step,
)
from aiotensor.runtime.process_end import ProcessEnd
from aiotensor.transports.base import Handler, Landing
from aiotensor.transports.tcp.batches import BATCH_BYTES, BatchWriter
from aiotensor.transports.tcp.buffers import keep_buffers

__all__ = ["TcpTransport"]

_RECORD = bytes([RECORD])
_BYE = bytes([BYE])
_QUEUED_RECORD_BYTES = 128  # the overhead of a queued record
_MAX_REASON_BYTES = 1024
_MESSAGES_AT_ONCE = 64

# The longest wait for a peer that does not answer. Its kernel has the records by then, unless it is gone.
_FINISH_S = 1.0


class TcpTransport:
    """One end of a connection between machines.

    Args:
        send: passes a message to ZeroMQ, which copies it or not; raises `OSError` if this process lacks
            descriptors or threads.
        shut: called once, at the end: closes the connection, after the messages sent before if it can.
        read: reads a message that has arrived, and returns whether there was one.
        max_record_bytes: the longest valid record that is read.
        max_queued_bytes: the most bytes of queued records, for a writer that never waits; None for no limit.
    """

    peer_pid = None  # the peer may be on another machine

    def __init__(
        self,
        send: Callable[[bytes | memoryview, bool], object],
        shut: Callable[[], object],
        read: Callable[[], bool],
        max_record_bytes: int,
        max_queued_bytes: int | None = None,
    ) -> None:
        keep_buffers()
        self.is_writable = True
        self.is_closed = False
        self._writer = BatchWriter(send, self._writing_failed)
        self._shut = shut
        self._read = read
        self._max_record_bytes = max_record_bytes
        self._max_queued_bytes = max_queued_bytes
        self._loop = asyncio.get_running_loop()
        self._handler: Handler | None = None
        self._queue: deque[tuple[bytes, bytes]] = deque()  # records that wait for credit, and data with them
        self._queued_bytes = 0
        self._records = 0  # that were received
        self._credit = RecordWindow()
        self._received = ReceivedBytes()
        self._moves: OutgoingMoves[memoryview] = OutgoingMoves()
        self._moved: set[Area] = set()  # blocks that the peer has memory for
        self._landings: dict[int, Landing] = {}
        self._step: Step | None = None  # whose bytes are the next message
        self._data_record: memoryview | None = None  # whose data is the next message
        self._data_received: Callable[[memoryview, memoryview], None] | None = None
        self._is_held = False  # until there is memory for a step
        self._held: deque[memoryview] = deque()  # the messages since
        self._end_reason: str | None = None  # of the end that follows these
        self._has_said_bye = self._is_finishing = False
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def mover(self) -> Self:
        """This object."""
        return self

    def start(self, handler: Handler) -> None:
        """Begin to read, or pass further records to another handler, as `Transport.start` does."""
        if not self.is_closed:
            self._handler = handler

    def watch_peer(self, stated_pid: int, ended: Callable[[], object]) -> ProcessEnd:
        """Call a function soon: the peer cannot use memory of this process."""
        return ProcessEnd(stated_pid, ended, _ended_process)

    def peer_has_closed(self) -> bool:
        """Return whether the peer has closed, as `Transport.peer_has_closed` does."""
        return self.is_closed

    def read_now(self) -> None:
        """Read a record immediately, if there is one, with the messages before it."""
        before = self._records
        for _ in range(_MESSAGES_AT_ONCE):
            if self._records != before or not self._read():
                break

    # Records

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue a record, as `Transport.write` does."""
        if self.is_closed or self._is_finishing:
            return
        if self.is_writable and self._credit.has_credit(len(data)):
            self._writer.write(_RECORD + data)
            self._credit.sent(len(data))
        else:
            self._enqueue(data, b"")

    def write_with_data(self, record: bytes, data: memoryview) -> None:
        """Send or queue a record with the bytes of a tensor, as `Mover.write_with_data` does."""
        if self.is_closed or self._is_finishing:
            return
        if self.is_writable and self._credit.has_credit(len(record)):
            self._write_with_data(record, data)
            self._credit.sent(len(record))
        else:
            self._enqueue(record, bytes(data))

    def limit_queue(self, max_bytes: int) -> None:
        """Set the most bytes in the queue, as `Transport.limit_queue` does."""
        self._max_queued_bytes = max_bytes

    def receive_data(self, received: Callable[[memoryview, memoryview], None]) -> None:
        """Pass records with the bytes of a tensor to a function, as `Mover.receive_data` does."""
        self._data_received = received

    def _write_with_data(self, record: bytes, data: memoryview | bytes) -> None:
        head = encode_data(record)
        if len(data) < BATCH_BYTES:
            self._writer.write(b"".join((head, data)))
        else:
            # One more message takes less time than to copy many bytes twice.
            self._writer.write(head)
            self._writer.write(data)

    def _enqueue(self, record: bytes, data: bytes) -> None:
        queued = self._queued_bytes + len(record) + len(data) + _QUEUED_RECORD_BYTES
        if self._max_queued_bytes is not None and queued > self._max_queued_bytes:
            raise OSError(errno.ENOBUFS, "the peer does not read its records")
        self._queue.append((record, data))
        self._queued_bytes = queued
        self.is_writable = False

    def finish(self) -> None:
        """Write no more records, and wait until the peer has read all, as `Transport.finish` does."""
        if self.is_closed or self._is_finishing:
            return
        self._is_finishing, self.is_writable = True, False
        if not self._queue:
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
        """Send the last message, and wait for that of the peer, which then has read all records."""
        self._alarm = self._loop.call_later(_FINISH_S, self._finished)
        self._say_bye()

    def _finished(self) -> None:
        """End the wait of `finish`."""
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
            self._landings.pop(segment, None)
        elif not self.is_closed:
            self._landings[segment] = landing

    def move(self, move: Move[memoryview]) -> None:
        """Begin to move bytes, as `Mover.move` does."""
        if self.is_closed:
            move.ended(False)
            return
        self._moves.begin(move)
        self._send_steps()

    def move_now(self, area: Area, nbytes: int, start: int, data: memoryview) -> bool:
        """Move few bytes at once, as `Mover.move_now` does."""
        # Records that wait for credit may attach the segment.
        if self.is_closed or self._has_said_bye or self._queue:
            return False
        step = self._moves.step_now(area, nbytes, start, len(data))
        if step is not None:
            self._moved.add(area)
            self._send_copy(step, data)
        return step is not None

    def cancel(self, move: Move[memoryview]) -> None:
        """Send no more bytes of a move, as `Mover.cancel` does."""
        if self._moves.cancel(move):
            move.ended(False)

    def free(self, segment: int, block: int) -> None:
        """Notify the peer that a block is used no more, as `Mover.free` does."""
        area = Area(segment, block)
        if area in self._moved:
            self._moved.remove(area)
            if not (self.is_closed or self._has_said_bye):
                self._try(self._writer.write_soon, encode_area(area))

    def _send_steps(self) -> None:
        # Records that wait for credit may attach the segment.
        while not (self._queue or self._has_said_bye) and (found := self._moves.next_step()) is not None:
            move, step = found
            self._moved.add(move.area)
            position = step.start - move.start
            data = move.source[position : position + step.length]
            if move.is_copied:
                self._send_copy(step, data)
                move.ended(True)
            else:
                self._try(self._writer.write, encode_step(step))
                self._try(self._writer.write_uncopied, data)
        if self._moves.has_turns:
            self._try(self._writer.flush)  # these moves wait for the acknowledgement of earlier steps

    def _send_copy(self, step: Step, data: memoryview) -> None:
        if len(data) < BATCH_BYTES:
            self._try(self._writer.write_soon, b"".join((encode_step(step), data)))
        else:
            # One more message takes less time than to copy many bytes twice.
            self._try(self._writer.write, encode_step(step))
            self._try(self._writer.write, data)

    def _try(self, write: Callable[..., None], *messages: bytes | memoryview) -> None:
        """Call a method of the writer, and end the connection if it fails."""
        try:
            write(*messages)
        except OSError as error:
            self._writing_failed(error)

    def _writing_failed(self, error: OSError) -> None:
        self._end(f"writing failed: {error}")

    # Messages of the peer

    def receive(self, message: memoryview) -> None:
        """Handle a message of the peer, or keep it while a step before it waits for memory."""
        if self._is_held:
            self._held.append(message)
        elif not self.is_closed:
            try:
                self._handle(message)
            except ProtocolError as error:
                self._violated(error)

    def connection_ended(self, reason: str) -> None:
        """Handle the end of the connection, after the messages that arrived before."""
        self._writer.close()
        if self._is_held:
            self._end_reason = reason
        else:
            self._end(reason)

    def _handle(self, message: memoryview) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            if len(message) != step.length:
                raise ProtocolError(f"it sent {len(message)} bytes after a step of {step.length}")
            self._store(step, message)
            return
        if self._data_record is not None:
            record, self._data_record = self._data_record, None
            self._record_with_data(record, message)
            return
        kind = message[0] if message else -1
        if kind == RECORD:
            self._record_arrived(len(message) - 1)
            if self._handler is not None:
                self._handler.record_received(message[1:], [])
        elif kind == STEP:
            step, data = read_step(message)
            if data:
                self._store(step, data)
            else:
                self._step = step
        elif kind == DATA:
            record, data = read_data(message)
            self._record_arrived(len(record))
            if data:
                self._record_with_data(record, data)
            else:
                self._data_record = record
        elif kind == ACK:
            self._acknowledged(message)
        elif kind == FREE:
            area = read_area(message)
            landing = self._landings.get(area.segment)
            if landing is not None:
                landing.free(area.block)
        elif kind == BATCH:
            for part in read_batch(message):
                self.receive(part)
        elif kind == BYE:
            self._bye_received(message)
        else:
            raise ProtocolError(f"it sent a message of kind {kind}, which is unknown here")

    def _record_arrived(self, nbytes: int) -> None:
        """Count a record."""
        if nbytes > self._max_record_bytes:
            raise ProtocolError(f"it sent a record of more than {self._max_record_bytes} bytes")
        self._records += 1
        if self._received.record(nbytes):
            self._try(self._writer.write, self._received.ack())

    def _record_with_data(self, record: memoryview, data: memoryview) -> None:
        if self._data_received is None:
            raise ProtocolError("it sent the bytes of a tensor with a record")
        if self._handler is not None:
            self._data_received(record, data)

    def _store(self, step: Step, data: memoryview) -> None:
        landing = self._landings.get(step.area.segment)
        if landing is None:
            if self._is_finishing:
                return  # the handler did not read the record that attaches it
            raise ProtocolError(f"it moved bytes to segment {step.area.segment}, which it never attached")

        def resume(failure: str) -> None:
            self._is_held = False
            if failure:
                self._end(failure, failure)
            elif not self.is_closed:
                held, self._held = self._held, deque()
                try:
                    self._store(step, data)
                except ProtocolError as error:
                    self._violated(error)
                self._continue(held)

        if landing.store(step.area.block, step.nbytes, step.start, data, resume):
            if self._received.step(step):
                self._try(self._writer.write, self._received.ack())
        else:
            self._is_held = True

    def _continue(self, held: deque[memoryview]) -> None:
        """Handle the messages that waited for memory."""
        while held and not self.is_closed:
            self.receive(held.popleft())
        if self._end_reason is not None and not self._is_held:
            self._end(self._end_reason)

    def _acknowledged(self, message: memoryview) -> None:
        ack = read_ack(message)
        self._credit.acknowledged(ack.records)
        for move in self._moves.acknowledged(ack.steps):
            move.ended(not move.is_cancelled)
        self._send_queued()
        self._send_steps()

    def _send_queued(self) -> None:
        """Send the queued records for which there is credit."""
        queue = self._queue
        if not queue:
            return
        while queue and self._credit.has_credit(len(queue[0][0])) and not self.is_closed:
            record, data = queue.popleft()
            self._queued_bytes -= len(record) + len(data) + _QUEUED_RECORD_BYTES
            self._credit.sent(len(record))
            if data:
                self._try(self._write_with_data, record, data)
            else:
                self._try(self._writer.write, _RECORD + record)
        if queue or self.is_closed:
            return
        if self._is_finishing:
            self._say_last_bye()
            return
        self.is_writable = True
        if self._handler is not None:
            self._handler.resume_writing()

    def _bye_received(self, message: memoryview) -> None:
        if self._is_finishing:
            self._finished()
            return
        reason = bytes(message[1 : 1 + _MAX_REASON_BYTES]).decode(errors="replace")
        self._end(f"it closed the connection: {reason}" if reason else "it closed the connection")

    # The end

    def _violated(self, error: ProtocolError) -> None:
        self._end(error, f"this side broke the protocol: {error}")

    def _end(self, reason: str | ProtocolError, farewell: str = "") -> None:
        """End the connection, and notify the handler.

        Args:
            reason: why it has ended, for the handler.
            farewell: why it has ended, for the peer.
        """
        if self.is_closed:
            return
        handler, was_finishing = self._handler, self._is_finishing
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
        self._handler = self._data_received = None
        if self._alarm is not None:
            self._alarm.cancel()
        self._writer.close()
        self._queue.clear()
        self._held.clear()
        self._landings.clear()
        for move in self._moves.clear():
            move.ended(False)


def _ended_process(pid: int) -> int:
    raise ProcessLookupError(errno.ESRCH, "its process has no access to this memory")
