"""Run a plan: every round of every workload, each contender in fresh processes, and gather the results."""

import os
import time
from collections import defaultdict
from collections.abc import Callable

from bench.goals import judge
from bench.group import FailedError, run
from bench.machine import describe
from bench.plan import Chapter, Entry, Options, Plan
from bench.records import Batch, Failure, Participant, Report, Verdict
from bench.results import Samples, gather, key_of


def measure(plan: Plan, options: Options, on_step: Callable[[str, int], None]) -> Report:
    """Measure a plan, and return the report.

    The contenders take turns, and each round begins with another one, so that a machine whose speed
    drifts treats all of them alike. A contender that fails is reported, and skipped in later rounds of that
    workload.

    Args:
        plan: what to measure.
        options: the options of the plan.
        on_step: called before each group of processes and after each batch, with a description and the number
            of batches that are done, or that will never be, since their contender has failed.
    """
    began, load_before = time.monotonic(), os.getloadavg()[0]
    samples: Samples = defaultdict(list)
    failures: list[Failure] = []
    for chapter in plan.chapters:
        for number in range(chapter.rounds):
            first = number % len(chapter.entries)
            for entry in chapter.entries[first:] + chapter.entries[:first]:
                _measure(chapter, number, entry, samples, failures, on_step)
    results = gather(plan, samples)
    counts_calls = any(chapter.workload.name == "round-trip" for chapter in plan.chapters)
    return Report(
        quick=options.quick,
        loop=options.loop,
        contenders=[Participant(one.name, one.what, one.is_limit) for one in plan.contenders],
        workloads=[chapter.workload.name for chapter in plan.chapters],
        seconds=time.monotonic() - began,
        machine=describe(load_before),
        results=results,
        goals=judge(results) + (_calls() if counts_calls else []),
        failures=failures,
        skips=plan.skips,
    )


def _calls() -> list[Verdict]:
    # It imports torch, which takes seconds.
    from bench.calls import verdicts

    return verdicts()


def _measure(
    chapter: Chapter,
    number: int,
    entry: Entry,
    samples: Samples,
    failures: list[Failure],
    on_step: Callable[[str, int], None],
) -> None:
    workload, contender = chapter.workload.name, entry.contender.name
    left = (chapter.rounds - number) * len(entry.spec.batches)
    if any((past.workload, past.contender) == (workload, contender) for past in failures):
        return

    def file(batch: Batch) -> None:
        nonlocal left
        left -= 1
        samples[key_of(entry, batch)].append(batch)
        on_step(step, 1)

    step = f"{workload}, round {number + 1} of {chapter.rounds}: {contender}"
    on_step(step, 0)
    try:
        run(entry.contender, entry.spec, chapter.deadline_s, file)
    except FailedError as error:
        failures.append(Failure(workload, contender, number, str(error), error.output))
        on_step(f"FAILED {step}", left)
