"""The options of `aiotensor top`. Imports what it looks with only once it runs."""

import asyncio
import math
import sys
from functools import partial

import click

from aiotensor.cli.extras import missing_extra

__all__ = ["top"]

_AT_LEAST_S = 0.01
_INTERRUPTED = 130  # what shells say of Ctrl-C
_TERMINATED = 143  # and of SIGTERM


def _finite(_: click.Context, option: click.Parameter, seconds: float) -> float:
    # What is not a number is neither more nor less than the least.
    if not math.isfinite(seconds):
        raise click.BadParameter(f"{seconds} is no number of seconds.", param=option)
    return seconds


_seconds = partial(
    click.option,
    type=click.FloatRange(min=_AT_LEAST_S),
    callback=_finite,
    show_default=True,
    metavar="SECONDS",
)


@click.command()
@click.argument("address", metavar="unix:///PATH")
@click.option("--json", "as_json", is_flag=True, help="Look twice, and write one JSON object.")
@_seconds("--interval", "interval_s", default=1.0, help="Pause between two looks.")
@_seconds(
    "--patience",
    "patience_s",
    default=0.5,
    help="How long each look waits for a receiver, or a sender, that does not answer.",
)
def top(address: str, as_json: bool, interval_s: float, patience_s: float) -> None:
    """Show what a running receiver holds, and each of its senders.

    On a terminal it looks again and again, until Ctrl-C; elsewhere once. It changes nothing, and takes
    nobody's place. Only the user whose receiver it is may look.
    """
    is_live = not as_json and _can_draw()
    try:
        text = _run(address, as_json, is_live, interval_s, patience_s)
    except KeyboardInterrupt:
        raise SystemExit(0 if is_live else _INTERRUPTED) from None
    except asyncio.CancelledError:
        raise SystemExit(_TERMINATED) from None
    click.echo(text)


def _can_draw() -> bool:
    """Say whether standard output is a terminal that can be drawn on, and there is rich, which does that."""
    if not sys.stdout.isatty() or missing_extra("aiotensor top", ["rich"], extra="cli"):
        return False
    from rich.console import Console

    console = Console()  # it draws nothing, and says nothing of that, where one of these is not so
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal


def _run(address: str, as_json: bool, is_live: bool, interval_s: float, patience_s: float) -> str:
    """Look, and return what is to be written; without an end on a terminal, which is drawn on."""
    from aiotensor.cli.top import report
    from aiotensor.cli.top.rates import inspect_twice
    from aiotensor.cli.top.words import printable
    from aiotensor.errors import AioTensorError
    from aiotensor.inspection import inspect
    from aiotensor.transports.address import socket_path

    try:
        socket_path(address, "unix")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'unix:///PATH'") from error
    try:
        if as_json:
            before, now = asyncio.run(inspect_twice(address, interval_s, patience_s))
            return report.as_json(address, before, now)
        if is_live:
            from aiotensor.cli.top.watch import watch

            asyncio.run(watch(address, interval_s, patience_s))
        return report.as_lines(address, asyncio.run(inspect(address, patience_s=patience_s)))
    except AioTensorError as error:
        raise click.ClickException(printable(str(error))) from error
    except OSError as error:
        raise click.ClickException(f"this process cannot look: {error.strerror}") from error
