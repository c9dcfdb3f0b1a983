"""Threads for work that would block the event loop: a pool for each loop, and single workers."""

import asyncio
import contextlib
import errno
import importlib
import os
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar, TypeVarTuple, Unpack

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from aiotensor.runtime.logs import logger_of

__all__ = ["Worker", "in_thread", "no_thread", "thread_limiter"]

logger = logger_of("worker")

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")

# anyio imports its backend when it is first asked for a thread: longer than an event loop can wait.
# Should it be called otherwise one day, the first call takes longer again, and that is all.
with contextlib.suppress(ImportError):
    importlib.import_module("anyio._backends._asyncio")


# Of each event loop. The work in them copies, encodes and decodes, so threads beyond the cores add little.
_MAX_THREADS = min(32, (os.cpu_count() or 1) + 4)

_limiter: RunVar[anyio.CapacityLimiter] = RunVar("aiotensor_thread_limiter")


def thread_limiter() -> anyio.CapacityLimiter:
    """Return the limiter of the library's own threads in the running event loop.

    anyio's default limiter belongs to the application: handlers that wait in a thread for this library may
    hold all of its tokens, and would never release them if the library needed one to go on.
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

    An error is raised here without the local variables of the frames below: anyio keeps it in a future that
    its traceback refers to, so the tensors in these frames would live until the garbage collector runs, and
    what the thread allocated would be freed on the event loop. For the same reason nothing here refers to
    the arguments once the call was made or abandoned.

    Waits for the call. Cancelling by a scope of anyio waits for the call, too; `asyncio.Task.cancel` leaves
    it running.

    Args:
        work: what to call. With the default limiter, it must not wait for other work of this library.
        arguments: passed to it.
        limiter: bounds the threads; `thread_limiter` by default.

    Raises:
        OSError: no thread can be started; nothing was called.
    """
    call = _ThreadCall(partial(work, *arguments))
    del work, arguments
    try:
        await anyio.to_thread.run_sync(call, limiter=limiter or thread_limiter())
    except RuntimeError as error:
        raise no_thread(error) from error
    finally:
        call.give_up()
    return call.outcome()


class _ThreadCall(Generic[R]):
    """A call, until it is made, and what came of it."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work: Callable[[], R] | None = work
        self._values: list[R] = []
        self._error: BaseException | None = None

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return  # given up before it began
        try:
            self._values.append(work())
        except BaseException as error:  # noqa: BLE001 - `outcome` raises it
            _clear_locals(error)
            self._error = error
        finally:
            del work  # the traceback has this frame

    def give_up(self) -> None:
        """Let it begin no more."""
        self._work = None

    def outcome(self) -> R:
        """Return what was returned, or raise what was raised; once."""
        error, self._error = self._error, None
        if error is None:
            return self._values.pop()
        try:
            raise error
        finally:
            del error  # it has this frame


def _clear_locals(error: BaseException) -> None:
    """Clear the local variables of all frames that an error, and the errors before it, went through."""
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            pending += one.__cause__, one.__context__


class _Piece(Generic[R]):
    """A piece of work, as long as somebody wants it."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work = work
        self.is_wanted = True

    def __call__(self) -> R:
        if not self.is_wanted:
            raise CancelledError
        return self._work()


class _Lane:
    """A thread that does one piece of work after the other, started with the first of them."""

    def __init__(self, name: str) -> None:
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.running = 0  # pieces that have not ended


class Worker:
    """Run work in threads of its own; belongs to the running loop.

    There are two lanes, each a thread that does its work in order: one for work that takes long, so that it
    delays nothing else, and one for the rest. So copies of a kind do not outnumber the cores. A piece of work
    may run a part of itself in one more thread, the `helper`, which both lanes share: it must be able to
    do without.

    Args:
        name: what the threads are called.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._short = _Lane(name)
        self._long = _Lane(f"{name}-long")
        self.helper = ThreadPoolExecutor(1, thread_name_prefix=f"{name}-helper")
        self._is_closed = False
        self._settling: list[asyncio.Future[None]] = []

    def submit(
        self,
        work: Callable[[], R],
        on_done: Callable[[], object] = lambda: None,
        *,
        takes_long: bool = False,
    ) -> "asyncio.Future[R]":
        """Begin a piece of work, and return the future of its result.

        Once the future is done, because it was cancelled or was given an error, work that has not begun does
        not begin any more. Work that has begun goes on.

        Args:
            work: what to do, in the thread.
            on_done: called in the loop when the work has returned or failed, before those who await it wake.
            takes_long: the work may take tens of milliseconds, and is to delay no other.

        Raises:
            OSError: there is no thread yet, and the machine has none to give.
        """
        return self._submit(self._long if takes_long else self._short, work, on_done)

    def begin(self, what: str, work: Callable[[], object]) -> None:
        """Begin work that is not awaited, after all work that was submitted before; if it fails, log that.

        Args:
            what: what it is called in the log.
            work: what to do, in a thread; here, if there is none and none can be started.
        """
        try:
            future = self._submit_last(work)
        except OSError as error:
            logger.warning(
                "%s on the event loop: %s",
                what,
                error,
                extra={"event": "work_on_loop", "work": what, "reason": str(error)},
            )
            work()
        else:
            future.add_done_callback(partial(_log_failure, what))

    async def settle(self) -> None:
        """Wait until no work runs; errors are raised where the work was submitted.

        Cancelling leaves the work running.
        """
        while self._running:
            future = self._loop.create_future()
            self._settling.append(future)
            await future

    def close(self) -> None:
        """End the threads; if work still runs, without waiting for it. May be called again."""
        executors = self._short.executor, self._long.executor, self.helper
        if not self._running:
            for executor in executors:
                executor.shutdown()
        elif not self._is_closed:
            # The last of all work, since what runs may yet use the helper.
            lane = self._long if self._long.running else self._short
            last = self.helper.shutdown
            lane.executor.submit(self._behind_short(last) if lane is self._long else last)
            for executor in executors[:2]:
                executor.shutdown(wait=False)
        self._is_closed = True

    @property
    def _running(self) -> int:
        return self._short.running + self._long.running

    def _submit(
        self, lane: _Lane, work: Callable[[], R], on_done: Callable[[], object]
    ) -> "asyncio.Future[R]":
        future: asyncio.Future[R] = self._loop.create_future()
        piece = _Piece(work)
        try:
            running = lane.executor.submit(piece)
        except RuntimeError as error:
            # It is in the executor's queue all the same, and would run before the next piece.
            piece.is_wanted = False
            raise no_thread(error) from error
        lane.running += 1
        running.add_done_callback(lambda done: self._in_loop(lane, done, future, on_done))
        future.add_done_callback(lambda _: running.cancel())
        return future

    def _submit_last(self, work: Callable[[], R]) -> "asyncio.Future[R]":
        try:
            return self._submit(self._long, self._behind_short(work), lambda: None)
        except OSError:
            # The long lane never had a thread, so whatever runs is in the short one, and has to end first.
            return self._submit(self._short, work, lambda: None)

    def _behind_short(self, work: Callable[[], R]) -> Callable[[], R]:
        """Return the work for the long lane, such that it begins after what the short one has to do now."""
        if not self._short.running or self._is_closed:
            return work
        before = self._short.executor.submit(lambda: None)

        def wait_and_work() -> R:
            before.result()
            return work()

        return wait_and_work

    def _in_loop(
        self, lane: _Lane, done: "Future[R]", future: "asyncio.Future[R]", on_done: Callable[[], object]
    ) -> None:
        # Once the loop is closed, so is everything that `_ended` would set right.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended, lane, done, future, on_done)

    def _ended(
        self, lane: _Lane, done: "Future[R]", future: "asyncio.Future[R]", on_done: Callable[[], object]
    ) -> None:
        lane.running -= 1
        try:
            on_done()
        finally:
            if not future.done():
                error = done.exception()
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(done.result())
            settling, self._settling = self._settling, []
            for one in settling:
                if not one.done():
                    one.set_result(None)


def no_thread(error: RuntimeError) -> OSError:
    """Return the error to raise when a thread could not be started."""
    # Not EAGAIN, as the kernel says: that is a BlockingIOError, and sounds as if one could wait.
    return OSError(errno.ENOMEM, f"no thread can be started: {error}")


def _log_failure(what: str, future: "asyncio.Future[object]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
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
