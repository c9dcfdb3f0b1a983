"""The options of `aiotensor top`. Imports what it looks with only once it runs."""

import asyncio
import sys

import click

from aiotensor.cli.extras import missing_extra

__all__ = ["top"]

_AT_LEAST_S = 0.01


@click.command()
@click.argument("address", metavar="unix:///PATH")
@click.option("--json", "as_json", is_flag=True, help="Look twice, and write one JSON object.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=_AT_LEAST_S),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Pause between two looks.",
)
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(min=_AT_LEAST_S),
    default=0.5,
    show_default=True,
    metavar="SECONDS",
    help="How long each look waits for a receiver, or a sender, that does not answer.",
)
def top(address: str, as_json: bool, interval_s: float, patience_s: float) -> None:
    """Show what a running receiver holds, and each of its senders.

    On a terminal it looks again and again, until Ctrl-C; elsewhere once. It changes nothing, and takes
    nobody's place. Only the user whose receiver it is may look.
    """
    try:
        _run(address, as_json, interval_s, patience_s)
    except KeyboardInterrupt:
        raise SystemExit(0) from None


def _run(address: str, as_json: bool, interval_s: float, patience_s: float) -> None:
    from aiotensor.cli.top import report
    from aiotensor.cli.top.rates import inspect_twice
    from aiotensor.errors import AioTensorError
    from aiotensor.inspection import inspect
    from aiotensor.links.unix import path_of

    try:
        path_of(address)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="'unix:///PATH'") from error
    try:
        if as_json:
            before, now = asyncio.run(inspect_twice(address, interval_s, patience_s))
            click.echo(report.as_json(address, before, now))
        elif sys.stdout.isatty() and not missing_extra("aiotensor top", ["rich"], extra="cli"):
            from aiotensor.cli.top.watch import watch

            asyncio.run(watch(address, interval_s, patience_s))
        else:
            click.echo(report.as_lines(address, asyncio.run(inspect(address, patience_s=patience_s))))
    except AioTensorError as error:
        raise click.ClickException(str(error)) from error
