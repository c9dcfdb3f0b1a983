"""The way from threads to objects that live in an event loop."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from aiotensor.blocking.thread import Call, Loop, borrow, give_back
from aiotensor.errors import ClosedError, UsageError
from aiotensor.runtime.affinity import LoopAffinity, close_now, warn_unclosed

__all__ = ["AsyncObject", "BlockingObject"]

R = TypeVar("R")


class AsyncObject(Protocol):
    """What is opened, closed, and says what it has done."""

    affinity: LoopAffinity

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

    Attributes:
        inner: the object; use it only in the thread of the event loop.
        is_closed: whether `close` was called.
    """

    def __init__(self, inner: A) -> None:
        self._name = type(self).__name__
        self.inner = inner
        inner.affinity.has_guardian = True  # what is opened here is closed by `__del__` here
        self._pid = os.getpid()
        self._user = object()  # of the loop
        self._loop: Loop | None = None
        self._opening: Call[A] = Call(inner.__aenter__)
        self._lock = threading.RLock()  # the handler of a signal may close what this thread is about to use
        self._was_opened = False
        self.is_closed = False
        self._is_ending = self._has_let_go = False
        self._last: Any = None  # the statistics at its end

    def __repr__(self) -> str:
        inner = self.__dict__.get("inner")
        return f"<aiotensor.blocking.{type(self).__name__ + ' new>' if inner is None else repr(inner)[1:]}"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing() or (loop := self.__dict__.get("_loop")) is None or os.getpid() != self._pid:
            return
        loop.abandon(partial(close_now, self.inner), self._user)
        warn_unclosed(self)  # last, since it raises where warnings are errors

    def __enter__(self) -> Self:
        self._check_place()
        with self._lock:
            if self.is_closed or self._was_opened:
                error = ClosedError if self.is_closed else UsageError
                raise error(f"this {self._name} was opened before: make a new one")
            self._was_opened = True
        try:
            loop = borrow(self._user)
            with self._lock:
                if not self.is_closed:
                    self._loop = loop
            self._run(self._opening)
        except BaseException as error:
            self.close()  # a signal may come when it is open already
            if not self._is_ending:  # otherwise whoever closes it does so at the end
                self._let_go()
            if isinstance(error, asyncio.CancelledError):
                raise ClosedError(f"this {self._name} was closed while it was opened") from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.inner.affinity.is_left_in_child(error):  # else closing would replace the exception
            self.close()

    def close(self, *, timeout: float | None = None) -> None:
        """Close, as `aclose` does.

        Args:
            timeout: after how many seconds to wait no more, and close at once; None for never.

        Raises:
            TimeoutError: it did; it is closed all the same.
        """
        self._check_place()
        with self._lock:
            self.is_closed = True
        # Not if it is closed already: a signal may have come between the two.
        if self._is_ending or self._has_let_go or not self._was_opened:
            return
        try:
            if self._loop is None or not self._loop.is_out_of_reach:
                self._opening.give_up()  # by another thread, or by this one, beneath a handler
                self._end(timeout)
        finally:
            self._let_go()

    def _end(self, timeout: float | None) -> None:
        """Close the object in the loop, whatever happens here."""
        if self._loop is None:
            return  # it was never opened

        async def end() -> None:
            try:
                await self.inner.aclose()
            finally:
                self._last = self.inner.statistics()

        try:
            self._is_ending = True
            self.wait_for(end, timeout=timeout)
        except ClosedError:
            return  # another thread closed it in the meantime
        except BaseException:
            with suppress(TimeoutError):
                self.wait_for(end, timeout=0)  # after a signal, which may have come before it began
            raise

    def _let_go(self) -> None:
        """Need the loop no more."""
        with self._lock:
            self._loop = None
        give_back(self._user)
        self._has_let_go = True

    def _look(self, statistics: Callable[[], R]) -> R:
        """Return statistics: those of now, or those of its end."""
        if not self._was_opened:
            return statistics()
        try:
            return self.call(statistics)
        except ClosedError:
            if self._last is None:
                raise
            last: R = self._last
            return last

    # Calls

    def call(self, function: Callable[..., R], *args: Any) -> R:
        """Call a function in the loop's thread."""

        async def call() -> R:
            return function(*args)

        return self.wait_for(call)

    def wait_for(
        self, function: Callable[..., Awaitable[R]], *args: Any, timeout: float | None = None, **options: Any
    ) -> R:
        """Wait in this thread for a coroutine function that runs in the loop's.

        Raises:
            TimeoutError: it took longer than so many seconds, and was cancelled.
        """
        self._check_place()

        async def work() -> R:
            async with asyncio.timeout(timeout):
                return await function(*args, **options)

        return self._run(Call(work))

    def _run(self, call: Call[R]) -> R:
        try:
            with self._lock:  # nobody takes the loop away before it has this call
                self._begin(call)
            return call.result()
        except BaseException:
            call.give_up()  # perhaps it was a signal, and not the end of the call
            raise

    def _begin(self, call: Call[Any]) -> None:
        if self._loop is None and not self.is_closed:
            raise UsageError(f"this {self._name} is not open yet: enter it with `with` first")
        if self._loop is not None and not self._loop.is_out_of_reach:
            with suppress(RuntimeError):  # a signal's handler has closed it just now
                self._loop.begin(call)
                return
        raise ClosedError(f"this {self._name} was closed: make a new one")

    async def _next(self, items: AsyncIterator[R]) -> R:
        """Return the next of several things; in the loop.

        Raises:
            ClosedError: there are no more, since this was closed.
        """
        try:
            return await anext(items)
        except StopAsyncIteration:
            raise ClosedError(f"this {self._name} was closed: make a new one") from None

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
