"""The options of `aiotensor top`."""

import asyncio
import math
import sys
from functools import partial
from importlib.util import find_spec

import click

from aiotensor.cli.top import publishers, report
from aiotensor.cli.words import printable
from aiotensor.errors import AioTensorError
from aiotensor.inspection import Inspection, PublisherInspection, inspect
from aiotensor.transports.address import socket_path

__all__ = ["top"]

_AT_LEAST_S = 0.01
_INTERRUPTED = 130  # the status that shells report for Ctrl-C
_TERMINATED = 143  # and for SIGTERM


def _finite(_: click.Context, option: click.Parameter, seconds: float) -> float:
    # FloatRange accepts nan, because nan is not less than the minimum.
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
@click.option("--json", "as_json", is_flag=True, help="Inspect twice, and write one JSON object.")
@_seconds("--interval", "interval_s", default=1.0, help="Pause between two inspections.")
@_seconds(
    "--patience",
    "patience_s",
    default=0.5,
    help="How long each inspection waits for a receiver, or a sender, that does not answer.",
)
def top(address: str, as_json: bool, interval_s: float, patience_s: float) -> None:
    """Print the usage of resources by a running receiver and its senders, or by a publisher.

    On a terminal it inspects repeatedly, until Ctrl-C; elsewhere once. It changes nothing, and uses no
    place of a sender or subscriber. Only the user of the receiver or publisher may inspect it.
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
    """Return whether standard output is a terminal on which rich can draw."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        return False
    from rich.console import Console

    console = Console()  # without one of these properties it would draw nothing, and report nothing
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal


def _run(address: str, as_json: bool, is_live: bool, interval_s: float, patience_s: float) -> str:
    """Inspect, and return the text to write; never returns if it draws on a terminal."""
    try:
        socket_path(address, "unix")
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'unix:///PATH'") from error
    try:
        if as_json:
            return asyncio.run(_as_json(address, interval_s, patience_s))
        if is_live:
            from aiotensor.cli.top.view import watch  # needs rich

            asyncio.run(watch(address, interval_s, patience_s))
        now = asyncio.run(inspect(address, patience_s=patience_s))
        if isinstance(now, PublisherInspection):
            return publishers.as_lines(address, now)
        return report.as_lines(address, now)
    except AioTensorError as error:
        raise click.ClickException(printable(str(error))) from error
    except OSError as error:
        raise click.ClickException(f"this process cannot look: {error.strerror}") from error


async def _as_json(address: str, interval_s: float, patience_s: float) -> str:
    """Inspect twice, and return the second result with the rates since the first one."""
    before = await inspect(address, patience_s=patience_s)
    await asyncio.sleep(interval_s)
    now = await inspect(address, patience_s=patience_s)
    if isinstance(now, PublisherInspection):
        return publishers.as_json(address, before if isinstance(before, PublisherInspection) else None, now)
    return report.as_json(address, before if isinstance(before, Inspection) else None, now)
