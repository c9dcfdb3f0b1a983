"""The thread with the event loop, which all blocking objects of a process share while any of them is open.

The blocking portal of anyio is unsuitable: its caller waits before there is a task that could be cancelled,
and waits forever if a signal arrives while the thread starts, or if the loop ends at that moment.

A signal may interrupt a wait at any point, and its handler may call the same functions in the same thread. So
a resource is recorded before it is acquired, and locks are reentrant and never held during a wait.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio
import zmq.utils.garbage  # noqa: F401 - imported first, so that its exit handler runs after the one here

from aiotensor.runtime.worker import no_thread, thread_limiter
from aiotensor.statistics import registry

R = TypeVar("R")

_SIGNAL_CHECK_S = 0.25  # the longest delay of a signal handler
_PATIENCE_S = 1.0  # the longest wait for the loop when the interpreter exits


class Call(Generic[R]):
    """A call that runs in the loop, while a thread waits for its result.

    Args:
        work: the coroutine function, called once in the loop.
        timeout: the time in seconds after which it is cancelled; None for no limit.
        not_received: called in the loop with a result that the thread has not received, because a signal
            handler has raised an error in it; None to drop the result.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[R]],
        timeout: float | None = None,
        not_received: Callable[[R], object] | None = None,
    ) -> None:
        self._work = work
        self._timeout = timeout
        self._not_received = not_received
        self._is_wanted = True
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_running = False
        self._results: list[R] = []
        self._errors: list[BaseException] = []
        self._has_ended = False
        # One lock for each waiting thread, held until the end of the call. A `threading.Event` is unsuitable:
        # code that a signal handler has interrupted may hold its internal lock.
        self._ends: list[threading.Lock] = []

    def begin(self, loop: asyncio.AbstractEventLoop, tasks: "set[asyncio.Task[None]]") -> None:
        """Start the call in a loop, and keep its task in a set until the task ends."""
        self._loop = loop
        loop.call_soon_threadsafe(self._begin, tasks)

    def result(self) -> R:
        """Wait for the end of the call, and return its result or raise its error."""
        self._wait()
        if self._errors:
            raise self._errors.pop()  # no variable refers to it: its traceback refers to this frame
        # A signal handler may run after each call of a C function. From here to the user's code there is
        # none, so that the result is either still in this object or in the user's hands.
        [result] = self._results
        self._results = []
        return result

    def give_up(self) -> None:
        """Cancel the call, or prevent its start, and wait until it has released its resources."""
        self._is_wanted = False
        if self._loop is None or (self._has_ended and not self._results):
            return
        try:
            self._loop.call_soon_threadsafe(self._cancel)
        except RuntimeError:
            return  # the loop is closed, so the call never began
        self._wait()

    def _wait(self) -> None:
        # A signal that arrives just before the wait, or at another thread, does not interrupt the wait, so
        # the main thread wakes regularly to run signal handlers.
        is_main = threading.current_thread() is threading.main_thread()
        end = threading.Lock()
        end.acquire()
        self._ends.append(end)
        while not self._has_ended:
            end.acquire(timeout=_SIGNAL_CHECK_S if is_main else -1)

    # In the loop

    def _begin(self, tasks: "set[asyncio.Task[None]]") -> None:
        if self._has_ended:
            return  # `give_up` has prevented the start
        self._task = asyncio.get_running_loop().create_task(self._run())
        tasks.add(self._task)
        self._task.add_done_callback(tasks.discard)

    async def _run(self) -> None:
        self._is_running = True
        try:
            if not self._is_wanted:
                raise asyncio.CancelledError
            async with asyncio.timeout(self._timeout):
                self._results.append(await self._work())
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            self._errors.append(error)
        self._ended()
        if not self._is_wanted:
            self._cancel()  # the work has ended with a result nevertheless

    def _cancel(self) -> None:
        if self._has_ended:
            if self._results and self._not_received is not None:
                self._not_received(self._results.pop())
        elif self._task is None:  # a signal has interrupted the thread before the call was started
            self._errors.append(asyncio.CancelledError())
            self._ended()
        elif self._is_running:  # otherwise, the task would be cancelled before it could report its end
            self._task.cancel()

    def _ended(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            for end in tuple(self._ends):  # threads that are added later do not wait
                end.release()


class Loop:
    """An event loop in a thread, which runs from `start` to `stop`."""

    def __init__(self) -> None:
        self._is_halted = False
        self._is_over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._left_open: list[object] = []
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run, name="aiotensor-blocking", daemon=True)

    def start(self) -> None:
        """Start the thread, if it was not started yet."""
        if self._thread.ident is None:  # a signal may have interrupted an earlier call
            try:
                self._thread.start()
            except RuntimeError as error:
                raise no_thread(error) from error

    def begin(self, call: Call[Any]) -> None:
        """Begin a call without waiting, or raise `RuntimeError` if the loop was stopped."""
        call.begin(self._loop, self._tasks)

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the loop was halted, and the caller is the main thread, which must not wait for it."""
        return self._is_halted and threading.current_thread() is threading.main_thread()

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is that of the loop."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the thread after all calls have ended, and wait for its end unless the loop was halted."""
        if self.is_out_of_reach:
            return
        if self._thread.ident is None:
            self._loop.close()  # the thread could not be started
            return
        self._loop.call_soon_threadsafe(self._is_over.set)
        if not self.is_here:
            with suppress(RuntimeError):  # a signal has interrupted the start: the thread ends without a join
                self._thread.join()

    def abandon(self, close: Callable[[], object], user: object) -> None:
        """Close an object that was garbage-collected, and release the loop; for finalizers.

        Args:
            close: called in the loop; closes the object.
            user: the user that releases the loop afterwards.
        """

        def close_and_release() -> None:
            try:
                close()
            finally:
                release(user)

        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(close_and_release)

    def halt(self) -> None:
        """Stop the thread and its worker threads forever, within about a second.

        While the interpreter is finalized, other threads continue until they need the GIL, and are then
        terminated. If such a thread runs C++ code, for example of torch, this aborts the process.
        """
        self._is_halted = True
        # The frame of the thread keeps these objects alive. Otherwise, finalization would free them, with
        # warnings that they were not closed.
        self._left_open = list(registry.owners())
        stands, never = threading.Event(), threading.Lock()
        never.acquire()

        async def stand_still() -> None:
            # While this holds all tokens, no worker thread of the library runs.
            workers = thread_limiter()
            with anyio.move_on_after(_PATIENCE_S):
                for token in range(int(workers.total_tokens)):
                    await workers.acquire_on_behalf_of(token)
            stands.set()
            never.acquire()

        self.begin(Call(stand_still))
        stands.wait(2 * _PATIENCE_S)

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        await self._is_over.wait()
        while self._tasks:
            await asyncio.wait(self._tasks)


class _Shared:
    """The loop of this process, and its users."""

    def __init__(self) -> None:
        self.loop: Loop | None = None
        self.users: set[object] = set()
        self.lock = threading.RLock()


_shared = _Shared()


def borrow(user: object) -> Loop:
    """Return the loop of this process, which ends after the release of its last user.

    Raises:
        OSError: the machine has no threads or no descriptors left.
    """
    with _shared.lock:
        _shared.users.add(user)
        if _shared.loop is None:
            _shared.loop = Loop()
        _shared.loop.start()
        return _shared.loop


def release(user: object) -> None:
    """Release the loop, and wait for its end if this was its last user; releasing again has no effect."""
    with _shared.lock:
        _shared.users.discard(user)
        if _shared.users:
            return
        loop, _shared.loop = _shared.loop, None
    if loop is not None:
        loop.stop()


def _renew() -> None:
    """Forget the loop in a forked child, in which its thread does not exist."""
    global _shared
    _shared = _Shared()


def _halt() -> None:
    """Halt the loop at exit, before the exit handlers of modules that were imported earlier."""
    if _shared.loop is not None:
        _shared.loop.halt()


os.register_at_fork(after_in_child=_renew)
atexit.register(_halt)
