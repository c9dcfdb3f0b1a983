"""The records and moves that are sent to a peer on another machine, each within its credit."""

import errno
from collections import deque
from collections.abc import Callable

from aiotensor.protocol.moves import Move, OutgoingMoves, RecordWindow
from aiotensor.protocol.network import RECORD, Area, Step, encode_area, encode_step
from aiotensor.transports.tcp.batches import BATCH_BYTES, BatchWriter

__all__ = ["OutgoingRecords", "SteppedMoves"]

_RECORD = bytes([RECORD])
_QUEUED_RECORD_BYTES = 128  # the overhead of a queued record


class OutgoingRecords:
    """Write records, and queue those for which there is no credit.

    Args:
        writer: the writer of the connection.
        max_queued_bytes: the maximum bytes in the queue, for a writer that never waits; None for no limit.
    """

    def __init__(self, writer: BatchWriter, max_queued_bytes: int | None) -> None:
        self.max_queued_bytes = max_queued_bytes
        self._writer = writer
        self._credit = RecordWindow()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0

    @property
    def are_queued(self) -> bool:
        """Whether records wait for credit."""
        return bool(self._queue)

    def write(self, record: bytes) -> None:
        """Send or queue a record.

        Raises:
            OSError: sending failed, or the queue is full.
        """
        if not self._queue and self._credit.has_credit(len(record)):
            self._writer.write(_RECORD + record)
            self._credit.sent(len(record))
            return
        queued = self._queued_bytes + len(record) + _QUEUED_RECORD_BYTES
        if self.max_queued_bytes is not None and queued > self.max_queued_bytes:
            raise OSError(errno.ENOBUFS, "the peer does not read its records")
        self._queue.append(record)
        self._queued_bytes = queued

    def acknowledged(self, total: int) -> bool:
        """Send the queued records for which there is credit now, and return whether this emptied the queue.

        Raises:
            ProtocolError: the peer acknowledged less than before, or more than was sent.
            OSError: sending failed.
        """
        self._credit.acknowledged(total)
        queue = self._queue
        if not queue:
            return False
        while queue and self._credit.has_credit(len(queue[0])):
            record = queue.popleft()
            self._queued_bytes -= len(record) + _QUEUED_RECORD_BYTES
            self._credit.sent(len(record))
            self._writer.write(_RECORD + record)
        return not queue

    def clear(self) -> None:
        """Discard the queue, because the connection has ended."""
        self._queue.clear()


class SteppedMoves:
    """Move bytes to the peer in steps, within its credit.

    Args:
        writer: the writer of the connection; its errors end the connection.
        may_send: returns whether a step may be sent now: not while records are queued, because one of them
            may attach the segment.
    """

    def __init__(self, writer: BatchWriter, may_send: Callable[[], bool]) -> None:
        self._writer = writer
        self._may_send = may_send
        self._blocks: set[Area] = set()  # for which the peer has memory
        self._moves: OutgoingMoves[memoryview] = OutgoingMoves()

    def begin(self, move: Move[memoryview]) -> None:
        """Begin to move bytes."""
        self._moves.begin(move)
        self.send()

    def cancel(self, move: Move[memoryview]) -> None:
        """Send no more bytes of a move, as `Mover.cancel` does."""
        if self._moves.cancel(move):
            move.ended(False)

    def acknowledged(self, total: int) -> None:
        """End the moves whose bytes have all arrived at the peer.

        Raises:
            ProtocolError: the peer acknowledged less than before, or more than was sent.
        """
        for move in self._moves.acknowledged(total):
            move.ended(not move.is_cancelled)

    def send(self) -> None:
        """Send the steps for which there is credit."""
        while self._may_send() and (found := self._moves.next_step()) is not None:
            move, step = found
            self._blocks.add(move.area)
            position = step.start - move.start
            data = move.source[position : position + step.length]
            if move.is_copied:
                self._send_copy(step, data)
                move.ended(True)
            else:
                self._writer.attempt(self._writer.write, encode_step(step))
                self._writer.attempt(self._writer.write_uncopied, data)
        if self._moves.has_turns:
            self._writer.attempt(self._writer.flush)  # the other steps wait until these are acknowledged

    def free(self, area: Area) -> None:
        """Notify the peer that a block is no longer used, unless the peer never had memory for it."""
        if area in self._blocks:
            self._blocks.remove(area)
            self._writer.attempt(self._writer.write_soon, encode_area(area))

    def clear(self) -> None:
        """End all moves, because the connection has ended."""
        for move in self._moves.clear():
            move.ended(False)

    def _send_copy(self, step: Step, data: memoryview) -> None:
        writer = self._writer
        if len(data) < BATCH_BYTES:
            writer.attempt(writer.write_soon, b"".join((encode_step(step), data)))
        else:
            writer.attempt(writer.write, encode_step(step))
            writer.attempt(writer.write, data)
