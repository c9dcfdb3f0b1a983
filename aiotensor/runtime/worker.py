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
from typing import TypeVar, TypeVarTuple, Unpack

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
    calls: list[Callable[[], R]] = [partial(work, *arguments)]
    results: list[R] = []
    errors: list[BaseException] = []
    del work, arguments
    try:
        await anyio.to_thread.run_sync(_call, calls, results, errors, limiter=limiter or thread_limiter())
    except RuntimeError as error:
        raise no_thread(error) from error
    finally:
        calls.clear()  # if the call was abandoned before it began
    if errors:
        raise errors.pop()  # no variable refers to it: its traceback refers to this frame
    return results.pop()


def _call(calls: list[Callable[[], R]], results: list[R], errors: list[BaseException]) -> None:
    """Call the function in a list unless it was removed, and add its result or its error to a list."""
    with contextlib.suppress(IndexError):
        work = calls.pop()
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - `in_thread` raises it
            _clear_locals(error)
            errors.append(error)
        finally:
            del work  # the traceback refers to this frame


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

        def ended(done: "Future[R]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its lane has no state to update
                loop.call_soon_threadsafe(self._ended, future, on_done, done)

        running.add_done_callback(ended)
        future.add_done_callback(lambda _: running.cancel())
        return future

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
        successes: list[bool] = []

        def attempt() -> None:
            try:
                work()
            except Exception as error:
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
            else:
                successes.append(True)

        def ended() -> None:
            if successes:
                on_success()

        try:
            self._submit_last(attempt, ended)
        except OSError as error:
            logger.warning(
                "%s runs on the event loop: %s",
                what,
                error,
                extra={"event": "work_on_loop", "work": what, "reason": str(error)},
            )
            attempt()
            ended()

    def _submit_last(self, work: Callable[[], object], on_done: Callable[[], object]) -> None:
        """Submit work to the long lane that begins after all current work of both lanes."""
        is_next = threading.Event()

        def wait_and_work() -> None:
            is_next.wait()
            work()

        try:
            if self._short.running:
                self._short.submit(is_next.set)
            else:
                is_next.set()
            self._long.submit(wait_and_work, on_done)
        except OSError:
            # The long lane never had a thread, so all other work is in the short one.
            self._short.submit(work, on_done)

    async def settle(self) -> None:
        """Wait until all work has ended; errors are raised where the work was submitted.

        Cancellation leaves the work running.
        """
        while self._running:
            await self._changes.wait()

    def close(self) -> None:
        """End the threads without waiting for running work, which may not get the helper any more.

        May be called again.
        """
        for executor in (self._short.executor, self._long.executor, self.helper):
            executor.shutdown(wait=not self._running)

    @property
    def _running(self) -> int:
        return self._short.running + self._long.running


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
    result: Future[R] = Future()
    result.set_running_or_notify_cancel()  # it cannot be cancelled any more

    def run() -> None:
        try:
            result.set_result(function())
        except Exception as error:  # noqa: BLE001 - the task that awaits the future handles it
            result.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise no_thread(error) from error
    return asyncio.wrap_future(result)


def no_thread(error: RuntimeError) -> OSError:
    """Return the error to raise when a thread could not be started."""
    # Not EAGAIN, the error number of the kernel: it would make a BlockingIOError, which suggests a retry.
    return OSError(errno.ENOMEM, f"no thread can be started: {error}")
