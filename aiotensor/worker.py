"""One thread for what may take longer than the event loop can wait."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

__all__ = ["Worker"]

P = ParamSpec("P")
R = TypeVar("R")


class Worker:
    """Run work in a thread of its own, one piece after the other; belongs to the running loop.

    One thread, so that copies neither outnumber the cores nor overtake each other; a piece of work may hand
    a part of itself to one more, the `helper`.

    Args:
        name: what the thread is called.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.helper = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-helper")
        self._running: set[Future[Any]] = set()
        self._settling: list[asyncio.Future[None]] = []

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Begin a piece of work."""
        running = self._executor.submit(work, *args, **kwargs)
        self._running.add(running)
        # Not through `when_done`: a callback that holds its future would keep the result alive.
        running.add_done_callback(lambda done: self._in_loop(lambda: self._ended(done)))
        return running

    def when_done(
        self, running: "Future[Any]", callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Call back in the loop when the work is done, has failed or was cancelled.

        Callbacks run in the order of these calls, before anybody who awaits the work afterwards wakes.
        """
        running.add_done_callback(lambda _: self._in_loop(lambda: callback(*args, **kwargs)))

    async def settle(self) -> None:
        """Wait until nothing runs; errors are for those who asked for the work.

        Cancelling leaves the work running.
        """
        while self._running:
            # Not by the futures of the work: cancelling this would cancel them for everybody.
            future = self._loop.create_future()
            self._settling.append(future)
            await future

    def close(self) -> None:
        """End the thread; if work still runs, without waiting for it."""
        for executor in (self._executor, self.helper):
            executor.shutdown(wait=not self._running)

    def _ended(self, running: "Future[Any]") -> None:
        self._running.discard(running)
        settling, self._settling = self._settling, []
        for future in settling:
            if not future.done():
                future.set_result(None)

    def _in_loop(self, callback: Callable[[], object]) -> None:
        # Once the loop is closed, so is everything that the callback would set right.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)
