"""How long the event loop is kept busy, in processor time: the machine may be as busy as it likes."""

import asyncio
import gc
import time
from types import TracebackType
from typing import Self

from tests.loops import let_threads_run

__all__ = ["Turns"]


class Turns:
    """Measure the longest turn of the running loop within a block.

    A callback that comes again in every turn looks at the processor time of the loop's thread. What the
    kernel does for that thread counts: giving it memory, and taking it away.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    def __enter__(self) -> Self:
        gc.disable()  # a collection is nobody's call
        self._loop = asyncio.get_running_loop()
        self._last = time.thread_time()
        self._next = self._loop.call_soon(self._turned)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._look()
        self._next.cancel()
        gc.enable()

    def _turned(self) -> None:
        self._look()
        let_threads_run()
        self._next = self._loop.call_soon(self._turned)

    def _look(self) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self._last)
        self._last = now
