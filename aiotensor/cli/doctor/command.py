"""The options of `aiotensor doctor`, and the checks in the order in which they are shown."""

import asyncio
import multiprocessing
import platform
import resource
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import click

from aiotensor.cli.doctor import folder, kernel, memory, software
from aiotensor.cli.doctor.finding import Finding, Status, as_json, as_lines, as_table
from aiotensor.cli.keys import Keys, key_options, keys_for, needs_keys

__all__ = ["doctor"]


def _checked(_: click.Context, option: click.Parameter, address: str | None) -> Path | str | None:
    """Return the path of a socket, or a ``tcp://`` address."""
    if address is None:
        return None
    try:
        if address.lower().startswith("tcp:"):
            needs_keys(address)
            return address
        from aiotensor.transports.address import socket_path  # imported only here: the checks do not need it

        return Path(socket_path(address, "unix"))
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from error


@click.command()
@click.option(
    "--address",
    callback=_checked,
    metavar="unix:///PATH|tcp://HOST:PORT",
    help="Address of your receiver or publisher. [default: a socket in $XDG_RUNTIME_DIR or in the folder "
    "for temporary files]",
)
@key_options
@click.option(
    "--arena-bytes",
    type=click.IntRange(min=1),
    default=1 << 30,
    show_default=True,
    help="The arena_bytes of a sender or publisher, to compare with the available memory.",
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
    address: Path | str | None,
    server_key: str | None,
    secret_key: str | None,
    arena_bytes: int,
    subscribers: int,
    as_objects: bool,
) -> None:
    """Check whether this machine meets the requirements of aiotensor, and print advice.

    Each check is `ok`, a `note` (a limitation; most functions work nevertheless), or a
    `problem` (a requirement is not met). The exit status is 1 if there is a problem, else 0.

    With a tcp:// address of a receiver or publisher, on this or another machine, the command also resolves
    the name of the host, connects to the port, and inspects the process there.
    """
    socket, port = (address, None) if isinstance(address, Path) else (None, address)
    keys = keys_for(port, secret_key, server_key)
    findings = _examine(arena_bytes, subscribers, socket, {} if port is None else _examine_port(port, keys))
    if as_objects:
        click.echo(as_json(findings))
    elif sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console

        Console().print(as_table(findings))
    else:
        click.echo(as_lines(findings))
    raise SystemExit(1 if any(finding.status is Status.PROBLEM for finding in findings.values()) else 0)


def _examine(
    arena_bytes: int, subscribers: int, socket: Path | None, of_port: Mapping[str, Finding]
) -> dict[str, Finding]:
    """Return the findings by the names of the checks, which do not change between versions."""
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    parent = folder.default_folder() if socket is None else socket.parent
    return {
        "kernel": kernel.kernel(platform.system(), platform.release()),
        "shared memory": kernel.shared_memory(),
        "unix sockets": kernel.unix_sockets(),
        "process ends": kernel.process_ends(),
        "copied pages": kernel.copied_pages(),
        "socket folder": folder.socket_folder(parent, asked_for=socket is not None),
        **({} if socket is None else {"socket file": folder.socket_file(socket)}),
        **of_port,
        "memory": memory.available_memory(arena_bytes),
        "memory cgroup": memory.cgroup_limit(arena_bytes),
        "process limits": memory.process_limits(arena_bytes, address_space, memory.mapped_bytes(), file_size),
        "commit limit": memory.commit_limit(arena_bytes),
        "open files": memory.open_files(files, most_files),
        "subscribers": memory.subscribers(files, subscribers),
        "torch": software.torch_version(),
        "CUDA": software.cuda(),
        "start method": software.start_method(multiprocessing.get_all_start_methods()),
        "uvloop": software.event_loop(),
        "NIXL": software.nixl(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        "/dev/shm": memory.dev_shm(),  # noqa: S108 - a name
        "huge pages": memory.huge_pages(),
    }


def _examine_port(address: str, keys: Keys) -> dict[str, Finding]:
    from aiotensor.cli.doctor.network import examine  # needs the rest of the library

    return asyncio.run(examine(address, keys))
