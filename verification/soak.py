"""A long load, during which no resource may grow: `python -m verification.soak`.

The load consists of the rounds of `verification.chaos` in which processes only start, close their objects and
are killed. One process of each family lives for the whole run.
"""

import asyncio
import secrets
import sys

import click
from rich.console import Console
from rich.table import Table

from verification.chaos.growth import ALLOWED, grows, trend
from verification.chaos.report import Run
from verification.chaos.run import run_for

_FAMILIES = ("server", "tcp engine", "asking", "tcp answering", "publisher", "tcp subscriber")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, help="How long there is load.")
@click.option("--seed", type=int, help="Draws the same load again.  [default: another each time]")
def main(seconds: float, seed: int | None) -> None:
    """Send tensors, requests and publications for a long time, and check whether any resource grows.

    The exit status is 1 if a quantity grows, or if a round fails.
    """
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    run = asyncio.run(run_for(seed, seconds, None, 1, _FAMILIES, is_soak=True))
    run.print()
    Console(width=120, highlight=False).print(_table(run))
    sys.exit(1 if run.problems else 0)


def _table(run: Run) -> Table:
    table = Table("family", "quantity", box=None)
    for heading in ("median", "grew by (99 %)", "may grow by", ""):
        table.add_column(heading, justify="right")
    for family, samples in run.samples.items():
        for name, allowance in ALLOWED.items():
            found = trend(samples, name)
            if found is None:
                table.add_row(family, name, "", "too few samples", f"{allowance:g}")
                continue
            growth = f"{found.growth:+,.1f} ({found.least:+,.1f} to {found.most:+,.1f})"
            verdict = "[bold red]GROWS[/]" if grows(found, allowance) else "[green]flat[/]"
            table.add_row(family, name, f"{found.level:,.1f}", growth, f"{allowance:g}", verdict)
    return table


if __name__ == "__main__":
    main()
