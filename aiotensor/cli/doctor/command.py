"""The options of `aiotensor doctor`. Imports what it looks at only once it runs."""

import sys
from pathlib import Path

import click

from aiotensor.cli.extras import missing_extra

__all__ = ["doctor"]


def _path(_: click.Context, option: click.Parameter, address: str | None) -> Path | None:
    if address is None:
        return None
    from aiotensor.transports.address import socket_path

    try:
        return Path(socket_path(address, "unix"))
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from error


@click.command()
@click.option(
    "--address",
    callback=_path,
    metavar="unix:///PATH",
    help="Where your socket is to be. [default: $XDG_RUNTIME_DIR or the folder for temporary files]",
)
@click.option(
    "--arena-bytes",
    type=click.IntRange(min=1),
    default=1 << 30,
    show_default=True,
    help="The arena_bytes of a sender, to compare with the memory that there is.",
)
@click.option("--json", "as_json", is_flag=True, help="Write a list of JSON objects.")
def doctor(address: Path | None, arena_bytes: int, as_json: bool) -> None:
    """Check what this machine allows, and say what to do.

    Each check is `ok`, a `note` (worth knowing; most things work all the same), or a `problem`
    (something needed is missing). The exit status is 1 if there is a problem, else 0.
    """
    from aiotensor.cli.doctor import report
    from aiotensor.cli.doctor.examine import examine
    from aiotensor.cli.doctor.finding import Status

    findings = examine(arena_bytes, address)
    if as_json:
        click.echo(report.as_json(findings))
    elif sys.stdout.isatty() and not missing_extra("aiotensor doctor", ["rich"], extra="cli"):
        from rich.console import Console

        from aiotensor.cli.doctor.table import as_table

        Console().print(as_table(findings))
    else:
        click.echo(report.as_lines(findings))
    raise SystemExit(1 if any(finding.status is Status.PROBLEM for finding in findings) else 0)
