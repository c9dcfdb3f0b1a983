"""Threads for what may take longer than the event loop can wait: those of anyio, and one of one's own."""

import asyncio
import contextlib
import errno
import importlib
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar, TypeVarTuple, Unpack

import anyio.to_thread

from aiotensor.logs import logger_of

__all__ = ["Worker", "in_thread", "no_thread"]

logger = logger_of("worker")

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")

# anyio imports its backend when it is first asked for a thread: longer than an event loop can wait.
# Should it be called otherwise one day, the first call takes longer again, and that is all.
with contextlib.suppress(ImportError):
    importlib.import_module("anyio._backends._asyncio")


async def in_thread(work: Callable[[Unpack[Arguments]], R], *arguments: *Arguments) -> R:
    """Call a function in a thread of anyio, and return what it returns, or raise what it raises.

    An error that anyio itself carries over stays in a future that its traceback leads to, and so do all
    frames that it came through: the tensors in them would live until the garbage collector runs. For the
    same reason nothing here holds the arguments once the call was made, or given up.

    Waits for the call. Cancelling by a scope of anyio waits for it, too; by asyncio it leaves it running.

    Raises:
        OSError: the machine has no thread to give, and nothing was called.
    """
    call = _Call(partial(work, *arguments))
    del work, arguments
    try:
        await anyio.to_thread.run_sync(call)
    except RuntimeError as error:
        raise no_thread(error) from error
    finally:
        call.give_up()
    return call.outcome()


class _Call(Generic[R]):
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


class _Piece(Generic[R]):
    """A piece of work, as long as somebody wants it."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work = work
        self.is_wanted = True

    def __call__(self) -> R:
        if not self.is_wanted:
            raise CancelledError
        return self._work()


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
        self._running = 0
        self._is_closed = False
        self._settling: list[asyncio.Future[None]] = []

    def submit(
        self, work: Callable[[], R], on_done: Callable[[], object] = lambda: None
    ) -> "asyncio.Future[R]":
        """Begin a piece of work; cancelling the future that is returned leaves work running that has begun.

        Args:
            work: what to do, in the thread.
            on_done: called in the loop when the work has returned or failed, before whoever awaits it wakes.

        Raises:
            OSError: there is no thread yet, and the machine has none to give.
        """
        future: asyncio.Future[R] = self._loop.create_future()
        piece = _Piece(work)
        try:
            running = self._executor.submit(piece)
        except RuntimeError as error:
            # It is in the executor's queue all the same, and would run before the next piece.
            piece.is_wanted = False
            raise no_thread(error) from error
        self._running += 1
        running.add_done_callback(lambda done: self._in_loop(done, future, on_done))
        future.add_done_callback(lambda done: running.cancel() if done.cancelled() else None)
        return future

    def begin(self, what: str, work: Callable[[], object]) -> None:
        """Begin work that nobody waits for; if it fails, that is logged.

        Args:
            what: what it is called in the log.
            work: what to do, in the thread; here, if none can be started.
        """
        try:
            future = self.submit(work)
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
        """Wait until nothing runs; errors are for those who asked for the work.

        Cancelling leaves the work running.
        """
        while self._running:
            future = self._loop.create_future()
            self._settling.append(future)
            await future

    def close(self) -> None:
        """End the threads; if work still runs, without waiting for it. May be called again."""
        if not self._running:
            self._executor.shutdown()
            self.helper.shutdown()
        elif not self._is_closed:
            # The last of all work, since what runs may yet hand over a part of itself.
            self._executor.submit(self.helper.shutdown)
            self._executor.shutdown(wait=False)
        self._is_closed = True

    def _in_loop(self, done: "Future[R]", future: "asyncio.Future[R]", on_done: Callable[[], object]) -> None:
        # Once the loop is closed, so is everything that `_ended` would set right.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended, done, future, on_done)

    def _ended(self, done: "Future[R]", future: "asyncio.Future[R]", on_done: Callable[[], object]) -> None:
        self._running -= 1
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
