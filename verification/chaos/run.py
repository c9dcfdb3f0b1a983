"""A run: one round after the other, until the time is over or a round fails."""

import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Mapping

from verification.chaos import here
from verification.chaos.broadcasts import BroadcastFamily, BroadcastPlay
from verification.chaos.engines import EnginesFamily, EnginesPlay
from verification.chaos.exchanges import ExchangeFamily, ExchangePlay
from verification.chaos.family import Family, RoundError
from verification.chaos.plan import FAMILIES, FaultKind, Round
from verification.chaos.planning import plan_round
from verification.chaos.report import Run
from verification.chaos.rounds import Play
from verification.processes import watch

__all__ = ["run_for"]

_ROUNDS_A_SAMPLE = 5


async def run_for(
    seed: int, seconds: float, rounds: range | None, repeat: int, only: str | None = None
) -> Run:
    """Run rounds.

    Args:
        seed: the seed of the plans.
        seconds: the time during which new rounds are started.
        rounds: which ones; None for as many as the time allows.
        repeat: how often each of `rounds` is run.
        only: the family of all rounds; None for any.
    """
    # The run starts thousands of processes, each forked from a process that has imported the slow modules.
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["click", "rich", "uvloop", "verification.chaos.run"])
    run = Run(seed, only)
    families: dict[str, Family] = {}
    ends = time.monotonic() + seconds
    numbers = itertools.count() if rounds is None else (n for n in rounds for _ in range(repeat))
    try:
        for number in numbers:
            if time.monotonic() > ends:
                break
            plan = plan_round(seed, number, only)
            family = families.get(plan.family) or families.setdefault(plan.family, _new(plan.family, run))
            await _play(run, plan, family)
            if run.problems:
                break
        for family in families.values() if not run.problems else ():
            run.problems += run.memory_problems(family.name) + await family.finish()
        run.seconds = time.monotonic() - ends + seconds
    finally:
        for family in families.values():
            with contextlib.suppress(ProcessLookupError):
                await family.close()
    return run


_KINDS: Mapping[str, tuple[type[Family], type[Play]]] = {
    "tensors": (Family, Play),
    "questions": (ExchangeFamily, ExchangePlay),
    "engines": (EnginesFamily, EnginesPlay),
    "broadcast": (BroadcastFamily, BroadcastPlay),
}


def _new(name: str, run: Run) -> Family:
    family = _KINDS[FAMILIES[name].work][0](name)
    run.notes += family.notes
    return family


async def _play(run: Run, plan: Round, family: Family) -> None:
    try:
        await family.prepare(plan)
        problems = await _KINDS[plan.kind.work][1](plan, family, run.times).run(run.tally)
    except RoundError as error:
        problems = [str(error)]
    except BaseException as error:
        error.add_note(f"in round {plan.number} of seed {run.seed}")
        raise
    closes = any(fault.kind is FaultKind.CLOSE for fault in plan.faults)
    if problems and closes and family.has_aborted:  # regardless of other problems with that round
        await family.abandon()
        run.note_abort(plan)
        return
    run.note(plan, problems)
    if not problems and plan.number % _ROUNDS_A_SAMPLE == 0 and family.elder is not None:
        await family.elder.call(here.tidy)
        run.memory[family.name].append(watch.status(family.elder.pid, "RssAnon"))
