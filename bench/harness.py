"""Run a plan: every round of every workload, each contender in fresh processes, and gather the results."""

import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import NamedTuple

from bench.goals import judge
from bench.group import FailedError, Groups
from bench.machine import describe
from bench.plan import Chapter, Entry, Options, Plan
from bench.records import Batch, Failure, Loop, Participant, Report, Verdict
from bench.results import Samples, gather, key_of

__all__ = ["Step", "measure"]

_SIDE_BY_SIDE = 16  # groups of processes at most; they do nothing, but they take memory


class Step(NamedTuple):
    """A step of the harness; `batch` is None when a group of processes begins."""

    workload: str
    round: int
    rounds: int
    contender: str
    loop: Loop | None
    batch: Batch | None
    lost: int = 0  # batches that will never arrive, since the contender has failed


def measure(
    plan: Plan,
    options: Options,
    *,
    baseline: str,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Report:
    """Measure a plan, and return the report.

    The contenders take turns, and each round begins with another one, so that a machine whose speed
    drifts treats all of them alike. A contender that fails is reported, and skipped in later rounds of that
    workload.

    Args:
        plan: what to measure.
        options: the options of the plan.
        baseline: the name of the contender that the ratios refer to, unless a workload has its own.
        on_step: called before each group of processes and after each batch.
    """
    began, load_before = time.monotonic(), os.getloadavg()[0]
    # The groups are ended first, and with them the threads that wait for them.
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool, Groups() as groups:
        run = _Run(groups, pool, on_step)
        for chapter in plan.chapters:
            run.measure(chapter)
    results = gather(plan, run.samples, baseline)
    counts_calls = any(chapter.workload.name == "round-trip" for chapter in plan.chapters)
    return Report(
        quick=options.quick,
        answer=options.answer,
        baseline=baseline,
        contenders=[
            Participant(one.name, one.what, one.is_limit, one.carries, one.spans_hosts)
            for one in plan.contenders
        ],
        workloads=[chapter.workload.name for chapter in plan.chapters],
        seconds=time.monotonic() - began,
        machine=describe(load_before),
        results=results,
        goals=judge(results) + (_calls() if counts_calls else []),
        failures=run.failures,
        skips=plan.skips,
    )


def _calls() -> list[Verdict]:
    # It imports torch, which takes seconds.
    from bench.calls import verdicts

    return verdicts()


class _Run:
    """The measurements so far, and the contenders that failed."""

    def __init__(self, groups: Groups, pool: ThreadPoolExecutor, on_step: Callable[[Step], None]) -> None:
        self.samples: Samples = defaultdict(list)
        self.failures: list[Failure] = []
        self._groups = groups
        self._pool = pool
        self._on_step = on_step
        self._lock = Lock()

    def measure(self, chapter: Chapter) -> None:
        for number in range(chapter.rounds):
            first = number % len(chapter.entries)
            order = chapter.entries[first:] + chapter.entries[:first]
            wide = _SIDE_BY_SIDE if chapter.workload.side_by_side else 1
            for start in range(0, len(order), wide):
                # Each is awaited separately, even if there are many, so an interrupt has the same effect.
                list(self._pool.map(partial(self._one, chapter, number), order[start : start + wide]))

    def _one(self, chapter: Chapter, number: int, entry: Entry) -> None:
        name = chapter.workload.name
        if any(
            (past.workload, past.contender, past.loop) == (name, entry.contender.name, entry.loop)
            for past in self.failures
        ):
            return

        def tell(batch: Batch | None, lost: int = 0) -> None:
            step = Step(name, number, chapter.rounds, entry.contender.name, entry.loop, batch, lost)
            with self._lock:
                self._on_step(step)

        done = 0

        def file(batch: Batch) -> None:
            nonlocal done
            done += 1
            self.samples[key_of(entry, batch)].append(batch)
            tell(batch)

        tell(None)
        try:
            self._groups.run(entry.contender, entry.spec, chapter.deadline_s, file)
        except FailedError as error:
            self.failures.append(
                Failure(name, entry.contender.name, entry.loop, number, error.size, str(error), error.output)
            )
            tell(None, lost=(chapter.rounds - number) * len(entry.spec.batches) - done)
