"""The event loop behind blocking calls: one thread for all objects of a process, while there are any."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from aiotensor.errors import ClosedError, UsageError

__all__ = ["AsyncObject", "BlockingObject"]

R = TypeVar("R")

_portals = BlockingPortalProvider("asyncio")


def _renew() -> None:
    """Forget the thread of the parent, which a forked child does not have."""
    global _portals
    _portals = BlockingPortalProvider("asyncio")


os.register_at_fork(after_in_child=_renew)


class AsyncObject(Protocol):
    """What is opened, closed, and says what it has done."""

    async def __aenter__(self) -> Self: ...

    async def aclose(self) -> None:
        """Close."""

    def statistics(self) -> Any:
        """Return what is held and what was done; also after closing."""


A = TypeVar("A", bound=AsyncObject)


class BlockingObject(Generic[A]):
    """Use an asynchronous object from threads that have no event loop; any number of them at once.

    Args:
        inner: the object, not opened yet.
    """

    def __init__(self, inner: A) -> None:
        self._name = type(self).__name__
        self._inner = inner
        self._pid = os.getpid()
        self._portals: BlockingPortalProvider | None = None
        self._portal: BlockingPortal | None = None
        self._is_closed = False
        self._last: Any = None  # the statistics at its end

    def __enter__(self) -> Self:
        self._check_place()
        if self._is_closed or self._portals is not None:
            error = ClosedError if self._is_closed else UsageError
            raise error(f"this {self._name} was opened before: make a new one")
        portals = _portals
        self._portal = portals.__enter__()
        self._portals = portals
        try:
            self._wait(self._inner.__aenter__)
        except BaseException:
            self._leave(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, timeout: float | None = None) -> None:
        """Close, as `aclose` does.

        Args:
            timeout: after how many seconds to wait no more, and close at once; None for never.

        Raises:
            TimeoutError: it did; it is closed all the same.
        """
        self._check_place()
        if self._portal is None or self._is_closed:
            self._is_closed = True
            return
        self._is_closed = True
        try:
            self._wait(self._inner.aclose, timeout=timeout)
        finally:
            self._leave(None, None, None)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the thread, which ends with the last object."""
        portals, self._portals = self._portals, None
        if portals is None or self._portal is None:
            return
        self._is_closed = True
        self._last = self._portal.call(self._inner.statistics)
        self._portal = None
        portals.__exit__(kind, error, trace)

    def _look(self, statistics: Callable[[], R]) -> R:
        """Return statistics: those of now, or those of its end."""
        if self._is_closed and self._last is not None:
            last: R = self._last
            return last
        return statistics() if self._portal is None else self._now(statistics)

    # Calls

    def _now(self, function: Callable[..., R], *args: Any) -> R:
        """Call a function in the loop's thread."""

        async def call() -> R:
            return function(*args)

        return self._wait(call)

    def _wait(
        self, function: Callable[..., Awaitable[R]], *args: Any, timeout: float | None = None, **options: Any
    ) -> R:
        """Wait in this thread for a coroutine function that runs in the loop's.

        Raises:
            TimeoutError: it took longer than so many seconds, and was cancelled.
        """
        self._check_place()
        portal = self._portal
        if portal is None:
            if self._is_closed:
                raise ClosedError(f"this {self._name} was closed: make a new one")
            raise UsageError(f"this {self._name} is not open yet: enter it with `with` first")

        async def call() -> R:
            if timeout is None:
                return await function(*args, **options)
            async with asyncio.timeout(timeout):
                return await function(*args, **options)

        try:
            future = portal.start_task_soon(call)
        except RuntimeError as error:  # another thread has closed it since
            raise ClosedError(f"this {self._name} was closed: make a new one") from error
        try:
            return future.result()
        except BaseException:
            # Perhaps a signal, and not the end of the call: then nobody waits for that any more.
            future.cancel()
            raise
        finally:
            del future  # it has the error, whose traceback has this frame

    def _next(self, items: AsyncIterator[R], timeout: float | None) -> R:
        """Wait for the next of several things.

        Raises:
            TimeoutError: it took longer than so many seconds.
            ClosedError: there are no more, since this was closed.
        """

        async def one() -> R:
            try:
                return await anext(items)
            except StopAsyncIteration:
                raise ClosedError(f"this {self._name} was closed: make a new one") from None

        return self._wait(one, timeout=timeout)

    def _check_place(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this {self._name} came here by a fork, where its thread is not: start processes with "
                "multiprocessing.get_context('spawn') and open one in each"
            )
        if asyncio._get_running_loop() is not None:
            raise UsageError(
                f"this {self._name} would block the event loop of this thread: use the one of aiotensor "
                "itself here, with await"
            )
