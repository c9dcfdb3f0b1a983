"""The thread with the event loop: one for all objects of a process, while any of them is open.

Not anyio's portal. Its caller waits before there is a task that could be cancelled, and waits for ever if a
signal comes while the thread starts, or if the loop ends just then.

A signal may end a wait at any moment, and its handler may call what is here while this very thread is in the
middle of it. So whatever is taken is noted before, and locks are reentrant and never held while waiting.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio
import zmq.utils.garbage  # noqa: F401 - what it does at exit is to come after what is done here

from aiotensor.runtime.worker import no_thread, thread_limiter
from aiotensor.statistics import registry

__all__ = ["Call", "Loop", "borrow", "give_back"]

R = TypeVar("R")

_GLANCE_S = 0.25  # at signals
_PATIENCE_S = 1.0  # with the loop, when the interpreter ends


class Call(Generic[R]):
    """Something that the loop does for a thread that waits for it.

    Args:
        work: what to await in the loop.
    """

    def __init__(self, work: Callable[[], Awaitable[R]]) -> None:
        self._work = work
        self._is_wanted = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_running = False
        self._results: list[R] = []
        self._error: BaseException | None = None
        self._has_ended = False
        # One for each thread that waits, held until the end. Bare locks: an event has one inside, which a
        # handler could find taken by whom it interrupted.
        self._ends: list[threading.Lock] = []

    def begin(self, loop: asyncio.AbstractEventLoop, tasks: "set[asyncio.Task[None]]") -> None:
        """Hand it to a loop, which keeps its task in a set until it ends."""
        self._loop = loop
        loop.call_soon_threadsafe(self._begin, tasks)

    def result(self) -> R:
        """Wait for it, and return what it returns or raise what it raises."""
        self._wait()
        error, self._error = self._error, None
        if error is None:
            return self._results.pop()
        try:
            raise error
        finally:
            del error  # whose traceback has this frame: nothing would be freed without the garbage collector

    def give_up(self) -> None:
        """Cancel it, and wait until all that it had is given back; it will not begin if it has not."""
        self._is_wanted = False
        if self._loop is None or self._has_ended:
            return
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:
            return  # the loop is closed: it never began
        self._wait()

    def _wait(self) -> None:
        # A signal that comes just before, or to another thread, interrupts no wait: it has to be looked for.
        is_main = threading.current_thread() is threading.main_thread()
        end = threading.Lock()
        end.acquire()
        self._ends.append(end)
        while not self._has_ended:
            end.acquire(timeout=_GLANCE_S if is_main else -1)

    # In the loop

    def _begin(self, tasks: "set[asyncio.Task[None]]") -> None:
        if self._has_ended:
            return  # it was given up before
        self._task = asyncio.get_running_loop().create_task(self._run())
        tasks.add(self._task)
        self._task.add_done_callback(tasks.discard)

    async def _run(self) -> None:
        self._is_running = True
        try:
            if not self._is_wanted:
                raise asyncio.CancelledError
            self._results.append(await self._work())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._error = error
        self._ended()

    def _cancel(self) -> None:
        if self._task is None:  # a signal came before it was handed to the loop
            self._error = asyncio.CancelledError()
            self._ended()
        elif self._is_running:  # otherwise it would be cancelled before it can say that it has ended
            self._task.cancel()

    def _ended(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            for end in tuple(self._ends):  # who comes later does not wait
                end.release()


class Loop:
    """An event loop in a thread, from `start` to `stop`."""

    def __init__(self) -> None:
        self._is_halted = False
        self._is_wanted = True
        self._is_over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: OSError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._left_open: list[object] = []
        self._thread: threading.Thread | None = None
        self._is_starting = False
        self._starting = threading.Lock()
        self._starting.acquire()

    def start(self) -> None:
        """Start the thread, if it was not started before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="aiotensor-blocking", daemon=True)
        if not self._is_starting and self._failure is None:  # also if a signal came before it was started
            try:
                self._is_starting = True
                self._thread.start()
            except RuntimeError as error:
                self._failure = no_thread(error)
                self._starting.release()
            except BaseException:  # of a signal
                self._is_starting = self._thread.ident is not None
                raise

    def wait(self) -> None:
        """Wait until it is there.

        Raises:
            OSError: the machine has no threads or no descriptors left.
        """
        with self._starting:
            if self._failure is not None:
                raise self._failure

    def begin(self, call: Call[Any]) -> None:
        """Begin a call, without waiting for anything.

        Raises:
            RuntimeError: it was stopped.
        """
        if self._loop is None:
            raise AssertionError("whoever has a loop has waited for it")
        call.begin(self._loop, self._tasks)

    @property
    def is_out_of_reach(self) -> bool:
        """Say whether it was halted, and this thread must not wait for it: of all others none will go on."""
        return self._is_halted and threading.current_thread() is threading.main_thread()

    def stop(self) -> None:
        """End the thread, once all calls have ended."""
        self._is_wanted = False
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._is_over.set)
        if self._thread is not None:
            with suppress(RuntimeError):  # a signal came while it started: it ends by itself
                self._thread.join()

    def abandon(self, close: Callable[[], object], user: object) -> None:
        """Close an object that was garbage-collected, and need the loop no more; for finalizers.

        Args:
            close: closes the object; called in the loop.
            user: needs the loop until then.
        """
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._abandon, close, user)

    def _abandon(self, close: Callable[[], object], user: object) -> None:
        try:
            close()
        finally:
            self._leave(user)

    def _leave(self, user: object) -> None:
        """Do what `give_back` does, in the loop: this thread cannot wait for its own end."""
        with _shared.lock:
            _shared.users.discard(user)
            if _shared.users or _shared.loop is not self:
                return
            _shared.loop = None
        self._is_wanted = False
        self._is_over.set()

    def halt(self) -> None:
        """Make the thread stand still for good, and those that work for it; within about a second.

        While the interpreter is taken apart, threads go on until they ask for it, and are ended then. One
        that is in C++ code, such as that of torch, takes the process with it.
        """
        self._is_halted = True
        if self._loop is None:
            return
        # Kept for good, by the frame of the thread: parts that are freed while the interpreter is taken apart
        # would complain that they were not closed.
        self._left_open = list(registry.owners())
        stands, never = threading.Event(), threading.Lock()
        never.acquire()

        async def stand() -> None:
            # Holding all tokens means that no thread of the library runs.
            workers = thread_limiter()
            with anyio.move_on_after(_PATIENCE_S):
                for token in range(int(workers.total_tokens)):
                    await workers.acquire_on_behalf_of(token)
            stands.set()
            never.acquire()

        self.begin(Call(stand))
        stands.wait(2 * _PATIENCE_S)

    def _run(self) -> None:
        runner = asyncio.Runner()
        try:
            self._loop = runner.get_loop()
        except OSError as error:
            self._failure = error
            return
        finally:
            self._starting.release()
        with runner:
            runner.run(self._main())

    async def _main(self) -> None:
        if self._is_wanted:
            await self._is_over.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)


class _Shared:
    """The loop of this process, and those who need it."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.users: set[object] = set()
        self.lock = threading.RLock()


_shared = _Shared()


def borrow(user: object) -> Loop:
    """Return the loop of this process, which is there until its last user gives it back.

    Raises:
        OSError: the machine has no threads or no descriptors left.
    """
    with _shared.lock:
        _shared.users.add(user)
        if _shared.loop is None:
            _shared.loop = Loop()
        loop = _shared.loop
        loop.start()
    loop.wait()
    return loop


def give_back(user: object) -> None:
    """Need the loop no more, and wait for its end if nobody does. May be called again."""
    with _shared.lock:
        _shared.users.discard(user)
        if _shared.users:
            return
        loop, _shared.loop = _shared.loop, None
    if loop is not None:
        loop.stop()


def _renew() -> None:
    """Forget the thread of the parent, which a forked child does not have."""
    global _shared
    _shared = _Shared()


def _halt() -> None:
    """Do this before what was imported earlier ends."""
    if _shared.loop is not None:
        _shared.loop.halt()


os.register_at_fork(after_in_child=_renew)
atexit.register(_halt)
