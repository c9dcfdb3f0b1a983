"""Waiting in threads, and the calls that run in the event loop meanwhile."""

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

__all__ = ["Running", "in_thread", "is_opening", "nobody_listens_in", "running", "until"]

R = TypeVar("R")

_PATIENCE_S = 20.0  # more than anything here takes, on whatever machine


def until(condition: Callable[[], object]) -> None:
    """Poll a condition until it is true."""
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        let_threads_run()


class Running:
    """The calls of an asynchronous method that the event loop has begun and not ended.

    Attributes:
        count: their number.
    """

    count = 0


@contextmanager
def running(owner: type[object], name: str) -> Iterator[Running]:
    """Count the running calls of a method that is not part of the statistics."""
    method, calls = getattr(owner, name), Running()

    async def call(*args: object, **kwargs: object) -> object:
        calls.count += 1
        try:
            return await method(*args, **kwargs)
        finally:
            calls.count -= 1

    setattr(owner, name, call)
    try:
        yield calls
    finally:
        setattr(owner, name, method)


def is_opening(listener: BlockingObject[Any]) -> bool:
    """Return whether the event loop has begun to open an object."""
    return listener._opening._is_running


@contextmanager
def nobody_listens_in(folder: str) -> Iterator[None]:
    """Lock a folder, so that no process can begin to listen in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def in_thread(function: Callable[[], R]) -> "Future[R]":
    """Start a function in another thread, and return the future of its result."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it is the test's
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
