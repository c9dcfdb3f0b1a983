"""Where an object lives: the process, thread and event loop that opened it, and whether it is open."""

import abc
import asyncio
import os
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from aiotensor.errors import ClosedError, UsageError
from aiotensor.statistics import registry

__all__ = ["FreedItems", "LoopAffinity", "LoopObject", "close_now", "warn_unclosed", "weakly"]

T = TypeVar("T")

_ITEMS_AN_ITERATION = 128


class LoopAffinity:
    """Know whether an object may be used from here; say so at once if not.

    Args:
        name: what the object is called in messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self.is_closed = False
        self.has_guardian = False  # another object closes this one when both are garbage-collected
        self._entry: registry.Entry | None = None

    @property
    def was_entered(self) -> bool:
        """Say whether the object was ever opened."""
        return self._loop is not None

    @property
    def is_open(self) -> bool:
        """Say whether the object was opened and not closed."""
        return self._loop is not None and not self.is_closed

    @property
    def state(self) -> str:
        """Describe whether the object is open; from any thread and process."""
        if os.getpid() != self._pid:
            return "unusable after a fork"
        if self.is_closed:
            return "closed"
        return "new" if self._loop is None else "open"

    def enter(self) -> asyncio.AbstractEventLoop:
        """Move into the running loop, once.

        Raises:
            UsageError: the object is open already, came here by a fork, or no asyncio loop is running.
            ClosedError: the object was closed.
        """
        self._check_process()
        if self.is_closed:
            raise ClosedError(f"this {self._name} was closed: make a new one")
        if self._loop is not None:
            raise UsageError(f"this {self._name} is open already: enter it once and share it between tasks")
        self._loop = self._running_loop()
        self._thread = threading.get_ident()
        return self._loop

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio._get_running_loop()
        if loop is None:  # a coroutine that runs all the same is driven by another library, such as trio
            raise UsageError(
                f"no asyncio event loop is running in this thread, so this {self._name} cannot be opened: "
                "aiotensor requires asyncio (or uvloop) and does not run under trio; with anyio choose the "
                "asyncio backend, or use aiotensor.blocking in worker threads"
            )
        return loop

    def settle(self, owner: registry.HasStatistics, endpoint: str) -> None:
        """Add the object, which is open now, to the registry of this process.

        Args:
            owner: the object.
            endpoint: the address or name of its endpoint.
        """
        if self._loop is not None and not self.is_closed:  # by another task, while it was opened
            self._entry = registry.add(owner, endpoint, self._loop)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Remove the object from the registry at the end of the block that closes it."""
        try:
            yield
        finally:
            if self._entry is not None:
                registry.remove(self._entry)

    def check(self) -> None:
        """Refuse use from elsewhere, or of an object that is not open.

        Raises:
            UsageError: the object came here by a fork, lives in another thread or loop, or was not opened.
            ClosedError: the object was closed.
        """
        # A running loop knows its thread and its process: one look answers all, nearly always.
        if self._loop is not None and not self.is_closed and asyncio._get_running_loop() is self._loop:
            return
        self.check_place()
        if self.is_closed:
            raise ClosedError(f"this {self._name} was closed: make a new one")
        if self._loop is None:
            raise UsageError(f"this {self._name} is not open yet: enter it with `async with` first")

    def check_place(self) -> None:
        """Refuse use from elsewhere, open or not.

        Raises:
            UsageError: the object came here by a fork, or lives in another thread or loop.
        """
        self._check_process()
        running = asyncio._get_running_loop()
        if self._loop is None or running is self._loop:  # which another thread may run by now
            return
        if threading.get_ident() != self._thread:
            raise UsageError(
                f"this {self._name} lives in another thread: hand the work over with "
                "asyncio.run_coroutine_threadsafe or loop.call_soon_threadsafe"
            )
        if running is not None:
            raise UsageError(f"this {self._name} lives in another event loop: open one in each loop")

    def is_left_in_child(self, error: BaseException | None) -> bool:
        """Return whether an exception ends a block in a forked child, where there is nothing to close.

        Args:
            error: the exception; None for a block that ends without one.
        """
        return error is not None and os.getpid() != self._pid

    def freed(self, owner: object, release: Callable[[], object]) -> None:
        """Report an object that is garbage-collected while it is open, and release it in its event loop.

        For finalizers, which run in any thread and in the middle of anything.

        Args:
            owner: the object.
            release: called in the event loop; a reference to the object in it keeps that until then. Not
                called if the loop is closed: then nothing but the object itself holds its resources.
        """
        loop = self._loop
        if loop is None or self.is_closed or self.has_guardian or os.getpid() != self._pid:
            return
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(release)
        warn_unclosed(owner)  # last, since it raises where warnings are errors

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this {self._name} came here by a fork, where its sockets and threads cannot work: "
                "start processes with multiprocessing.get_context('spawn') and open one in each"
            )


class _Closable(Protocol):
    def aclose(self) -> Coroutine[Any, Any, None]: ...


class LoopObject(abc.ABC):
    """A public object that belongs to an event loop and is closed when it is garbage-collected.

    Whatever the event loop refers to (sockets and what they notify) must not refer to the object, but for
    calls that wait: a task that awaits a method keeps the object alive.
    """

    affinity: LoopAffinity

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.affinity.is_left_in_child(error):  # else closing would replace the exception
            await self.aclose()

    def __repr__(self) -> str:
        name, home = type(self).__name__, self.__dict__.get("affinity")
        if home is None:  # its `__init__` is running, or has raised
            return f"<{name} new>"
        details = [home.state, *self._details()]
        return f"<{name} {', '.join(details)}>"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the interpreter the kernel releases everything, and modules are not usable any more.
        if not is_finalizing() and (home := self.__dict__.get("affinity")) is not None:
            home.freed(self, partial(close_now, self))

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close the object."""

    @abc.abstractmethod
    def _details(self) -> list[str]:
        """Describe it for `repr`; called in any thread and process, so this only reads what cannot fail."""


def close_now(abandoned: "_Closable") -> None:
    """Close an object that was garbage-collected, as `aclose` does that is cancelled where it would wait.

    Not in a task: the event loop may be about to end, and a task that is cancelled before it begins does
    nothing.
    """
    closing = abandoned.aclose()
    with suppress(StopIteration, asyncio.CancelledError):
        closing.send(None)
        while True:
            # No variable keeps the error: its traceback keeps this frame, and that the object.
            closing.throw(asyncio.CancelledError())


def warn_unclosed(owner: object) -> None:
    """Warn of an object that is garbage-collected while it is open."""
    warnings.warn(f"unclosed {owner!r}", ResourceWarning, stacklevel=3, source=owner)


def weakly(method: Callable[[], T]) -> Callable[[], T | None]:
    """Return a function that calls a method without keeping its object alive; None once that is gone.

    Args:
        method: a bound method.
    """
    reference = weakref.WeakMethod(method)

    def call() -> T | None:
        found = reference()
        return None if found is None else found()

    return call


class FreedItems(Generic[T]):
    """Carry word of freed memory from finalizers to the event loop.

    A finalizer runs in any thread, also in the middle of a garbage collection, so it may do no more than
    this: append, and wake the loop.

    Args:
        loop: the loop to wake, of this thread.
        handle: a bound method, called in the loop with what was freed meanwhile, in order. Of many items it
            gets some in each iteration of the loop: each takes a few microseconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, handle: Callable[[list[T]], None]) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        # Weak, so that a tensor that lives long does not keep its closed receiver alive.
        self._handle = weakref.WeakMethod(handle)
        self._items: deque[T] = deque()
        self._is_scheduled = False

    def __call__(self, item: T) -> None:
        """Note that something was freed; from any thread."""
        self._items.append(item)
        if self._is_scheduled:
            return
        self._is_scheduled = True
        try:
            # In a task the loop is awake, and need not be woken. Elsewhere in its thread it may be about to
            # sleep: the garbage collector runs also between its last look at what is ready and the kernel.
            if threading.get_ident() == self._thread and asyncio.current_task(self._loop) is not None:
                self._loop.call_soon(self._wake)
            else:
                self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            return  # the loop is closed: nobody is left to tell

    def collect(self) -> None:
        """Handle what was freed until now; of many items some, and the others soon. Called in the loop."""
        if not self._items:
            return
        items: list[T] = []
        while self._items and len(items) < _ITEMS_AN_ITERATION:
            items.append(self._items.popleft())
        handle = self._handle()
        if handle is not None:
            handle(items)

    def collect_all(self) -> None:
        """Handle all that was freed until now, in one iteration of the loop."""
        while self._items:
            self.collect()

    def _wake(self) -> None:
        self._is_scheduled = False  # before looking, so that a later item schedules again
        self.collect()
        if self._items and not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._wake)
