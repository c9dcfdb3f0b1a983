"""The messages that an honest peer sends to a rogue between machines."""

from collections import deque

from aiotensor.protocol import moves, network
from verification.fuzz.steps import HEARD

__all__ = ["Inbox"]

_PLACEHOLDER = network.encode_ack(network.Ack(HEARD, HEARD))


class Inbox:
    """The messages on one connection, and the acknowledgement of them.

    Attributes:
        records: the records that were not read, the oldest first.
        count: the number of all records so far.
        has_ended: whether the last message has arrived.
    """

    def __init__(self) -> None:
        self.records: deque[bytes] = deque()
        self.count = 0
        self.has_ended = False
        self._received = moves.ReceivedBytes()
        self._acknowledgement = self._received.ack()
        self._step: network.Step | None = None  # whose bytes are the next message
        self._is_carried_next = False  # the bytes of a tensor are the next message

    def add(self, message: bytes | memoryview) -> None:
        """Handle a message."""
        data = memoryview(message)
        if self._step is not None:
            assert len(data) == self._step.length
            self._count(self._step)
            return
        if self._is_carried_next:
            self._is_carried_next = False
            return
        match data[0]:
            case network.RECORD:
                self._received.record(len(data) - 1)
                self._acknowledgement = self._received.ack()
                self.records.append(bytes(data[1:]))
                self.count += 1
            case network.DATA:
                record, carried = network.read_data(data)
                self._received.record(len(record))
                self._acknowledgement = self._received.ack()
                self.records.append(bytes(record))
                self.count += 1
                self._is_carried_next = not carried
            case network.STEP:
                step, rest = network.read_step(data)
                if rest:
                    self._count(step)
                else:
                    self._step = step
            case network.BATCH:
                for part in network.read_batch(data):
                    self.add(part)
            case network.BYE:
                self.has_ended = True

    def filled_in(self, message: bytes) -> bytes:
        """Replace the placeholders of acknowledgements in a message of the rogue."""
        return message.replace(_PLACEHOLDER, self._acknowledgement)

    def _count(self, step: network.Step) -> None:
        self._step = None
        self._received.step(step)
        # For each step: the peer may send more than it has credit for, if the rogue acknowledges too much.
        self._acknowledgement = self._received.ack()
