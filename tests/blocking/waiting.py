"""What tests wait for, in threads."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread", "until"]

R = TypeVar("R")

_PATIENCE_S = 20.0  # more than anything here takes, on whatever machine


def until(condition: Callable[[], object]) -> None:
    """Wait until something is so of which nobody tells."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


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
