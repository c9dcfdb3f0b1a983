"""The `aiotensor` command: the arguments of its subcommands, their output and their exit status."""

import asyncio
import json
import math
import os
import sys
from functools import partial
from pathlib import Path

import click

from aiotensor import __version__
from aiotensor.cli.doctor import Finding, Status, examine
from aiotensor.cli.options import (
    FORMS,
    HOW_TO_GIVE,
    Keys,
    check_keys,
    keys_option,
    needs_keys,
    valid_address,
    write_keys,
)
from aiotensor.cli.top import Look, as_json, as_lines, watch
from aiotensor.cli.words import printable
from aiotensor.errors import AioTensorError
from aiotensor.inspection import inspect

_COLORS = {Status.OK: "green", Status.NOTE: "yellow", Status.PROBLEM: "red"}
_INTERRUPTED = 130  # the status that shells report for Ctrl-C
_TERMINATED = 143  # and for SIGTERM


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def aiotensor() -> None:
    """Check this machine, inspect running receivers, servers and publishers, and create keys."""


# The doctor


@aiotensor.command()
@click.option(
    "--address",
    callback=valid_address,
    metavar=FORMS,
    help="Address of your receiver, server or publisher. [default: a socket in $XDG_RUNTIME_DIR or in the "
    "folder for temporary files]",
)
@keys_option
@click.option(
    "--arena-bytes",
    type=click.IntRange(min=1),
    default=1 << 30,
    show_default=True,
    help="The arena_bytes of a sender, client or publisher, to compare with the available memory.",
)
@click.option(
    "--subscribers",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="The number of subscribers of a publisher, to compare with the limit on open files.",
)
@click.option("--json", "as_objects", is_flag=True, help="Write a list of JSON objects.")
def doctor(
    address: str | None,
    keys: Keys,
    arena_bytes: int,
    subscribers: int,
    as_objects: bool,
) -> None:
    """Check what a process of aiotensor needs on this machine, and print advice.

    Each check is `ok`, a `note` (a limitation; most functions work nevertheless), or a
    `problem` (a requirement is not met). The exit status is 1 if there is a problem, else 0.

    With an address, the command also inspects the process that listens there. At a tcp:// address, on this
    or another machine, it is a problem if none listens.
    """
    findings: dict[str, Finding] = {}
    check_keys(address, keys)
    for check, finding in examine(address, keys, arena_bytes, subscribers):
        findings[check] = finding
        if not as_objects:
            status = click.style(f"{finding.status:<7}", fg=_COLORS[finding.status])
            advice = f". {finding.advice}" if finding.advice else ""
            click.echo(f"{status}  {check}: {finding.found}{advice}")
    statuses = [finding.status for finding in findings.values()]
    problems, notes = statuses.count(Status.PROBLEM), statuses.count(Status.NOTE)
    if as_objects:
        objects = [{"check": check, **finding._asdict()} for check, finding in findings.items()]
        click.echo(json.dumps(objects, indent=2))
    else:
        verdict = "some requirements are not met" if problems else "all requirements are met"
        click.echo(f"{verdict}; problems: {problems}, notes: {notes}")
    raise SystemExit(1 if problems else 0)


# Inspections


def _finite(_: click.Context, option: click.Parameter, seconds: float) -> float:
    # FloatRange accepts nan, because nan is not less than the minimum.
    if not math.isfinite(seconds):
        raise click.BadParameter(f"{seconds} is not a number of seconds.", param=option)
    return seconds


_seconds = partial(
    click.option, type=click.FloatRange(min=0.01), callback=_finite, show_default=True, metavar="SECONDS"
)


@aiotensor.command()
@click.argument("address", callback=valid_address, metavar=FORMS)
@keys_option
@click.option("--json", "as_object", is_flag=True, help="Inspect twice, and write one JSON object.")
@_seconds("--interval", "interval_s", default=1.0, help="Pause between two inspections.")
@_seconds("--patience", "patience_s", default=0.5, help="How long each inspection waits for an answer.")
def top(
    address: str,
    keys: Keys,
    as_object: bool,
    interval_s: float,
    patience_s: float,
) -> None:
    """Print the statistics of a running receiver, server or publisher, and of its senders or subscribers.

    On a terminal, the display is updated until Ctrl-C; otherwise, the usage is printed once. An inspection
    changes nothing, and does not count towards the limits on connections. At a unix:// address, only the
    user of the process may inspect it. At a tcp:// address on another machine, its client_keys must contain
    the public key of this side.
    """
    check_keys(address, keys)
    if keys.server_key is None and needs_keys(address):
        raise click.UsageError(f"any machine that reaches {address} could connect. {HOW_TO_GIVE}")
    is_live = not as_object and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    look = partial(inspect, address, patience_s=patience_s, **keys._asdict())
    try:
        if is_live:
            asyncio.run(watch(address, look, interval_s))
        text = asyncio.run(_inspected(address, look, interval_s, as_object=as_object))
    except AioTensorError as error:
        raise click.ClickException(printable(str(error))) from error
    except OSError as error:
        raise click.ClickException(f"the inspection failed: {error.strerror}") from error
    except KeyboardInterrupt:
        raise SystemExit(0 if is_live else _INTERRUPTED) from None
    except asyncio.CancelledError:
        raise SystemExit(_TERMINATED) from None
    click.echo(text)


async def _inspected(address: str, look: Look, interval_s: float, *, as_object: bool) -> str:
    now = await look()
    if not as_object:
        return "\n".join(as_lines(address, None, now))
    await asyncio.sleep(interval_s)
    return as_json(address, now, await look())


# Keys


@aiotensor.command("keys")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1, metavar="[NAME]...")
def make_keys(folder: Path, names: tuple[str, ...]) -> None:
    """Create keys for tcp:// addresses, in a new FOLDER.

    The file engine.json is for the side that listens. Each NAME is a side that connects to it, and gets a
    file; by default, there is one, api.json. Each file is a JSON object with the arguments of its side:
    secret_key and client_keys, or secret_key and server_key. Only this user can read the files.
    """
    try:
        write_keys(folder, names or ("api",))
    except FileExistsError as error:
        raise click.ClickException(
            f"{error.filename} exists; its keys may be in use, so they are not replaced"
        ) from error
    except OSError as error:
        raise click.ClickException(f"{error.filename} cannot be created: {error.strerror}") from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
