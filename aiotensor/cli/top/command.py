"""The options of `aiotensor top`."""

import asyncio
import math
import sys
from functools import partial
from importlib.util import find_spec

import click

from aiotensor.cli.addresses import FORMS, refuse_message_server
from aiotensor.cli.keys import HOW_TO_GIVE, Keys, key_options, keys_for, needs_keys
from aiotensor.cli.top import publishers, report
from aiotensor.cli.top.report import Look
from aiotensor.cli.words import printable
from aiotensor.errors import AioTensorError
from aiotensor.inspection import Inspection, PublisherInspection, inspect
from aiotensor.transports.endpoints import TcpArguments, route_to

__all__ = ["top"]

_AT_LEAST_S = 0.01
_INTERRUPTED = 130  # the status that shells report for Ctrl-C
_TERMINATED = 143  # and for SIGTERM


def _finite(_: click.Context, option: click.Parameter, seconds: float) -> float:
    # FloatRange accepts nan, because nan is not less than the minimum.
    if not math.isfinite(seconds):
        raise click.BadParameter(f"{seconds} is not a number of seconds.", param=option)
    return seconds


_seconds = partial(
    click.option,
    type=click.FloatRange(min=_AT_LEAST_S),
    callback=_finite,
    show_default=True,
    metavar="SECONDS",
)


@click.command()
@click.argument("address", metavar=FORMS)
@key_options
@click.option("--json", "as_json", is_flag=True, help="Inspect twice, and write one JSON object.")
@_seconds("--interval", "interval_s", default=1.0, help="Pause between two inspections.")
@_seconds(
    "--patience",
    "patience_s",
    default=0.5,
    help="How long each inspection waits for a receiver, or a sender, that does not answer.",
)
def top(
    address: str,
    server_key: str | None,
    secret_key: str | None,
    as_json: bool,
    interval_s: float,
    patience_s: float,
) -> None:
    """Print the resource usage of a running receiver and its senders, or of a publisher.

    On a terminal, the display is updated until Ctrl-C; otherwise, the usage is printed once. An inspection
    changes nothing, and does not count towards the limits on senders or subscribers. At a unix:// address,
    only the user of the receiver or publisher may inspect it. At a tcp:// address on another machine, its
    client_keys must contain the public key of this side.
    """
    is_live = not as_json and _can_draw()
    keys = keys_for(address, secret_key, server_key)
    _check(address, keys)
    look = partial(inspect, address, patience_s=patience_s, **keys._asdict())
    try:
        text = _run(address, look, as_json, is_live, interval_s)
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

    console = Console()  # without one of these properties, rich draws nothing and raises no error
    return console.is_terminal and console.is_interactive and not console.is_dumb_terminal


def _check(address: str, keys: Keys) -> None:
    """Check an address and the keys for it, without connecting."""
    try:
        refuse_message_server(address)
        if keys.server_key is None and needs_keys(address):
            raise ValueError(f"any machine that reaches {address} could connect. {HOW_TO_GIVE}")
        route_to(address, TcpArguments(True, *keys))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=f"'{FORMS}'") from error


def _run(address: str, look: Look, as_json: bool, is_live: bool, interval_s: float) -> str:
    """Inspect, and return the text to write; in live mode, draw on the terminal and never return."""
    try:
        if as_json:
            return asyncio.run(_as_json(address, look, interval_s))
        if is_live:
            from aiotensor.cli.top.view import watch  # needs rich

            asyncio.run(watch(address, look, interval_s))
        now = asyncio.run(look())
        if isinstance(now, PublisherInspection):
            return publishers.as_lines(address, now)
        return report.as_lines(address, now)
    except AioTensorError as error:
        raise click.ClickException(printable(str(error))) from error
    except OSError as error:
        raise click.ClickException(f"the inspection failed: {error.strerror}") from error


async def _as_json(address: str, look: Look, interval_s: float) -> str:
    """Inspect twice, and return the second result with the rates since the first one."""
    before = await look()
    await asyncio.sleep(interval_s)
    now = await look()
    if isinstance(now, PublisherInspection):
        return publishers.as_json(address, before if isinstance(before, PublisherInspection) else None, now)
    return report.as_json(address, before if isinstance(before, Inspection) else None, now)
