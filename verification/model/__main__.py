"""The command line: `python -m verification.model`."""

import gc
import random
import sys
import time

import click
import torch

from verification.model.machines import MACHINES
from verification.model.run import SEQUENCES, run_for
from verification.places import LINKS


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--seconds", type=float, default=600.0, help="For how long rounds are begun.")
@click.option("--seed", type=int, help="The source of all sequences.  [default: a random one]")
@click.option("--link", type=click.Choice(list(LINKS)), help="The only link.  [default: all of them in turn]")
@click.option("--round", "only", type=click.IntRange(min=0), help="Run only this round of the seed.")
def main(seconds: float, seed: int | None, link: str | None, only: int | None) -> None:
    """Run random sequences of operations beside a model of the protocol, and compare the two.

    The exit status is 1 if they differ: the output ends with a short sequence that shows the difference, and
    with the command that repeats it.
    """
    if seed is None:
        seed = random.SystemRandom().getrandbits(32)
    click.echo(f"seed {seed}")
    torch.set_num_threads(1)  # threads that spin while they wait for each other slow down a busy machine
    gc.collect()
    gc.freeze()  # each sequence collects garbage, which takes long with all imported modules
    began = time.monotonic()
    machines = {name: machine for name, machine in MACHINES.items() if link in (None, machine.link)}
    run = run_for(machines, seed, seconds, only)
    click.echo(f"rounds of up to {SEQUENCES} sequences: {run.rounds}, in {time.monotonic() - began:.0f} s")
    if run.failed is not None:
        click.echo(f"\nWRONG in round {run.failed}:\n{run.failure}")
        of_link = "" if link is None else f" --link {link}"
        click.echo(f"to repeat it: python -m verification.model --seed {seed}{of_link} --round {run.failed}")
        sys.exit(1)


if __name__ == "__main__":
    main()
