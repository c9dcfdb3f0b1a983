"""Frames on their way out: those of one turn of the loop share a record, if nobody flushes earlier."""

import asyncio
from collections.abc import Callable

from aiotensor.protocol.frames import LEAST_FRAME_BYTES, MAX_FRAMES, MAX_RECORD_BYTES, ToReceiver, encode

__all__ = ["Outbox"]

# What a frame counts without its payload, so that a record has at most `MAX_FRAMES`. No frame takes more: the
# longest is an account, with two tables of waits, names and holders.
_FRAME_BYTES = MAX_RECORD_BYTES // MAX_FRAMES


class Outbox:
    """Collect frames, and write them at the end of the turn at the latest.

    Args:
        write: takes a record.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._write = write
        self._frames: list[ToReceiver] = []
        self._bytes = 0
        self._is_scheduled = False
        self.max_bytes = LEAST_FRAME_BYTES  # of one record

    def add(self, frame: ToReceiver, payload_bytes: int = 0) -> None:
        """Send a frame with this turn's others."""
        self._bytes += payload_bytes + _FRAME_BYTES
        if self._bytes > self.max_bytes and self._frames:
            self.flush()
            self._bytes = payload_bytes + _FRAME_BYTES
        self._frames.append(frame)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._turn_ended)

    def flush(self) -> None:
        """Write what is here now."""
        if self._frames:
            frames, self._frames, self._bytes = self._frames, [], 0
            self._write(encode(*frames))

    def clear(self) -> None:
        """Forget what is here: nobody is left to read it, and the next one is told its own limits."""
        self._frames.clear()
        self._bytes = 0
        self.max_bytes = LEAST_FRAME_BYTES

    def _turn_ended(self) -> None:
        self._is_scheduled = False
        self.flush()
