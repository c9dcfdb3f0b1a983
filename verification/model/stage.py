"""The common parts of all worlds: a stepped event loop, an endpoint, calls, and the checks for leftovers."""

import gc
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from aiotensor import AioTensorError
from verification.descriptors import our_descriptors
from verification.model.records import Call, Outcome
from verification.model.stepping import Steps
from verification.patterns import pattern
from verification.places import LINKS


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
        self.steps = Steps(self.loop)
        self.calls: list[Call] = []  # that have not returned
        self.now = 0  # counts events
        self.seeds = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def values(self, count: int) -> torch.Tensor:
        self.seeds += 1
        return pattern(self.seeds * 1_000_003, count)

    # Calls

    def call(
        self,
        what: str,
        side: object,
        coroutine: Coroutine[Any, Any, Any],
        finish: Callable[[Call, Outcome], None],
        **more: Any,
    ) -> Call:
        """Start a call, whose outcome is checked when it has returned."""
        clock = self.steps.loop.time()
        call = Call(what, self.steps.start(coroutine), self.tick(), clock, finish, side, **more)
        self.calls.append(call)
        return call

    def of(self, side: object, *what: str) -> list[Call]:
        """Return the pending calls of one side; only those of some kinds if any are given."""
        return [call for call in self.calls if call.side is side and (not what or call.what in what)]

    def cancel(self, call: Call) -> None:
        """Cancel a call."""
        call.is_cancelled = True
        assert call.task is not None
        with self.steps.inside():
            call.task.cancel()

    def ended_calls(self) -> list[tuple[Call, Outcome]]:
        """Remove the calls that have returned, and return them with their outcomes."""
        ended = [call for call in self.calls if call.task is not None and call.task.done()]
        self.calls = [call for call in self.calls if call not in ended]
        return [(call, _outcome_of(call)) for call in ended]

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel_a_call(self, data: st.DataObject) -> None:
        calls = [call for call in self.calls if call.what != "close"]
        if calls:
            self.cancel(data.draw(st.sampled_from(calls)))

    @abstractmethod
    def turn(self, times: int = 1) -> object:
        """Run iterations of the loop, and check the results of calls."""

    @rule(times=st.integers(1, 4))
    def let_the_loop_turn(self, times: int) -> None:
        self.turn(times)

    @rule(seconds=st.sampled_from([0.005, 0.3, 0.6, 40.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.steps.pass_time(seconds)
        self.turn()

    # The end

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

    def _left(self) -> dict[int, str]:
        return {
            number: what for number, what in our_descriptors().items() if self.descriptors.get(number) != what
        }


def _outcome_of(call: Call) -> Outcome:
    """Return the outcome of a call that has returned."""
    task, call.task = call.task, None
    assert task is not None
    if task.cancelled():
        assert call.is_cancelled, f"{call} was cancelled by the library"
        return Outcome(is_cancelled=True)
    error = task.exception()
    if error is None:
        return Outcome(task.result())
    if not isinstance(error, AioTensorError | StopAsyncIteration):
        raise AssertionError(f"{call} failed") from error
    # Without its traceback, whose frames hold tensors.
    return Outcome(error=error.with_traceback(None))
