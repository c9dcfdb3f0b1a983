"""What tests wait for, in threads."""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from aiotensor.blocking.portal import BlockingObject
from verification.loops import let_threads_run

__all__ = ["in_thread", "is_opening", "nobody_listens_in", "until"]

R = TypeVar("R")

_PATIENCE_S = 20.0  # more than anything here takes, on whatever machine


def until(condition: Callable[[], object]) -> None:
    """Wait until something is so of which nobody tells."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        let_threads_run()


def is_opening(listener: BlockingObject[Any]) -> bool:
    """Return whether the event loop has begun to open an object."""
    return listener._opening._is_running


@contextmanager
def nobody_listens_in(folder: str) -> Iterator[None]:
    """Keep everybody from beginning to listen in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def in_thread(function: Callable[[], R]) -> "Future[R]":
    """Begin a function in a thread of its own, and return the future of what it returns."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is the test's
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
