"""Bytes that are moved between machines in steps, and the credit for steps and records."""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import Generic, TypeVar

from aiotensor.errors import ProtocolError
from aiotensor.protocol.network import STEP_BYTES, Ack, Area, Step, encode_ack

__all__ = [
    "WINDOW_BYTES",
    "Move",
    "OutgoingMoves",
    "ReceivedBytes",
    "RecordWindow",
]

# The bytes of steps that may be under way: two steps do not suffice for the full speed, since one is
# acknowledged while the other is sent.
WINDOW_BYTES = 4 * STEP_BYTES

# The records that may be under way, and the overhead of each, both about as in the buffer of a local socket.
_RECORD_WINDOW_BYTES = 256 << 10
_RECORD_OVERHEAD_BYTES = 512

Source = TypeVar("Source")

_last = attrgetter("last")


class Move(Generic[Source]):
    """Bytes of a block that are moved to the peer.

    Args:
        area: the block.
        nbytes: the size of the block.
        start: the position of the first byte to move, counted from the beginning of the segment.
        source: the bytes.
        length: their number.
        ended: called once the peer has all bytes, or no step is under way any more; with whether it has them.
    """

    __slots__ = ("area", "ended", "is_cancelled", "last", "length", "nbytes", "sent", "source", "start")

    def __init__(
        self,
        area: Area,
        nbytes: int,
        start: int,
        source: Source,
        length: int,
        ended: Callable[[bool], object],
    ) -> None:
        self.area = area
        self.nbytes = nbytes
        self.start = start
        self.source = source
        self.length = length
        self.ended = ended
        self.sent = 0
        self.last = 0  # the bytes of all moves up to its last step
        self.is_cancelled = False

    @property
    def is_copied(self) -> bool:
        """Whether it is one step, which is copied, so that the source may change at once."""
        return self.length <= STEP_BYTES


class OutgoingMoves(Generic[Source]):
    """The moves of one end: one step of each in turn, as far as the window allows.

    waiting for its turn --last step sent--> under way --acknowledged--> ended
       |                                                                  ^
       '--cancelled--> (its steps are under way) --acknowledged-----------'
    """

    def __init__(self) -> None:
        self._turns: deque[Move[Source]] = deque()
        self._under_way: list[Move[Source]] = []  # by the positions of their last steps
        self._sent = self._acknowledged = self._wanted = 0

    @property
    def is_idle(self) -> bool:
        """Whether no move waits or is under way."""
        return not (self._turns or self._under_way)

    @property
    def has_turns(self) -> bool:
        """Whether a move has steps to send."""
        return bool(self._turns)

    def begin(self, move: Move[Source]) -> None:
        """Add a move, which gets its turn after the others."""
        self._turns.append(move)

    def cancel(self, move: Move[Source]) -> bool:
        """Send no more steps of a move, and return whether it has ended: no step of it is under way."""
        if move not in self._turns:
            return False  # it has ended, or all its steps are under way
        self._turns.remove(move)
        if not move.sent:
            return True
        move.is_cancelled = True
        # Its last step may be followed by small steps of others, which are not acknowledged.
        insort(self._under_way, move, key=_last)
        return False

    def next_step(self) -> tuple[Move[Source], Step] | None:
        """Return the next step and its move, which the caller sends; None if there is none.

        The caller ends the move if it is copied: this was its only step.
        """
        if not self._turns:
            return None
        move = self._turns[0]
        length = min(STEP_BYTES, move.length - move.sent)
        if not self._has_credit(length):
            return None
        start = move.start + move.sent
        move.sent += length
        is_last = move.sent == move.length
        step = self._step(move.area, move.nbytes, start, length, is_last and not move.is_copied)
        move.last = self._sent
        self._turns.popleft()
        if not is_last:
            self._turns.append(move)
        elif not move.is_copied:
            self._under_way.append(move)
        return move, step

    def _has_credit(self, length: int) -> bool:
        return self._sent + length <= self._acknowledged + WINDOW_BYTES

    def _step(self, area: Area, nbytes: int, start: int, length: int, wants_ack: bool) -> Step:
        """Count a step; an acknowledgement is also wanted for each MiB."""
        self._sent += length
        if self._sent - self._wanted >= STEP_BYTES:
            wants_ack = True
        if wants_ack:
            self._wanted = self._sent
        return Step(area, nbytes, start, length, wants_ack)

    def acknowledged(self, total: int) -> list[Move[Source]]:
        """Handle an acknowledgement, and return the moves that have ended.

        Raises:
            ProtocolError: the total is less than before, or more than was sent.
        """
        if not self._acknowledged <= total <= self._sent:
            raise ProtocolError(f"it acknowledged {total} bytes, of {self._sent} that were sent")
        self._acknowledged = total
        count = bisect_right(self._under_way, total, key=_last)
        ended = self._under_way[:count]
        del self._under_way[:count]
        return ended

    def clear(self) -> list[Move[Source]]:
        """Return all moves, because the connection has ended."""
        left = [*self._turns, *self._under_way]
        self._turns.clear()
        self._under_way.clear()
        return left


class RecordWindow:
    """The credit of one end for its records."""

    def __init__(self) -> None:
        self._sent = self._acknowledged = 0

    def has_credit(self, nbytes: int) -> bool:
        """Return whether a record of this size may be sent."""
        return self._sent + nbytes + _RECORD_OVERHEAD_BYTES <= self._acknowledged + _RECORD_WINDOW_BYTES

    def sent(self, nbytes: int) -> None:
        """Count a record."""
        self._sent += nbytes + _RECORD_OVERHEAD_BYTES

    def acknowledged(self, total: int) -> None:
        """Handle an acknowledgement.

        Raises:
            ProtocolError: the total is less than before, or more than was sent.
        """
        if not self._acknowledged <= total <= self._sent:
            raise ProtocolError(f"it acknowledged {total} bytes of records, of {self._sent} that were sent")
        self._acknowledged = total


class ReceivedBytes:
    """Count the bytes that arrive at one end, and decide when to acknowledge them."""

    def __init__(self) -> None:
        self._steps = self._records = 0
        self._reported = Ack(0, 0)

    def record(self, nbytes: int) -> bool:
        """Count a record, and return whether an acknowledgement is due.

        Raises:
            ProtocolError: it exceeds the credit of the peer.
        """
        self._records += nbytes + _RECORD_OVERHEAD_BYTES
        unreported = self._records - self._reported.records
        if unreported > _RECORD_WINDOW_BYTES:
            raise ProtocolError("it sent records without credit")
        return unreported > _RECORD_WINDOW_BYTES // 2

    def step(self, step: Step) -> bool:
        """Count a step, and return whether an acknowledgement is due.

        Raises:
            ProtocolError: it exceeds the credit of the peer.
        """
        self._steps += step.length
        if self._steps - self._reported.steps > WINDOW_BYTES:
            raise ProtocolError("it moved bytes without credit")
        return step.wants_ack

    def ack(self) -> bytes:
        """Return the acknowledgement of all bytes."""
        self._reported = Ack(self._steps, self._records)
        return encode_ack(self._reported)
