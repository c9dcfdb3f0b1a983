"""The common parts of all worlds: a stepped event loop, an endpoint, calls, and the checks for leftovers."""

import gc
import re
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from aiotensor import AioTensorError
from verification.descriptors import our_descriptors
from verification.model.records import Block, Call, Outcome
from verification.model.stepping import Steps
from verification.patterns import pattern
from verification.places import LINKS

QUIET_TURNS = 10  # iterations without a change, after which nothing will change

_FLOAT = re.compile(rb"\d+\.\d+(e-?\d+)?|\d+e-\d+")


def one_of(records: Callable[[Any], Sequence[Any]]) -> st.SearchStrategy[Any]:
    """Choose one of the records that the machine returns."""
    return st.runner().flatmap(lambda machine: st.sampled_from(records(machine)))


def nothing(call: Call, outcome: Outcome) -> None:
    """Do nothing more about the outcome of a call; its error is checked in any case."""


class Stage(RuleBasedStateMachine):
    """Run real objects on one loop, whose iterations the rules choose."""

    link = "unix"
    loop = "asyncio"
    closing_s = 0.0  # after which closed objects hold nothing

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
        self.allocated: list[Block] = []
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
        finish: Callable[[Call, Outcome], None] = nothing,
        **more: Any,
    ) -> Call:
        """Start a call; when it has returned, its error is checked, and `finish` is called."""
        clock = self.steps.loop.time()
        call = Call(what, self.steps.start(coroutine), self.tick(), clock, finish, side, **more)
        self.calls.append(call)
        return call

    def of(self, side: object, *what: str) -> list[Call]:
        """Return the pending calls of one side; only those of some kinds if any are given."""
        return [call for call in self.calls if call.side is side and (not what or call.what in what)]

    def cancel(self, call: Call) -> None:
        """Cancel a call, unless it closes an object."""
        if call.what == "close":
            return
        call.is_cancelled = True
        assert call.task is not None
        with self.steps.inside():
            call.task.cancel()

    def ended_calls(self) -> list[tuple[Call, Outcome]]:
        """Remove the calls that have returned, and return them with their outcomes."""
        ended = [call for call in self.calls if call.task is not None and call.task.done()]
        self.calls = [call for call in self.calls if call not in ended]
        return [(call, _outcome_of(call)) for call in ended]

    def finish(self, ended: Iterable[tuple[Call, Outcome]]) -> None:
        """Check the outcomes of calls that have returned, in this order."""
        for call, outcome in ended:
            if outcome.error is not None:
                assert call.what != "close", f"{call} failed: {outcome.error}"
                self.check_error(call, outcome.error)
            call.finish(call, outcome)

    @abstractmethod
    def check_error(self, call: Call, error: BaseException) -> None:
        """Check that the error of a call is explained."""

    @precondition(lambda self: self.calls)
    @rule(call=one_of(lambda self: self.calls))
    def cancel_a_call(self, call: Call) -> None:
        self.cancel(call)

    @precondition(lambda self: self.allocated)
    @rule(block=one_of(lambda self: self.allocated))
    def free_allocated(self, block: Block) -> None:
        self.allocated.remove(block)
        block.owner = None

    def free_all(self) -> None:
        """Free all tensors of the application."""
        for block in self.allocated:
            block.owner = None
        self.allocated.clear()

    def become_quiet(self) -> None:
        """Run the loop until nothing changes."""
        for _ in range(2):
            self.steps.pass_time(0.3)  # senders and subscribers look for their peers
            before = None
            while before != (before := self._state()) or self.collect():
                self.turn(QUIET_TURNS)

    def _state(self) -> object:
        """Return values that change as long as something is in transit: no durations, the only floats."""
        reports = [_FLOAT.sub(b"", msgspec.json.encode(each.statistics())) for each in self.objects()]
        return self.now, len(self.calls), reports

    @abstractmethod
    def objects(self) -> list[Any]:
        """Return all objects of the library, with their statistics."""

    def collect(self) -> bool:
        """Free what only the garbage collector frees; return whether there was anything."""
        return False

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

    def end(self, *, is_checked: bool) -> None:
        """End all calls and objects, and check for leftovers."""
        if is_checked:
            self.settle()
            self.bring_everything_to_its_end()
        self.free_all()
        for call in self.calls:
            self.cancel(call)
        self.close_all()
        for _ in range(10):
            self.turn(QUIET_TURNS)
            self.steps.pass_time(self.closing_s)
            self.collect()
        assert not self.calls, f"{self.calls} hang"
        self.steps.close()
        if is_checked:
            self.check_that_nothing_is_left()

    @abstractmethod
    def settle(self) -> None:
        """Run the loop until nothing changes, and compare all sides with the model."""

    @abstractmethod
    def bring_everything_to_its_end(self) -> None:
        """Take everything that is available until no call waits any more, and check the outcome."""

    @abstractmethod
    def close_all(self) -> None:
        """Close all objects."""

    def check_that_nothing_is_left(self) -> None:
        """Check for descriptors, threads and complaints of the loop, after everything was closed."""
        self._places.close()
        assert not self._left(), f"descriptors left behind: {self._left()}"
        threads = [one.name for one in set(threading.enumerate()) - self.threads if "aiotensor" in one.name]
        assert not threads, f"threads left behind: {threads}"
        assert not self.steps.complaints, self.steps.complaints

    def _left(self) -> dict[int, str]:
        return dict(our_descriptors().items() - self.descriptors.items())


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
