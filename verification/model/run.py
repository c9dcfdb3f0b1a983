"""Run rounds of random sequences until the time is over or a round fails."""

import itertools
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import hypothesis
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from verification.internals import no_grace
from verification.model.machines import SETTINGS

__all__ = ["SEQUENCES", "Run", "run_for"]

SEQUENCES = 20  # of a round, which takes a few seconds


@dataclass
class Run:
    """The results of a run.

    Attributes:
        rounds: how many rounds were run.
        failed: the number of the round that failed; None if none did.
        failure: its error, with the shortest sequence that causes it.
    """

    rounds: int = 0
    failed: int | None = None
    failure: str = ""


def run_for(
    machines: Mapping[str, type[RuleBasedStateMachine]], seed: int, seconds: float, only: int | None = None
) -> Run:
    """Run rounds, each with the next machine.

    Args:
        machines: the state machines, by name.
        seed: the source of all sequences, together with the number of their round.
        seconds: the time during which new rounds are started.
        only: the number of the only round; None for as many rounds as the time allows.
    """
    run = Run()
    ends = time.monotonic() + seconds
    for number in itertools.count() if only is None else (only,):
        if only is None and time.monotonic() >= ends:
            break
        run.rounds += 1
        run.failure = _play(machines, seed, number)
        if run.failure:
            run.failed = number
            break
    return run


def _play(machines: Mapping[str, type[RuleBasedStateMachine]], seed: int, number: int) -> str:
    """Run one round; return its error, or "" if it passes."""
    name = list(machines)[number % len(machines)]
    machine = hypothesis.seed(f"{seed}-{number}")(machines[name])
    try:
        with no_grace(), _unraised() as unraised:
            run_state_machine_as_test(machine, settings=hypothesis.settings(SETTINGS, max_examples=SEQUENCES))
    except Exception as error:  # noqa: BLE001 - each is a finding
        return f"{name}: {''.join(traceback.format_exception(error))}"
    return "".join(f"{name}: {text}" for text in unraised)


@contextmanager
def _unraised() -> Iterator[list[str]]:
    """Make warnings errors, and collect the errors that finalizers and threads could not raise."""
    found: list[str] = []

    def in_finalizer(unraisable: "sys.UnraisableHookArgs") -> None:
        found.append(f"in {unraisable.object!r}: {_text(unraisable.exc_value)}")

    def in_thread(caught: threading.ExceptHookArgs) -> None:
        found.append(f"in {caught.thread}: {_text(caught.exc_value)}")

    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = in_finalizer, in_thread
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield found
    finally:
        sys.unraisablehook, threading.excepthook = hooks


def _text(error: BaseException | None) -> str:
    return "".join(traceback.format_exception(error))
