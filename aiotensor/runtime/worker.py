"""Threads for work that would block the event loop: a pool for each loop, `Worker` objects, and daemons."""

import asyncio
import contextlib
import errno
import importlib
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters

logger = logger_of("worker")

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")

# anyio imports its backend when it starts the first thread, which would block the event loop. If the module
# has another name in another version of anyio, only that first call is slower.
with contextlib.suppress(ImportError):
    importlib.import_module("anyio._backends._asyncio")


# The limit for each event loop. The threads copy, encode and decode, so more threads than cores add little.
_MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)

_limiter: RunVar[anyio.CapacityLimiter] = RunVar("aiotensor_thread_limiter")


def thread_limiter() -> anyio.CapacityLimiter:
    """Return the limiter of this library's threads in the running event loop.

    anyio's default limiter belongs to the application: handlers that wait in a thread for this library may
    hold all of its tokens, and would never release them if the library needed one to continue.
    """
    try:
        return _limiter.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(_MAX_THREADS)
        _limiter.set(limiter)
        return limiter


async def in_thread(
    work: Callable[[Unpack[Arguments]], R],
    *arguments: *Arguments,
    limiter: anyio.CapacityLimiter | None = None,
) -> R:
    """Call a function in a worker thread of anyio, and return its result.

    If the function raises an error, the local variables of its frames are cleared: anyio keeps the error in a
    future to which its traceback refers, so tensors in these frames would live until the garbage collector
    runs, which would free them on the event loop. For the same reason, nothing refers to the arguments after
    the call has ended or was abandoned.

    Waits for the call. Cancellation by a cancel scope of anyio also waits for it; cancellation by
    `asyncio.Task.cancel` leaves it running.

    Args:
        work: the function. With the default limiter, it must not wait for other work of this library.
        arguments: its arguments.
        limiter: limits the number of threads; `thread_limiter` by default.

    Raises:
        OSError: no thread can be started; the function was not called.
    """
    call = _ThreadCall(partial(work, *arguments))
    del work, arguments
    try:
        await anyio.to_thread.run_sync(call, limiter=limiter or thread_limiter())
    except RuntimeError as error:
        raise no_thread(error) from error
    finally:
        call.abandon()
    return call.outcome()


class _ThreadCall(Generic[R]):
    """A call in a thread, and its result."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work: Callable[[], R] | None = work
        self._values: list[R] = []
        self._error: BaseException | None = None

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return  # abandoned before it began
        try:
            self._values.append(work())
        except BaseException as error:  # noqa: BLE001 - `outcome` raises it
            _clear_locals(error)
            self._error = error
        finally:
            del work  # the traceback refers to this frame

    def abandon(self) -> None:
        """Drop the call if it has not begun."""
        self._work = None

    def outcome(self) -> R:
        """Return the result of the call, or raise its error; may be called only once."""
        error, self._error = self._error, None
        if error is None:
            return self._values.pop()
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


def _clear_locals(error: BaseException) -> None:
    """Clear the local variables of all frames in the tracebacks of an error, its causes and its contexts."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += one.__cause__, one.__context__


class _Lane:
    """A thread that runs work in order; it is started with the first work."""

    def __init__(self, name: str, changes: Waiters) -> None:
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.running = 0  # calls of `submit` whose work has not ended
        self._changes = changes  # woken when work has ended

    def submit(
        self, work: Callable[[], R], on_done: Callable[[], object] = lambda: None
    ) -> "asyncio.Future[R]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        is_wanted = True

        def run() -> R:
            if not is_wanted:
                raise CancelledError
            return work()

        try:
            running = self.executor.submit(run)
        except RuntimeError as error:
            # The executor has queued the call nevertheless, and would run it before the next one.
            is_wanted = False
            raise no_thread(error) from error
        self.running += 1
        running.add_done_callback(partial(self._in_loop, loop, future, on_done))
        future.add_done_callback(lambda _: running.cancel())
        return future

    def _in_loop(
        self,
        loop: asyncio.AbstractEventLoop,
        future: "asyncio.Future[R]",
        on_done: Callable[[], object],
        done: "Future[R]",
    ) -> None:
        # If the loop is closed, `_ended` has no state left to update.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._ended, future, on_done, done)

    def _ended(self, future: "asyncio.Future[R]", on_done: Callable[[], object], done: "Future[R]") -> None:
        self.running -= 1
        try:
            on_done()
        finally:
            if not future.done():
                error = done.exception()
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(done.result())
            if self._changes:
                self._changes.wake()


class Worker:
    """Run work in separate threads; belongs to the running loop.

    A worker has two lanes, each of which is a thread that runs its work in order: one for long work, and one
    for other work, which long work does not delay. With one thread for each kind, the copies do not outnumber
    the cores. Both lanes share a third thread, the `helper`. Work may run a part of itself there, but must
    not depend on it.

    Args:
        name: the prefix of the names of the threads.
    """

    def __init__(self, name: str) -> None:
        self._changes = Waiters()
        self._short = _Lane(name, self._changes)
        self._long = _Lane(f"{name}-long", self._changes)
        self.helper = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-helper")
        self._begun = 0  # calls of `begin` whose work has not ended in the loop
        self._is_closed = False

    def submit(
        self,
        work: Callable[[], R],
        on_done: Callable[[], object] = lambda: None,
        *,
        takes_long: bool = False,
    ) -> "asyncio.Future[R]":
        """Submit work, and return the future of its result.

        If the future is cancelled or receives an error, work that has not begun is dropped. Work that has
        begun is not interrupted.

        Args:
            work: called in a thread.
            on_done: called in the loop after the work has returned or raised, before awaiting tasks resume.
            takes_long: whether the work may take tens of milliseconds, and must not delay other work.

        Raises:
            OSError: the thread is not running yet, and cannot be started.
        """
        return (self._long if takes_long else self._short).submit(work, on_done)

    def begin(
        self, what: str, work: Callable[[], object], on_success: Callable[[], object] = lambda: None
    ) -> None:
        """Run work in the background, after all work that was submitted before; log an error in it.

        Args:
            what: the name of the work in the log.
            work: called in a thread, or during this call if there is no thread and none can be started.
            on_success: called in the loop after the work, unless the work raised an error.
        """
        try:
            future = self._submit_last(work)
        except OSError as error:
            logger.warning(
                "%s runs on the event loop: %s",
                what,
                error,
                extra={"event": "work_on_loop", "work": what, "reason": str(error)},
            )
            work()
            on_success()
        else:
            self._begun += 1
            future.add_done_callback(partial(self._begun_ended, what, on_success))

    def _begun_ended(
        self, what: str, on_success: Callable[[], object], future: "asyncio.Future[object]"
    ) -> None:
        self._begun -= 1
        self._changes.wake()
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            on_success()
            return
        logger.error(
            "%s failed",
            what,
            exc_info=error,
            extra={
                "event": "work_failed",
                "work": what,
                "error": type(error).__name__,
                "reason": str(error),
            },
        )

    async def settle(self) -> None:
        """Wait until all work has ended; errors are raised where the work was submitted.

        Cancellation leaves the work running.
        """
        while self._running or self._begun:
            await self._changes.wait()

    def close(self) -> None:
        """End the threads without waiting for running work; may be called again."""
        executors = self._short.executor, self._long.executor, self.helper
        if not self._running:
            for executor in executors:
                executor.shutdown()
        elif not self._is_closed:
            # The helper ends after all other work, which may still use it.
            lane = self._long if self._long.running else self._short
            last = self.helper.shutdown
            # When the interpreter shuts down, executors reject further work.
            with contextlib.suppress(RuntimeError):
                lane.executor.submit(self._behind_short(last) if lane is self._long else last)
            for executor in executors[:2]:
                executor.shutdown(wait=False)
        self._is_closed = True

    @property
    def _running(self) -> int:
        return self._short.running + self._long.running

    def _submit_last(self, work: Callable[[], R]) -> "asyncio.Future[R]":
        try:
            return self._long.submit(self._behind_short(work))
        except OSError:
            # The long lane never had a thread, so all other work is in the short one.
            return self._short.submit(work)

    def _behind_short(self, work: Callable[[], R]) -> Callable[[], R]:
        """Return work for the long lane that begins after the current work of the short lane."""
        if not self._short.running or self._is_closed:
            return work
        before = self._short.executor.submit(lambda: None)

        def wait_and_work() -> R:
            before.result()
            return work()

        return wait_and_work


def run_detached(name: str, function: Callable[[], R]) -> "asyncio.Future[R]":
    """Call a function in a new daemon thread, and return the future of its result at once.

    Neither the event loop nor the end of the process waits for the thread, and a call that takes long delays
    no other call. If the future is cancelled, the result is ignored.

    Args:
        name: the name of the thread.
        function: the function, which may only raise subclasses of `Exception` and must not refer to tensors.

    Raises:
        OSError: no thread can be started.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[R] = loop.create_future()

    def succeed(result: R) -> None:
        if not future.done():
            future.set_result(result)

    def fail(error: Exception) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - the task that awaits the future handles it
            report: Callable[[], object] = partial(fail, error)
        else:
            report = partial(succeed, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(report)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise no_thread(error) from error
    return future


def no_thread(error: RuntimeError) -> OSError:
    """Return the error to raise when a thread could not be started."""
    # Not EAGAIN, the error number of the kernel: it would make a BlockingIOError, which suggests a retry.
    return OSError(errno.ENOMEM, f"no thread can be started: {error}")
