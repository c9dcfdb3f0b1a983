"""A run: one round after the other, until the time is over or a round fails."""

import contextlib
import itertools
import multiprocessing
import time
from collections.abc import Mapping, Sequence

import msgspec

from verification.chaos import here
from verification.chaos.broadcasts import BroadcastFamily, BroadcastPlay
from verification.chaos.exchanges import ExchangeFamily, ExchangePlay
from verification.chaos.family import Family, RoundError
from verification.chaos.growth import measure
from verification.chaos.plan import ENDS, FAMILIES, Round
from verification.chaos.planning import plan_round
from verification.chaos.report import Run
from verification.chaos.rounds import Play

__all__ = ["run_for"]

_ROUNDS_A_SAMPLE = 5


async def run_for(
    seed: int,
    seconds: float,
    rounds: range | None,
    repeat: int,
    only: Sequence[str] = (),
    *,
    is_soak: bool = False,
) -> Run:
    """Run rounds.

    Args:
        seed: the seed of the plans.
        seconds: the time during which new rounds are started.
        rounds: which ones; None for as many as the time allows.
        repeat: how often each of `rounds` is run.
        only: the families of the rounds, in turn; empty for a random one each time.
        is_soak: whether processes only start and end, and the elders are measured after each round.
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
            plan = plan_round(seed, number, only[number % len(only)] if only else None)
            if is_soak:
                plan = msgspec.structs.replace(plan, faults=tuple(plan.of(ENDS)))
            family = families.get(plan.family) or families.setdefault(plan.family, _new(plan.family, run))
            await _play(run, plan, family)
            if run.problems:
                break
            if (is_soak or number % _ROUNDS_A_SAMPLE == 0) and family.elder is not None:
                blocks = await family.elder.call(here.tidy)
                run.add(family.name, time.monotonic() - ends + seconds, measure(family.elder.pid, blocks))
        for family in families.values() if not run.problems else ():
            run.problems += run.growth_problems(family.name) + await family.finish()
        run.seconds = time.monotonic() - ends + seconds
    finally:
        for family in families.values():
            with contextlib.suppress(ProcessLookupError):
                await family.close()
    return run


_KINDS: Mapping[str, tuple[type[Family], type[Play]]] = {
    "tensors": (Family, Play),
    "requests": (ExchangeFamily, ExchangePlay),
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
    run.note(plan, problems)
