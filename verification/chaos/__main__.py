"""The command line: `python -m verification.chaos`."""

import asyncio
import os
import random
import sys

import click

from verification.chaos.plan import FAMILIES
from verification.chaos.report import Run
from verification.chaos.run import run_for


def _parse_rounds(context: click.Context, parameter: click.Parameter, text: str | None) -> range | None:
    if text is None:
        return None
    first, _, last = text.partition(":")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise click.BadParameter(f"write A or A:B, got {text!r}") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seconds", type=float, default=600.0, help="For how long rounds are begun.")
@click.option("--seed", type=int, help="What the rounds are planned from.  [default: a random one]")
@click.option("--rounds", callback=_parse_rounds, help="Only round A, or rounds A:B, of that seed.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, help="So many times, with --rounds.")
@click.option("--family", type=click.Choice(list(FAMILIES)), help="Only rounds of this family.")
def main(seconds: float, seed: int | None, rounds: range | None, repeat: int, family: str | None) -> None:
    """Send tensors while processes are killed, stopped and starved, and account for every one of them."""
    if seed is None:
        seed = int(os.environ.get("AIOTENSOR_SEED") or random.SystemRandom().getrandbits(32))
    result: Run = asyncio.run(run_for(seed, seconds, rounds, repeat, [family] if family else []))
    result.print()
    sys.exit(1 if result.problems else 0)


if __name__ == "__main__":
    main()
