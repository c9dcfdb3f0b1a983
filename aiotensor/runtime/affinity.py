"""The process, thread and event loop of an object, its state, and its end by garbage collection."""

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
from types import MethodType, TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, SupportsIndex, TypeVar

from aiotensor.errors import ClosedError, UsageError
from aiotensor.statistics import registry

T = TypeVar("T")

# The freed items that are handled in one iteration of the event loop.
FEW_ITEMS = 128
_NO_LOOP = object()  # unlike None, it differs from the running loop of a thread without one


class LoopAffinity:
    """The state of an object, and the process, the thread and the event loop that it belongs to.

    Args:
        name: the name of the object in errors.

    Attributes:
        is_closed: whether the object was closed.
        open_in: the loop of the object while it is open, to compare it with the running loop; `check` is
            needed only if the two differ.
        has_guardian: whether another object closes this one when both are garbage-collected.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.open_in: object = _NO_LOOP
        self._thread = 0
        self.is_closed = False
        self.has_guardian = False
        self._entry: registry.Entry | None = None

    @property
    def is_open(self) -> bool:
        """Whether the object was opened and not closed."""
        return self._loop is not None and not self.is_closed

    @property
    def state(self) -> str:
        """The state of the object for `repr`; available in any thread and process."""
        if os.getpid() != self._pid:
            return "unusable after a fork"
        if self.is_closed:
            return "closed"
        return "new" if self._loop is None else "open"

    def enter(self) -> asyncio.AbstractEventLoop:
        """Open the object in the running loop, once.

        Raises:
            UsageError: the object is open already, was inherited by a fork, or no asyncio loop is running.
            ClosedError: the object was closed.
        """
        self._check_process()
        self.check_open()
        if self._loop is not None:
            raise UsageError(f"this {self._name} is already open: enter it once and share it between tasks")
        loop = asyncio._get_running_loop()
        if loop is None:  # a coroutine without one runs under another library, such as trio
            raise UsageError(
                f"no asyncio event loop is running in this thread, so this {self._name} cannot be opened: "
                "aiotensor requires asyncio (or uvloop) and does not run under trio; with anyio choose the "
                "asyncio backend, or use aiotensor.blocking in worker threads"
            )
        self._loop = self.open_in = loop
        self._thread = threading.get_ident()
        return loop

    def close(self) -> bool:
        """Record that the object is closed, and return whether it was open."""
        was_open = self.is_open
        self.is_closed, self.open_in = True, _NO_LOOP
        return was_open

    def closed_error(self) -> ClosedError:
        """Return the error of a call that ends because the object was closed."""
        return ClosedError(f"this {self._name} was closed: create a new one")

    def check_open(self) -> None:
        """Raise `ClosedError` if the object was closed, perhaps during a wait."""
        if self.is_closed:
            raise self.closed_error()

    def settle(self, owner: registry.HasStatistics, endpoint: str) -> None:
        """Add the object to the registry of this process, unless another task has closed it."""
        if self._loop is not None and not self.is_closed:
            self._entry = registry.add(owner, endpoint, self._loop)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Remove the object from the registry after the block, which closes the object."""
        try:
            yield
        finally:
            if self._entry is not None:
                registry.remove(self._entry)

    def check(self) -> None:
        """Check that the object is open, and can be used in this process, thread and loop.

        Raises:
            UsageError: the object was inherited by a fork, belongs to another thread or loop, or was not
                opened.
            ClosedError: the object was closed.
        """
        # The loop runs in its own thread and process only, so this comparison is nearly always sufficient.
        if asyncio._get_running_loop() is self.open_in:
            return
        self.check_place()
        self.check_open()
        if self._loop is None:
            raise UsageError(f"this {self._name} is not open yet: enter it with `async with` first")

    def check_place(self) -> None:
        """Check that the object can be used in this process, thread and loop; it need not be open.

        Raises:
            UsageError: the object was inherited by a fork, or belongs to another thread or loop.
        """
        self._check_process()
        running = asyncio._get_running_loop()
        if self._loop is None or running is self._loop:  # a loop may run in another thread later
            return
        if threading.get_ident() != self._thread:
            raise UsageError(
                f"this {self._name} belongs to another thread: schedule the call with "
                "asyncio.run_coroutine_threadsafe or loop.call_soon_threadsafe"
            )
        if running is not None:
            raise UsageError(f"this {self._name} belongs to another event loop: open one in each loop")

    def is_left_in_child(self, error: BaseException | None) -> bool:
        """Return whether an exception ends a block in a forked child, where nothing must be closed."""
        return error is not None and os.getpid() != self._pid

    def freed(self, owner: object, release: Callable[[], object]) -> None:
        """Warn about an object that was garbage-collected while open, and release it in its event loop.

        Finalizers call this method, in any thread and between any two steps of other code.

        Args:
            owner: the object.
            release: called in the event loop; if it refers to the object, it keeps the object alive until
                then. It is not called if the loop is closed, because then only the object itself refers to
                its resources.
        """
        loop = self._loop
        if loop is None or self.is_closed or self.has_guardian or os.getpid() != self._pid:
            return
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(release)
        warn_unclosed(owner)  # last, since it raises if warnings are errors

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"this {self._name} was inherited by a forked process, in which its sockets and threads "
                "cannot work: start processes with multiprocessing.get_context('spawn') and open one in each"
            )


class ProcessBound:
    """The base of objects that cannot be pickled or copied: a copy would close the original's resources."""

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> NoReturn:
        raise UsageError(
            f"a {type(self).__name__} cannot be pickled or copied, because its sockets and memory belong to "
            "this process: pass its address or its queue to the other process, and open another one there"
        )


class LoopObject(ProcessBound, abc.ABC):
    """The base of public objects, which belong to an event loop and are closed when garbage-collected.

    Objects to which the event loop refers (sockets and their handlers) must not refer to this object, so that
    only a task that awaits one of its methods keeps it alive.
    """

    affinity: LoopAffinity

    @abc.abstractmethod
    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.affinity.is_left_in_child(error):  # otherwise, closing would replace the exception
            await self.aclose()

    if not TYPE_CHECKING:  # type checkers report the wrong statement

        def __enter__(self) -> NoReturn:
            name = type(self).__name__
            raise TypeError(f"use `async with` for this {name}, or `with` for an aiotensor.blocking.{name}")

        def __exit__(self, *error: object) -> None:
            """Exist, because `with` looks for it before it calls `__enter__`."""

    def __repr__(self) -> str:
        name, affinity = type(self).__name__, self.__dict__.get("affinity")
        if affinity is None:  # its `__init__` is running, or has raised
            return f"<{name} new>"
        details = [affinity.state, *self._details()]
        return f"<{name} {', '.join(details)}>"

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # When the interpreter ends, the kernel releases all resources, and modules cannot be used any more.
        if not is_finalizing() and (affinity := self.__dict__.get("affinity")) is not None:
            affinity.freed(self, partial(close_now, self.aclose))

    @abc.abstractmethod
    async def aclose(self) -> None:
        """Close the object."""

    @abc.abstractmethod
    def statistics(self) -> Any:
        """Return the current usage and the totals; also available after closing."""

    @abc.abstractmethod
    def _details(self) -> list[str]:
        """Return details for `repr`; called in any thread and process, so it must not raise."""


def close_now(aclose: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Close a garbage-collected object: run its `aclose`, and cancel each wait in it.

    This uses no task, because the event loop may be about to end, and a task that is cancelled before it
    begins does not run at all.
    """
    closing = aclose()
    with suppress(StopIteration, asyncio.CancelledError):
        closing.send(None)
        while True:
            # No variable refers to the error: its traceback refers to this frame, which refers to the object.
            closing.throw(asyncio.CancelledError())


def warn_unclosed(owner: object) -> None:
    """Warn that an object was garbage-collected while it was open."""
    warnings.warn(f"unclosed {owner!r}", ResourceWarning, stacklevel=3, source=owner)


class FreedItems(Generic[T]):
    """Pass freed items from finalizers to the event loop.

    A finalizer may run in any thread, and during a garbage collection, so it only appends to a queue and
    wakes the loop, unless the loop will collect the items anyway.

    Args:
        handle: a bound method, called in the loop with the freed items in order. It gets a limited number of
            them in each iteration of the loop, since each takes a few microseconds.

    Attributes:
        items: the freed items that have not been passed to `handle` yet.
        is_scheduled: whether the items will be collected in the next iteration of the loop.
        rest: set while the next iteration collects items that were too many for one.
    """

    def __init__(self, handle: Callable[[list[T]], None]) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        if not isinstance(handle, MethodType):
            raise TypeError(f"handle must be a bound method, got {handle!r}")
        # Weak, so that a living tensor does not keep its closed receiver alive.
        self._owner = weakref.ref(handle.__self__)
        self._handle = handle.__func__
        self.items: deque[T] = deque()
        self.is_scheduled = False
        self.rest: asyncio.Handle | None = None

    def bind(self) -> None:
        """Pass the items to the running loop; called once, before the first item is created."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def __call__(self, item: T) -> None:
        """Queue an item; may be called in any thread."""
        self.items.append(item)
        if self.is_scheduled or self._loop is None:
            return
        self.is_scheduled = True
        try:
            # While a task runs, the loop does not sleep. Otherwise its thread may be about to sleep: the
            # garbage collector can run after the loop has computed its timeout.
            if threading.get_ident() == self._thread and asyncio.current_task(self._loop) is not None:
                self._loop.call_soon(self.collect)
            else:
                self._loop.call_soon_threadsafe(self.collect)
        except RuntimeError:
            return  # the loop is closed, and nothing handles the item

    def collect(self) -> None:
        """Pass at most `FEW_ITEMS` queued items to `handle`, and the rest in the next iterations."""
        self.is_scheduled = False  # first, so that a later item schedules another call
        if self.rest is not None:
            self.rest.cancel()
            self.rest = None
        items: list[T] = []
        while self.items and len(items) < FEW_ITEMS:
            items.append(self.items.popleft())
        owner = self._owner()
        try:
            if items and owner is not None:
                self._handle(owner, items)
        finally:
            if self.items and self._loop is not None:
                self.is_scheduled = True
                self.rest = self._loop.call_soon(self.collect)

    def collect_all(self) -> None:
        """Pass all queued items to `handle` during this call."""
        while self.items:
            self.collect()
