"""Waiting for a possible change, and limits on the duration of waits."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import TypeVar

from aiotensor.errors import AioTensorError

T = TypeVar("T")

_NO_LIMIT: AbstractAsyncContextManager[None] = nullcontext()


class Waiters(OrderedDict["asyncio.Future[None]", None]):
    """Futures of the tasks that wait for a possible change; each task checks the state when it resumes.

    The change itself is not assigned to a task: it remains available until a task takes it without an
    await, so no change is lost if a waiting task is cancelled.
    """

    def wait(self) -> "asyncio.Future[None]":
        """Return a future, which the next `wake` completes; await it at once, in a task."""
        future = asyncio.get_running_loop().create_future()
        self[future] = None
        future.add_done_callback(partial(self.pop, default=None))  # if it is cancelled or expires
        return future

    def wake(self) -> None:
        """Wake all waiting tasks, in the order of their calls."""
        waiting = list(self)
        self.clear()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def wake_one(self) -> None:
        """Wake the first waiting task, for an item that one task takes.

        With a thousand tasks, waking all of them for each item would block the event loop. A task that is
        cancelled after it was woken must call this again.
        """
        while self:
            future, _ = self.popitem(last=False)
            if not future.done():
                future.set_result(None)
                return


async def until(
    poll: Callable[[], T | None],
    waiters: Waiters,
    seconds: float | None = None,
    overdue: Callable[[], Exception] = TimeoutError,
) -> T:
    """Wait until a function returns something other than None, and return that.

    A result that arrives in the iteration of the timeout is returned.

    Args:
        poll: called at once, and after each change; its errors end the wait.
        waiters: woken after each change.
        seconds: the limit on the duration in seconds; None for no limit.
        overdue: returns the error to raise when the time is over.
    """
    found = poll()
    if found is not None:
        return found
    loop = asyncio.get_running_loop()
    ends_at = math.inf if seconds is None else loop.time() + seconds
    while True:
        change = waiters.wait()
        alarm = None if seconds is None else loop.call_at(ends_at, _expire, change)
        try:
            await change
        except asyncio.CancelledError:
            waiters.wake_one()  # in place of this task, which may have been woken
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
        found = poll()
        if found is not None:
            return found
        if loop.time() >= ends_at:
            raise overdue()


def _expire(change: "asyncio.Future[None]") -> None:
    if not change.done():
        change.set_result(None)


def timeout_at_close(seconds: float) -> AbstractAsyncContextManager[object]:
    """Limit the waits in a block in seconds; not in `close_now`, which uses no task and cancels each wait."""
    return nullcontext() if asyncio.current_task() is None else asyncio.timeout(seconds)


def at_most(
    seconds: float | None, make_error: Callable[[], AioTensorError]
) -> AbstractAsyncContextManager[None]:
    """Limit the duration of a block in seconds, and raise the given error at expiry; None for no limit."""
    # Most waits have no limit, and a generator for each would cost several calls.
    return _NO_LIMIT if seconds is None else _at_most(seconds, make_error)


@asynccontextmanager
async def _at_most(seconds: float, make_error: Callable[[], AioTensorError]) -> AsyncIterator[None]:
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            yield
    except TimeoutError:
        if timeout.expired():
            raise make_error() from None
        raise
