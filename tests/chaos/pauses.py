"""How long a process stood still: on a busy machine it may get no processor for seconds."""

import threading
import time

__all__ = ["Pauses"]

_EVERY_S = 0.02


class Pauses:
    """Measure the longest pause of this process, in a thread of its own."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        threading.Thread(target=self._measure, name="pauses", daemon=True).start()

    def longest_s(self) -> float:
        """Return the longest pause since the last call, in seconds."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _measure(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(_EVERY_S)
            self._longest_s = max(self._longest_s, time.monotonic() - began)
