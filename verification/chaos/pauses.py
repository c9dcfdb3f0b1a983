"""Measure how long a process was suspended: a busy machine may not run it for seconds."""

import threading
import time

__all__ = ["Pauses"]

_EVERY_S = 0.02


class Pauses:
    """Measure the pauses of this process in a thread, until it is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._longest_s = 0.0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="pauses", daemon=True)
        self._thread.start()

    def longest_s(self) -> float:
        """Return the longest pause since the last call, in seconds."""
        with self._lock:
            longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._thread.join()

    def _measure(self) -> None:
        began = time.monotonic()
        while not self._is_closed.wait(_EVERY_S):
            ended = time.monotonic()
            with self._lock:
                self._longest_s = max(self._longest_s, ended - began)
            began = ended
