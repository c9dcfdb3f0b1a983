"""Calls that cannot be interrupted, each in a separate daemon thread."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from aiotensor.runtime.worker import no_thread

__all__ = ["run_detached"]

R = TypeVar("R")


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
            _call_soon(loop, fail, error)
        else:
            _call_soon(loop, succeed, result)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise no_thread(error) from error
    return future


def _call_soon(loop: asyncio.AbstractEventLoop, handle: Callable[[R], object], result: R) -> None:
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(handle, result)
