"""A long load, during which no resource may grow: `python -m verification.soak`.

The load consists of the rounds of `verification.chaos` in which processes only start, close their objects and
are killed. One process of each family, its elder, lives for the whole run, and is measured after each round.

A quantity grows if the median of its samples in the last third of the run, without the warm-up, exceeds that
of the first third by more than its allowance, and the middle halves of both do not overlap. So a quantity
that only varies is flat, and a real growth below the allowance passes; a longer run would show it.
"""

import asyncio
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence

import click
import msgspec
from rich.console import Console
from rich.table import Table

from verification.chaos import here
from verification.chaos.family import Family
from verification.chaos.plan import ENDS, SLOTS, FaultKind, Round
from verification.chaos.run import run_for
from verification.processes import watch

_ALLOWED = {
    "private memory, MiB": 8.0,
    "shared memory, MiB": 24.0,
    "thousand objects": 4.0,
    "descriptors": 3.0,
    "threads": 2.0,
    "mappings": 16.0,
}
_FEWEST_SAMPLES = 40
_WARM_UP = 0.25  # the share of the samples, from the start, that is not judged


def _elder_of(family: str) -> int:
    """Return the slot of the elder: a sender over Unix sockets, and a receiver over TCP."""
    return SLOTS if family.startswith("tcp") else 0


def _without_other_faults(plan: Round) -> Round:
    """Keep the ends of processes; the elder is only closed."""
    elder = _elder_of(plan.family)
    ends = [one for one in plan.of(ENDS) if one.target != elder or one.kind is FaultKind.CLOSE]
    return msgspec.structs.replace(plan, faults=tuple(ends))


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, help="How long there is load.")
@click.option("--seed", type=int, help="Draws the same load again.  [default: another each time]")
def main(seconds: float, seed: int | None) -> None:
    """Send tensors, requests and publications for a long time, and check whether any resource grows.

    The exit status is 1 if a quantity grows, or if a round fails.
    """
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    samples: dict[str, list[dict[str, float]]] = defaultdict(list)

    async def look(family: Family) -> None:
        elder = family.at(_elder_of(family.name))
        samples[family.name].append(_measure(elder.pid, await elder.call(here.tidy)))

    run = asyncio.run(run_for(seed, seconds, change=_without_other_faults, look=look))
    run.print()
    table = Table("family", "quantity", "median", "grew by", "may grow by", "", box=None)
    has_grown = False
    for family, numbers in sorted(samples.items()):
        for name, allowance in _ALLOWED.items():
            found = _growth([sample[name] for sample in numbers])
            if found is None:
                table.add_row(family, name, "", "too few samples", f"{allowance:g}")
                continue
            median, growth = found
            has_grown |= growth > allowance
            verdict = "[bold red]GROWS[/]" if growth > allowance else "[green]flat[/]"
            table.add_row(family, name, f"{median:,.1f}", f"{growth:+,.1f}", f"{allowance:g}", verdict)
    Console(width=120, highlight=False).print(table)
    sys.exit(1 if run.problems or has_grown else 0)


def _measure(pid: int, blocks: int) -> dict[str, float]:
    """Measure a process, whose living objects have a number of memory blocks."""
    return {
        "private memory, MiB": watch.status(pid, "RssAnon") / 1024,
        "shared memory, MiB": watch.status(pid, "RssShmem") / 1024,
        "thousand objects": blocks / 1000,
        "descriptors": watch.descriptors(pid),
        "threads": watch.status(pid, "Threads"),
        "mappings": watch.mappings(pid),
    }


def _growth(numbers: Sequence[float]) -> tuple[float, float] | None:
    """Return the median after the warm-up, and the growth, which is 0 if the quantity only varies.

    Returns None if there are too few samples.
    """
    if len(numbers) < _FEWEST_SAMPLES:
        return None
    numbers = numbers[round(_WARM_UP * len(numbers)) :]
    first, last = numbers[: len(numbers) // 3], numbers[-(len(numbers) // 3) :]
    _, before, highest = statistics.quantiles(first)
    lowest, after, _ = statistics.quantiles(last)
    return statistics.median(numbers), after - before if lowest > highest else 0.0


if __name__ == "__main__":
    main()
