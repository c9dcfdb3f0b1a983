"""A run: one round after the other, until the time is over or a round fails."""

import contextlib
import itertools
import multiprocessing
import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from rich.console import Console
from rich.table import Table

from verification.chaos.broadcasts import BroadcastFamily, BroadcastPlay
from verification.chaos.family import Family, RoundError
from verification.chaos.plan import ROLES, SLOTS, Hold, Round, plan_round
from verification.chaos.requests import RequestsFamily, RequestsPlay
from verification.chaos.rounds import Play

_KINDS: Mapping[str, tuple[type[Family], type[Play]]] = {
    "tensors": (Family, Play),
    "requests": (RequestsFamily, RequestsPlay),
    "broadcast": (BroadcastFamily, BroadcastPlay),
}


class Run:
    """One run of a seed."""

    def __init__(self, seed: int, only: str | None) -> None:
        self.seed = seed
        self.only = only  # the family, if not all
        self.problems: list[str] = []
        self.seconds = 0.0
        self._failed: Round | None = None
        self._tally = Counter[str]()
        self._times: dict[str, float] = {}

    async def play(self, plan: Round, family: Family) -> None:
        """Run a round, and note its problems."""
        play = _KINDS[plan.work][1](plan, family, self._times)
        try:
            await family.prepare(plan)
            self.problems += await play.run(self._tally)
        except RoundError as error:
            self.problems.append(str(error))
        except BaseException as error:
            error.add_note(f"in round {plan.number} of seed {self.seed}")
            raise
        self._failed = plan if self.problems else None
        self._tally[f"rounds of the family {plan.family!r}"] += 1
        for fault in plan.faults:
            self._tally[f"{fault.kind.value} ({ROLES[plan.work][fault.target >= SLOTS]})"] += 1
        for taker in plan.takers:
            self._tally["a receiver takes nothing for a while"] += taker.stuck_ms > 0
            self._tally["a receiver is slow"] += taker.slow_ms > 0
            self._tally["a receiver holds what it took"] += taker.hold is not Hold.DROP and taker.hold_ms > 0

    def print(self) -> None:
        """Print the results."""
        console = Console(soft_wrap=True, width=100)
        table = Table("what happened", "times", title=f"seed {self.seed}: {self.seconds:.0f} s", box=None)
        for what, count in sorted(self._tally.items()):
            table.add_row(what, str(count))
        for what, seconds in self._times.items():
            table.add_row(f"longest time until {what}", f"{seconds * 1000:.0f} ms")
        console.print(table)
        if self.problems:
            console.print("\nWRONG:", style="bold red")
            for problem in self.problems:
                console.print(problem, markup=False)
        if self._failed is not None:
            number = self._failed.number
            plan = msgspec.json.format(msgspec.json.encode(self._failed), indent=1).decode()
            console.print(f"\nround {number}: {plan}", markup=False)
            only = f" --family {shlex.quote(self.only)}" if self.only else ""
            again = f"python -m verification.chaos --seed {self.seed} --round {number}{only}"
            console.print(f"\nto play it again and again: {again}", markup=False)


async def run_for(
    seed: int,
    seconds: float,
    only: str | None = None,
    number: int | None = None,
    change: Callable[[Round], Round] = lambda plan: plan,
    look: Callable[[Family], Awaitable[None]] | None = None,
) -> Run:
    """Run rounds.

    Args:
        seed: the seed of the plans.
        seconds: the time during which new rounds are started.
        only: the family of all rounds; None for a random one each time.
        number: the number of the round that is repeated; None for all rounds.
        change: changes the plan of each round.
        look: called after each round, with its family.
    """
    # The run starts thousands of processes, each forked from a process that has imported the slow modules.
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["click", "rich", "uvloop", "verification.chaos.run"])
    run = Run(seed, only)
    families: dict[str, Family] = {}
    began = time.monotonic()
    try:
        for planned in itertools.count() if number is None else itertools.repeat(number):
            plan = change(plan_round(seed, planned, only))
            if plan.family not in families:
                families[plan.family] = _KINDS[plan.work][0](plan.family)
            family = families[plan.family]
            await run.play(plan, family)
            if run.problems or time.monotonic() > began + seconds:
                break
            if look is not None:
                await look(family)
        for family in families.values() if not run.problems else ():
            run.problems += await family.finish()
        run.seconds = time.monotonic() - began
    finally:
        for family in families.values():
            with contextlib.suppress(ProcessLookupError):
                await family.close()
    return run
