"""The answers of a receiver to its senders: collected in one iteration of the event loop, sent at its end."""

import asyncio
from collections.abc import Callable
from typing import Protocol

__all__ = ["Answers", "Flushable"]


class Flushable(Protocol):
    """A connection with frames to send."""

    def flush(self) -> None:
        """Write the frames now."""


class Answers:
    """Write the frames of all connections at the end of an iteration; belongs to the running loop.

    Args:
        complete: called before the frames are written, to add the answers that are known only then.
    """

    def __init__(self, complete: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._complete = complete
        self._pending: dict[Flushable, None] = {}

    def schedule(self, connection: Flushable) -> None:
        """Write the frames of a connection at the end of this iteration."""
        if not self._pending:
            self._loop.call_soon(self.flush)
        self._pending[connection] = None

    def flush(self) -> None:
        """Write all frames now."""
        self._complete()
        pending, self._pending = self._pending, {}
        for connection in pending:
            connection.flush()
