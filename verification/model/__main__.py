"""The command line: `python -m verification.model`.

It runs rounds of random sequences, each with the next machine, until the time is over or a round fails.
"""

import gc
import itertools
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click
import hypothesis
import torch
from hypothesis.stateful import run_state_machine_as_test

from verification.model.machines import MACHINES, SETTINGS

_SEQUENCES = 20  # of a round, which takes a few seconds


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seconds", type=float, default=600.0, help="For how long rounds are begun.")
@click.option("--seed", type=int, help="The source of all sequences.  [default: a random one]")
@click.option("--round", "only", type=click.IntRange(min=0), help="Run only this round of the seed.")
def main(seconds: float, seed: int | None, only: int | None) -> None:
    """Run random sequences of operations beside a model of the protocol, and compare the two.

    The exit status is 1 if they differ: the output ends with a short sequence that shows the difference, and
    with the command that repeats it.
    """
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    click.echo(f"seed {seed}")
    torch.set_num_threads(1)  # threads that spin while they wait for each other slow down a busy machine
    gc.collect()
    gc.freeze()  # each sequence collects garbage, which takes long with all imported modules
    began = time.monotonic()
    rounds = 0
    for number in itertools.count() if only is None else (only,):
        failure = _play(seed, number)
        rounds += 1
        if failure:
            click.echo(f"\nWRONG in round {number}:\n{failure}")
            click.echo(f"to repeat it: python -m verification.model --seed {seed} --round {number}")
            sys.exit(1)
        if time.monotonic() >= began + seconds:
            break
    click.echo(f"rounds of up to {_SEQUENCES} sequences: {rounds}, in {time.monotonic() - began:.0f} s")


def _play(seed: int, number: int) -> str:
    """Run one round; return its error with the shortest sequence that causes it, or "" if it passes."""
    name = list(MACHINES)[number % len(MACHINES)]
    machine = hypothesis.seed(f"{seed}-{number}")(MACHINES[name])
    try:
        with _unraised() as unraised:
            run_state_machine_as_test(
                machine, settings=hypothesis.settings(SETTINGS, max_examples=_SEQUENCES)
            )
    except Exception as error:  # noqa: BLE001 - each is a finding
        return f"{name}: {_text(error)}"
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


if __name__ == "__main__":
    main()
