"""Threads that wait, calls that run in the event loop, and a handler of requests."""

import fcntl
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from aiotensor import TensorHandle
from aiotensor.blocking import TensorSender
from tests.channel import parties
from tests.channel.parties import Answer, Question
from verification.internals import worker_of
from verification.patterns import pattern

R = TypeVar("R")

NOBODYS = TensorHandle("nobody", 0, 0, "int64", (3,), "cpu")

_PATIENCE_S = 20.0  # more than any operation takes, on any machine


class Place(NamedTuple):
    """Addresses of one test, in a folder of their own.

    Attributes:
        messages: for requests.
        tensors: for tensors and publications.
    """

    messages: str
    tensors: str

    @property
    def folder(self) -> str:
        """The folder with the sockets."""
        return os.path.dirname(self.messages.removeprefix("unix://"))


def until(condition: Callable[[], object]) -> None:
    """Poll a condition until it is true."""
    end = time.monotonic() + _PATIENCE_S
    # Another thread gets the GIL after this time, not after 5 ms at each of its steps: 300 steps of another
    # thread took 8 ms instead of 176 ms.
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    try:
        while not condition():
            assert time.monotonic() < end, "waited in vain"
    finally:
        sys.setswitchinterval(before)


def waits_for_loop(thread: int) -> bool:
    """Return whether a thread waits for the event loop."""
    return sys._current_frames()[thread].f_code.co_filename.endswith("aiotensor/blocking/thread.py")


@contextmanager
def held_back(sender: TensorSender) -> Iterator[None]:
    """Let the worker of a sender begin no copy in the block."""
    go_on = threading.Event()
    sender.call(worker_of(sender.inner).submit, go_on.wait)
    try:
        yield
    finally:
        go_on.set()


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


def answer(question: Question) -> Answer:
    """Answer without waiting, like the async handler of the tests of the channel."""
    try:
        parties.answer(question).send(None)
    except StopIteration as done:
        found: Answer = done.value
        return found
    raise AssertionError("it waited")


def is_right(got: Answer, seed: int, count: int, wish: int = 7) -> bool:
    """Return whether an answer contains the sum of its question's pattern, and the requested pattern."""
    return (
        got.seed == seed
        and got.total == int(pattern(seed, count).sum())
        and got.tensor is not None
        and torch.equal(got.tensor, pattern(seed, wish))
    )
