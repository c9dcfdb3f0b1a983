"""The common parts of all worlds: a stepped event loop, an endpoint, and the checks for leftovers."""

import asyncio
import gc
import sys
import threading
from abc import abstractmethod
from contextlib import ExitStack
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine

from aiotensor import AioTensorError, TensorReceiver
from aiotensor.broadcast import Subscriber
from aiotensor.runtime.worker import Worker
from aiotensor.transports.base import Transport
from verification.descriptors import our_descriptors
from verification.internals import cut, worker_of
from verification.model.delivery import Delivery
from verification.model.records import Outcome
from verification.model.stepping import Steps
from verification.patterns import pattern
from verification.places import LINKS

__all__ = ["Stage", "outcome_of"]


class Stage(RuleBasedStateMachine):
    """Run real objects on one loop, whose iterations the rules choose."""

    link = "unix"
    loop = "asyncio"

    def __init__(self) -> None:
        super().__init__()
        self.descriptors = our_descriptors()
        self.threads = set(threading.enumerate())
        gc.collect()
        gc.disable()  # it would free the tensors in tracebacks at random moments
        self._places = ExitStack()
        self.place = self._places.enter_context(LINKS[self.link].place()).endpoint
        self.delivery: Delivery | None = None
        if not LINKS[self.link].is_local:
            self.delivery = Delivery(int(str(self.place).rpartition(":")[2]))
        self.steps = Steps(self.loop, self.delivery)
        self._held: set[Worker] = set()
        self.now = 0  # counts events
        self.seeds = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def values(self, count: int) -> torch.Tensor:
        self.seeds += 1
        return pattern(self.seeds * 1_000_003, count)

    @property
    def searches(self) -> int:
        """The number of searches until each peer has certainly found the receiver or the publisher."""
        # Between machines, the first search may have reached a listener that was closing, and never answered.
        return 2 if self.delivery is None else 3

    def traffic(self) -> object:
        """Return values that change while messages are under way, even if nothing else changes."""
        return 0 if self.delivery is None else self.delivery.traffic()

    def hold_or_let_go_of_memory(self, owner: TensorReceiver | Subscriber[Any]) -> None:
        """Hold the worker that provides memory for the bytes of other machines, or release it.

        `settle` releases it, and so does closing a receiver or a subscriber, which waits for its worker.
        """
        worker = worker_of(owner)
        if self.steps.is_held(worker):
            self.steps.let_go(worker)
        else:
            self.steps.hold(worker, only_long=False)
            self._held.add(worker)

    def let_go_of_memory(self) -> None:
        """Release all these workers."""
        for worker in self._held:
            self.steps.let_go(worker)
        self._held.clear()

    def cut(self, transport: Transport) -> None:
        """Cut a connection, and wait until the threads of ZeroMQ have noticed it, if they carry it."""
        cut(transport)
        if self.delivery is not None:
            self.delivery.wait()

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
            self._places.close()

    @abstractmethod
    def end(self, *, is_checked: bool) -> None:
        """End all calls and objects, and check for leftovers."""

    def check_that_nothing_is_left(self) -> None:
        """Check for descriptors, threads and complaints of the loop, after everything was closed."""
        self._places.close()
        assert not self._left(), f"descriptors left behind: {self._left()}"
        threads = [one.name for one in set(threading.enumerate()) - self.threads if "aiotensor" in one.name]
        assert not threads, f"threads left behind: {threads}"
        assert not self.steps.complaints, self.steps.complaints
        if self.delivery is not None:
            self.delivery.wait()
            assert not self.delivery.leftovers(), f"left behind: {self.delivery.leftovers()}"

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
