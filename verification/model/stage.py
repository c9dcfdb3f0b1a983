"""The common parts of all worlds: a stepped event loop, an endpoint, and the checks for leftovers."""

import asyncio
import fcntl
import gc
import os
import sys
import tempfile
import termios
import threading
from abc import abstractmethod
from contextlib import suppress
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine

from aiotensor import AioTensorError, TensorQueue
from verification.descriptors import our_descriptors
from verification.model.records import Outcome
from verification.model.stepping import Steps
from verification.patterns import pattern

__all__ = ["Stage", "outcome_of"]


class Stage(RuleBasedStateMachine):
    """Run real objects on one loop, whose iterations the rules choose."""

    link = "queue"
    loop = "asyncio"

    def __init__(self) -> None:
        super().__init__()
        self.descriptors = our_descriptors()
        self.threads = set(threading.enumerate())
        gc.collect()
        gc.disable()  # it would free the tensors in tracebacks at random moments
        self.steps = Steps(self.loop)
        self.now = 0  # counts events
        self.seeds = 0
        self.folder = tempfile.TemporaryDirectory(prefix="aiotensor-")
        self.place: str | TensorQueue = (
            TensorQueue() if self.link == "queue" else f"unix://{self.folder.name}/socket"
        )

    def tick(self) -> int:
        self.now += 1
        return self.now

    def values(self, count: int) -> torch.Tensor:
        self.seeds += 1
        return pattern(self.seeds * 1_000_003, count)

    def unread_bytes(self) -> int:
        """Return the number of bytes on the queue, whose first records may change nothing else."""
        if not isinstance(self.place, TensorQueue):
            return 0
        with self.place.open_reader() as reader:
            return int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), sys.byteorder)

    def free_place(self) -> None:
        """Free the resources of the machine itself."""
        if isinstance(self.place, TensorQueue):
            self.place.close()
        with suppress(FileNotFoundError):
            os.unlink(f"{self.folder.name}/socket")  # of a process that was killed
        self.folder.cleanup()

    def teardown(self) -> None:
        has_failed = sys.exc_info()[0] is not None
        try:
            self.end(is_checked=not has_failed)
        except Exception:
            # The first error is reported; the leftovers must not disturb the following examples.
            self.steps.abandon()
            if not has_failed:
                raise
        finally:
            gc.enable()
            self.free_place()

    @abstractmethod
    def end(self, *, is_checked: bool) -> None:
        """End all calls and objects, and check for leftovers."""

    def check_that_nothing_is_left(self) -> None:
        """Check for descriptors, threads and complaints of the loop, after everything was closed."""
        self.free_place()
        assert not self._left(), f"descriptors left behind: {self._left()}"
        threads = [one.name for one in set(threading.enumerate()) - self.threads if "aiotensor" in one.name]
        assert not threads, f"threads left behind: {threads}"
        assert not self.steps.complaints, self.steps.complaints

    def _left(self) -> dict[int, str]:
        return {
            number: what for number, what in our_descriptors().items() if self.descriptors.get(number) != what
        }


def outcome_of(task: "asyncio.Task[Any]", what: object) -> Outcome:
    """Return the outcome of a call in a task that has ended."""
    if task.cancelled():
        return Outcome(is_cancelled=True)
    error = task.exception()
    if error is None:
        return Outcome(task.result())
    if not isinstance(error, AioTensorError | StopAsyncIteration):
        raise AssertionError(f"{what} failed") from error
    # Without its traceback, whose frames hold tensors.
    return Outcome(error=error.with_traceback(None))
