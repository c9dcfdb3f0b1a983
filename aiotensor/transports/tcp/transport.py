"""One end of a connection between machines, which exchanges the messages of `aiotensor.protocol.network`.

    open --finish--> finishing --BYE of the peer, or too late--> finished --close--> closed
      |                 |                                           ^
      |                 '--the connection ends----------------------'
      '--BYE of the peer, violation, the connection ends--> closed (the handler is notified)

The kernel may discard data that a peer has not read when this side closes the connection. So after `finish`,
a side waits until the peer has read everything before it closes the connection.
"""

import asyncio
import errno
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.protocol.network import (
    ACK,
    BATCH,
    BYE,
    FREE,
    MAX_BATCH,
    RECORD,
    STEP,
    WINDOW_BYTES,
    Area,
    Move,
    OutgoingMoves,
    ReceivedBytes,
    RecordWindow,
    Step,
    encode_area,
    encode_batch,
    encode_step,
    read_ack,
    read_area,
    read_batch,
    read_step,
)
from aiotensor.transports.base import MAX_UNREAD_BYTES, Handler, Landing

_RECORD, _BYE = bytes([RECORD]), bytes([BYE])
_MAX_REASON_BYTES = 1024
_QUEUED_RECORD_BYTES = 128  # the overhead of a queued record
_MESSAGES_AT_ONCE = 64

# Small messages are sent together, because each wake-up of ZeroMQ's thread takes time: a round trip of 64 KiB
# takes 1.4 times as long without batches. A larger message is sent alone.
_BATCH_BYTES = 128 << 10
_PATIENCE_S = 0.01  # a message that can wait is sent with the next one, after this time at the latest

# The maximum wait for the BYE of the peer. By then, its kernel has the records, unless the peer is gone.
_FINISH_S = 1.0


@functools.cache
def _keep_buffers() -> None:
    """Keep freed buffers in this process, up to 8 MiB at the end of each heap.

    ZeroMQ allocates a buffer for each message. By default, glibc returns a megabyte to the system as soon as
    it is freed, so that the next message causes a page fault for each page. After a larger block was freed,
    glibc keeps twice the size of that block (`mallopt(3)`, ``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD``). An
    application that frees such a block has the same effect. With other allocators, there is no effect.
    """
    block = bytes(WINDOW_BYTES)  # not touched, so it takes no memory
    del block


class TcpTransport:
    """One end of a connection between machines.

    Args:
        send: passes a message to ZeroMQ, together with whether ZeroMQ copies it; has no effect after the end
            of the connection.
        shut: closes the connection; called once, at the end. ZeroMQ may discard messages that are unsent.
        read: reads a message that has arrived, and returns whether there was one.
    """

    peer_pid = None  # the peer may be on another machine

    def __init__(
        self,
        send: Callable[[bytes | memoryview, bool], object],
        shut: Callable[[], object],
        read: Callable[[], bool],
    ) -> None:
        _keep_buffers()
        self.is_writable = True
        self.is_closed = False
        self._send = send
        self._shut = shut
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._handler: Handler | None = None
        self._is_finishing = self._has_said_bye = False
        self._alarm: asyncio.TimerHandle | None = None
        # Messages to the peer
        self._batch: list[bytes] = []  # waiting for the next message
        self._batch_bytes = 0
        self._patience: asyncio.TimerHandle | None = None
        self._credit = RecordWindow()
        self._queue: deque[bytes] = deque()  # records for which there is no credit
        self._queued_bytes = 0
        self._max_queued_bytes = MAX_UNREAD_BYTES
        self._moves: OutgoingMoves[memoryview] = OutgoingMoves()
        self._blocks: set[Area] = set()  # for which the peer has memory
        # Messages of the peer
        self._received = ReceivedBytes()
        self._records = 0  # the number of records that have arrived
        self._landings: dict[int, Landing] = {}  # memory for the segments of the peer, by number
        self._step: Step | None = None  # whose bytes are the next message
        self._is_held = False  # until there is memory for a step
        self._held: deque[memoryview] = deque()  # the messages after that step
        self._end_reason: str | None = None  # why the connection has ended after these messages

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
        before = self._records
        for _ in range(_MESSAGES_AT_ONCE):
            if self._records != before or not self._read():
                break

    # Records

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue a record, as `Transport.write` does."""
        if self.is_closed or self._is_finishing:
            return
        if not self._queue and self._credit.has_credit(len(data)):
            self._write(_RECORD + data)
            self._credit.sent(len(data))
            return
        queued = self._queued_bytes + len(data) + _QUEUED_RECORD_BYTES
        if queued > self._max_queued_bytes:
            raise OSError(errno.ENOBUFS, "the peer does not read its records")
        self._queue.append(data)
        self._queued_bytes = queued
        self.is_writable = False

    def limit_queue(self, max_bytes: int) -> None:
        """Limit the bytes in the queue, as `Transport.limit_queue` does."""
        self._max_queued_bytes = max_bytes

    def _write_queued(self, total: int) -> None:
        """Send the queued records for which there is credit after an acknowledgement.

        Raises:
            ProtocolError: the peer acknowledged less than before, or more than was sent.
        """
        self._credit.acknowledged(total)
        queue = self._queue
        if not queue:
            return
        while queue and self._credit.has_credit(len(queue[0])):
            record = queue.popleft()
            self._queued_bytes -= len(record) + _QUEUED_RECORD_BYTES
            self._credit.sent(len(record))
            self._write(_RECORD + record)
        if queue:
            return
        if self._is_finishing:
            self._say_last_bye()
        elif not self.is_closed:
            self.is_writable = True
            if self._handler is not None:
                self._handler.resume_writing()

    def finish(self) -> None:
        """Write no more records; `is_writable` becomes true once the peer has read all of them."""
        if self.is_closed or self._is_finishing:
            return
        self._is_finishing, self.is_writable = True, False
        if not self._queue:
            self._say_last_bye()

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
        else:
            self._moves.begin(move)
            self._send_steps()

    def cancel(self, move: Move[memoryview]) -> None:
        """Send no more bytes of a move, as `Mover.cancel` does."""
        if self._moves.cancel(move):
            move.ended(False)

    def free(self, segment: int, block: int) -> None:
        """Notify the peer that a block is no longer used, as `Mover.free` does."""
        area = Area(segment, block)
        if area in self._blocks and not (self.is_closed or self._has_said_bye):
            self._blocks.remove(area)
            self._write_soon(encode_area(area))

    def _send_steps(self) -> None:
        """Send the steps for which there is credit."""
        # Not while records are queued: one of them may attach the segment.
        while not (self._queue or self._has_said_bye) and (found := self._moves.next_step()) is not None:
            move, step = found
            self._blocks.add(move.area)
            position = step.start - move.start
            data = move.source[position : position + step.length]
            if move.is_copied and len(data) < _BATCH_BYTES:
                self._write_soon(b"".join((encode_step(step), data)))
            else:
                self._write(encode_step(step))
                self._send(data, move.is_copied)
            if move.is_copied:
                move.ended(True)
        if self._moves.has_turns:
            self._flush()  # the other steps wait until these are acknowledged

    # Batches

    def _write(self, message: bytes) -> None:
        """Send a message, after the waiting ones."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch and len(message) <= _BATCH_BYTES:
            message = encode_batch([*batch, message])
        elif batch:
            self._send(encode_batch(batch), True)
        self._send(message, True)

    def _write_soon(self, message: bytes) -> None:
        """Send a message with the next one, unless it is large."""
        if self._batch_bytes + len(message) > _BATCH_BYTES or len(self._batch) + 1 == MAX_BATCH:
            self._write(message)
            return
        self._batch.append(message)
        self._batch_bytes += len(message)
        if self._patience is None:
            self._patience = self._loop.call_later(_PATIENCE_S, self._patience_ended)

    def _patience_ended(self) -> None:
        self._patience = None
        self._flush()

    def _flush(self) -> None:
        """Send the waiting messages."""
        if self._batch:
            self._write(self._batch.pop())

    # Messages of the peer

    def receive(self, message: memoryview) -> None:
        """Process a message of the peer, or keep it while an earlier step waits for memory."""
        if self._is_held:
            self._held.append(message)
        elif not self.is_closed:
            try:
                self._process(message)
            except ProtocolError as error:
                self._violated(error)

    def _process(self, message: memoryview) -> None:
        if self._step is not None:
            step, self._step = self._step, None
            if len(message) != step.length:
                raise ProtocolError(f"it sent {len(message)} bytes after a step of {step.length}")
            self._store(step, message)
            return
        kind = message[0] if message else -1
        if kind == RECORD:
            self._record_received(message[1:])
        elif kind == STEP:
            step, data = read_step(message)
            if data:
                self._store(step, data)
            else:
                self._step = step
        elif kind == ACK:
            ack = read_ack(message)
            for move in self._moves.acknowledged(ack.steps):
                move.ended(not move.is_cancelled)
            self._write_queued(ack.records)
            self._send_steps()
        elif kind == FREE:
            area = read_area(message)
            landing = self._landings.get(area.segment)
            if landing is not None and not self._is_finishing:  # else the block may be unknown
                landing.free(area.block)
        elif kind == BATCH:
            for part in read_batch(message):
                self.receive(part)
        elif kind == BYE:
            self._bye_received(message[1:])
        else:
            raise ProtocolError(f"it sent a message of the unknown kind {kind}")

    def _record_received(self, record: memoryview) -> None:
        if len(record) > MAX_RECORD_BYTES:
            raise ProtocolError(f"it sent a record of more than {MAX_RECORD_BYTES} bytes")
        self._records += 1
        if self._received.record(len(record)):
            self._write(self._received.ack())
        if self._handler is not None:
            self._handler.record_received(record, [])

    def _store(self, step: Step, data: memoryview) -> None:
        landing = self._landings.get(step.area.segment)
        if landing is None:
            if self._is_finishing:
                return  # the record that attaches the segment was ignored
            raise ProtocolError(f"it moved bytes to segment {step.area.segment}, which it never attached")
        resume = functools.partial(self._resume, step, data)
        if not landing.store(step.area.block, step.nbytes, step.start, data, resume):
            self._is_held = True
        elif self._received.step(step):
            self._write(self._received.ack())

    def _resume(self, step: Step, data: memoryview, failure: str) -> None:
        """Store the bytes of a step once there is memory for them, and process the messages after it."""
        self._is_held = False
        if failure:
            self._end(failure, failure)
        if self.is_closed:
            return
        held, self._held = self._held, deque()
        try:
            self._store(step, data)
        except ProtocolError as error:
            self._violated(error)
        while held and not self.is_closed:
            self.receive(held.popleft())
        if self._end_reason is not None and not self._is_held:
            self._end(self._end_reason)

    def _bye_received(self, reason: memoryview) -> None:
        """End the wait of `finish`, or the connection, after the last message of the peer."""
        if self._is_finishing:
            self._finished()
            return
        text = bytes(reason[:_MAX_REASON_BYTES]).decode(errors="replace")
        self._end(f"it closed the connection: {text}" if text else "it closed the connection")

    # The end

    def connection_ended(self, reason: str) -> None:
        """End this side after the end of the connection, and after the messages that arrived before it."""
        if self._is_held:
            self._end_reason = reason
        else:
            self._end(reason)

    def close(self) -> None:
        """Close at once, and discard the queued records."""
        if not self.is_closed:
            self._say_bye()
            self._stop()
            self._shut()

    def _say_bye(self, reason: str = "") -> None:
        if not self._has_said_bye:
            self._has_said_bye = True
            self._write(_BYE + reason.encode(errors="replace")[:_MAX_REASON_BYTES])

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

    def _violated(self, error: ProtocolError) -> None:
        self._end(error, f"this side broke the protocol: {error}")

    def _end(self, reason: str | ProtocolError, farewell: str = "") -> None:
        """End the connection, and notify the handler.

        Args:
            reason: why the connection has ended, for the handler.
            farewell: why the connection has ended, for the peer; "" for no reason.
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
        self._handler = None
        for timer in (self._alarm, self._patience):
            if timer is not None:
                timer.cancel()
        self._batch.clear()
        self._queue.clear()
        self._held.clear()
        self._landings.clear()
        for move in self._moves.clear():
            move.ended(False)
