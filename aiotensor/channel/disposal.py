"""Free large messages in a thread."""

from typing import Any

from aiotensor.runtime.worker import Worker

__all__ = ["Disposal"]

_QUICK_FREED_BYTES = 8 << 20


class Disposal:
    """Free messages, large ones in a thread; belongs to the running loop.

    The kernel needs a millisecond to reclaim 20 MB, and Python as long for the objects of a large decoded
    message. The thread starts with the first large message.
    """

    def __init__(self) -> None:
        self._worker = Worker("aiotensor-channel")
        self._is_closed = False

    def free_parts(self, parts: "list[memoryview] | list[bytes | memoryview]") -> None:
        """Release the parts of a message, by emptying the list now or in the thread."""
        if sum(map(len, parts)) > _QUICK_FREED_BYTES:
            self.free(parts)
        else:
            parts.clear()

    def free(self, box: list[Any]) -> None:
        """Empty a list in the thread."""
        if self._is_closed:
            box.clear()
        else:
            self._worker.begin("freeing a message", box.clear)

    def close(self) -> None:
        """Stop the thread after the pending work."""
        self._is_closed = True
        self._worker.close()
