"""The options of `aiotensor doctor`, and the checks in the order in which they are shown."""

import asyncio
import multiprocessing
import platform
import resource
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import click

from aiotensor.cli.addresses import FORMS, refuse_message_server
from aiotensor.cli.doctor import folder, kernel, memory, software
from aiotensor.cli.doctor.finding import Finding, Status, as_json, as_line, as_row, colored_verdict, verdict
from aiotensor.cli.keys import Keys, key_options, keys_for, needs_keys

__all__ = ["doctor"]


class _Place(NamedTuple):
    """The parsed address of a receiver or a publisher.

    Attributes:
        socket: the path of a socket; None for the usual folder for sockets, and with a port.
        makes_folder: whether an engine creates the folder of the socket.
        port: the address with a host and a port; None for others.
    """

    socket: Path | None = None
    makes_folder: bool = False
    port: str | None = None


def _place(_: click.Context, option: click.Parameter, address: str | None) -> _Place:
    """Parse the address."""
    if address is None:
        return _Place()
    try:
        if address.lower().startswith("tcp:"):
            needs_keys(address)
            return _Place(port=address)
        refuse_message_server(address)
        # Imported only here: the checks do not need it.
        from aiotensor.transports.address import is_folder, socket_path

        return _Place(Path(socket_path(address, "unix")), is_folder(address))
    except ValueError as error:
        raise click.BadParameter(str(error), param=option) from error


@click.command()
@click.option(
    "--address",
    "place",
    callback=_place,
    metavar=FORMS,
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
    place: _Place,
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
    the name of the host, connects to the port, and inspects the process there. It is a problem if none
    listens.
    """
    keys = keys_for(place.port, secret_key, server_key)
    show = None if as_objects else _writer()
    findings: dict[str, Finding] = {}
    for check, finding in _examine(arena_bytes, subscribers, place, keys):
        findings[check] = finding
        if show is not None:
            show.finding(check, finding)
    if show is None:
        click.echo(as_json(findings))
    else:
        show.verdict(findings.values())
    raise SystemExit(1 if any(finding.status is Status.PROBLEM for finding in findings.values()) else 0)


class _Lines:
    """Print each finding as one line, for files and pipes."""

    def finding(self, check: str, finding: Finding) -> None:
        click.echo(as_line(check, finding))

    def verdict(self, findings: Iterable[Finding]) -> None:
        click.echo(verdict(findings))


class _Rows:
    """Print each finding as a row of a table, on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console()

    def finding(self, check: str, finding: Finding) -> None:
        self._console.print(as_row(check, finding))

    def verdict(self, findings: Iterable[Finding]) -> None:
        self._console.print()
        self._console.print(colored_verdict(findings))


def _writer() -> _Lines | _Rows:
    return _Rows() if sys.stdout.isatty() and find_spec("rich") is not None else _Lines()


def _examine(arena_bytes: int, subscribers: int, place: _Place, keys: Keys) -> Iterator[tuple[str, Finding]]:
    """Yield the names of the checks, which do not change between versions, and the findings.

    The checks that import torch come last, because that takes seconds.
    """
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    socket, makes_folder, port = place
    parent = folder.default_folder() if socket is None else socket.parent
    yield "kernel", kernel.kernel(platform.system(), platform.release())
    yield "shared memory", kernel.shared_memory()
    yield "unix sockets", kernel.unix_sockets()
    yield "process ends", kernel.process_ends()
    yield "copied pages", kernel.copied_pages()
    yield "socket folder", folder.socket_folder(parent, asked_for=socket is not None, is_created=makes_folder)
    if socket is not None:
        yield "socket file", folder.socket_file(socket)
    if port is not None:
        yield from _examine_port(port, keys).items()
    yield "memory", memory.available_memory(arena_bytes)
    yield "memory cgroup", memory.cgroup_limit(arena_bytes)
    yield "commit limit", memory.commit_limit(arena_bytes)
    yield "open files", memory.open_files(files, most_files)
    yield "subscribers", memory.subscribers(files, subscribers)
    yield "/dev/shm", memory.dev_shm()  # noqa: S108 - a name
    yield "huge pages", memory.huge_pages()
    yield "start method", software.start_method(multiprocessing.get_all_start_methods())
    yield "uvloop", software.event_loop()
    yield "torch", software.torch_version()
    yield "CUDA", software.cuda()
    # Last, because the mappings of torch use some of the addresses.
    limits = memory.process_limits(arena_bytes, address_space, memory.mapped_bytes(), file_size)
    yield "process limits", limits


def _examine_port(address: str, keys: Keys) -> dict[str, Finding]:
    from aiotensor.cli.doctor.network import examine  # needs the rest of the library

    return asyncio.run(examine(address, keys))
