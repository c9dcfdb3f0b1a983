"""Batches of small messages, sent together because each wake-up of ZeroMQ's thread takes time."""

import asyncio
from collections.abc import Callable

from aiotensor.protocol.network import MAX_BATCH, encode_batch

__all__ = ["BATCH_BYTES", "BatchWriter"]

# A message that can wait is sent with the next one, after this time at the latest.
_PATIENCE_S = 0.01

BATCH_BYTES = 128 << 10  # of all waiting messages together; a larger message is sent alone


class BatchWriter:
    """Write the messages of one connection in order; belongs to the running loop.

    Args:
        send: passes a message to ZeroMQ, together with whether ZeroMQ copies it; raises `OSError` if this
            process has no descriptors or threads left.
        failed: called with an error of a call by `attempt`, or of `send` for a message that was delayed.
    """

    def __init__(
        self, send: Callable[[bytes | memoryview, bool], object], failed: Callable[[OSError], object]
    ) -> None:
        self._send = send
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._nbytes = 0  # of these
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def write(self, message: bytes | memoryview) -> None:
        """Send a message, after the waiting ones.

        Raises:
            OSError: sending failed; the connection has to end, because messages are missing.
        """
        if self._is_closed:
            return
        waiting, self._waiting, self._nbytes = self._waiting, [], 0
        if waiting and len(message) <= BATCH_BYTES:
            message = encode_batch([*waiting, message])
        elif waiting:
            self._send(encode_batch(waiting), True)
        self._send(message, True)

    def write_uncopied(self, data: memoryview) -> None:
        """Send bytes that must not change until ZeroMQ has sent them; errors are those of `write`."""
        self.flush()
        if not self._is_closed:
            self._send(data, False)

    def write_soon(self, message: bytes) -> None:
        """Send a message with the next one, unless it is large; errors are those of `write`."""
        if self._nbytes + len(message) > BATCH_BYTES or len(self._waiting) + 1 == MAX_BATCH:
            self.write(message)
        elif not self._is_closed:
            self._waiting.append(message)
            self._nbytes += len(message)
            if self._timer is None:
                self._timer = self._loop.call_later(_PATIENCE_S, self._patience_ended)

    def flush(self) -> None:
        """Send the waiting messages; errors are those of `write`."""
        if self._waiting:
            self.write(self._waiting.pop())

    def attempt(self, write: Callable[..., None], *message: bytes | memoryview) -> None:
        """Call one of these methods, and report an error to `failed`."""
        try:
            write(*message)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Discard the waiting messages and all later ones."""
        self._is_closed = True
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _patience_ended(self) -> None:
        self._timer = None
        self.attempt(self.flush)
