"""The command line: `python -m verification.chaos`."""

import asyncio
import random
import sys

import click

from verification.chaos.plan import FAMILIES
from verification.chaos.run import run_for


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seconds", type=float, default=600.0, help="For how long rounds are begun.")
@click.option("--seed", type=int, help="What the rounds are planned from.  [default: a random one]")
@click.option("--round", "number", type=click.IntRange(min=0), help="Repeat only this round of the seed.")
@click.option("--family", type=click.Choice(list(FAMILIES)), help="Only rounds of this family.")
def main(seconds: float, seed: int | None, number: int | None, family: str | None) -> None:
    """Send tensors while processes are killed, stopped and starved, and account for every one of them."""
    seed = random.SystemRandom().getrandbits(32) if seed is None else seed
    run = asyncio.run(run_for(seed, seconds, family, number))
    run.print()
    sys.exit(1 if run.problems else 0)


if __name__ == "__main__":
    main()
