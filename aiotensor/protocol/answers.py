"""The base class of connections that answer messages; answers that are sent together share frames."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import MAX_NUMBERS, Discarded, Release, Taken
from aiotensor.protocol.records import RecordConnection

__all__ = ["AnsweringConnection"]

Received = TypeVar("Received")
Sent = TypeVar("Sent")


class AnsweringConnection(RecordConnection[Received, Sent | Taken | Discarded | Release]):
    """One end of a connection that takes messages and returns memory.

    The arguments are those of `RecordConnection`.
    """

    def __init__(
        self,
        role: str,
        peer: str,
        decoder: "msgspec.msgpack.Decoder[list[Received]]",
        max_received_bytes: int,
        max_sent_bytes: int,
    ) -> None:
        super().__init__(role, peer, decoder, max_received_bytes, max_sent_bytes)
        self._taken: list[int] = []
        self._discarded: list[int] = []
        self._released: list[int] = []

    def release(self, block: int) -> None:
        """Return a block to the peer; called once for each tensor or content that was announced in it."""
        self._released.append(block)

    def close(self, close: Close) -> None:
        """Close the connection: `close` is the last frame, after all pending answers."""
        self._send_answers()
        super().close(close)

    def data_to_send(self) -> Sequence[bytes]:
        """Return all records to write, including one with the remaining frames and answers."""
        if self._taken or self._discarded or self._released:
            self._send_answers()
        return super().data_to_send()

    def _send_answers(self) -> None:
        for make, numbers in ((Taken, self._taken), (Discarded, self._discarded), (Release, self._released)):
            if numbers:
                for start in range(0, len(numbers), MAX_NUMBERS):
                    self._send(make(tuple(numbers[start : start + MAX_NUMBERS])))
                numbers.clear()
