"""The checks of `aiotensor doctor`: software, an address, and limits of this process and its container.

Each check returns a `Finding` that a user can act on.
"""

import asyncio
import errno
import os
import platform
import re
import secrets
import shlex
import socket
import stat
from collections.abc import Iterator
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit
from typing import NamedTuple

import zmq

from aiotensor import __version__
from aiotensor.cli.options import HOW_TO_GIVE, Keys, is_port
from aiotensor.cli.words import in_words, printable
from aiotensor.errors import AccessDeniedError, AioTensorError, PeerLostError
from aiotensor.inspection import inspect
from aiotensor.transports.address import TcpAddress, socket_path, tcp_address

_CONNECT_S = 2.0
_ANSWER_S = 5.0
_BESIDE_ARENA = 512 << 20  # the memory of two processes that have imported torch
_FEW_DESCRIPTORS = 64
_ACCEPTS = "00010000"  # the flags of a listening socket in /proc/net/unix
_UNLIMITED = 1 << 60  # cgroup v1 expresses "no limit" as a number of about this size or more
_ANOTHER = "choose another path"
_OTHERWISE = "Choose another path"
_SMALLER = "use a smaller arena_bytes; each sender, client, server and publisher has its own"


class Status(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"  # a limitation; most functions work nevertheless
    PROBLEM = "problem"  # a requirement is not met


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        status: the severity.
        found: the result, as a phrase without a full stop.
        advice: the remedy, as a sentence without a full stop; None if none is needed.
    """

    status: Status
    found: str
    advice: str | None = None


def examine(
    address: str | None, keys: Keys, arena_bytes: int, subscribers: int
) -> Iterator[tuple[str, Finding]]:
    """Yield the names of the checks, which do not change between versions, and the findings.

    Args:
        address: a valid address; None for the usual folder for sockets.
        keys: the keys for the address.
        arena_bytes: the maximum shared memory of one object, in bytes.
        subscribers: the number of subscribers of one publisher.
    """
    yield "software", software()
    if address is None:
        folder = os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
        yield "socket folder", socket_folder(Path(folder), asked_for=False)
    elif is_port(address):
        yield from _examine_port(address, keys)
    else:
        path = Path(socket_path(address))
        yield "socket folder", socket_folder(path.parent)
        finding, is_in_use = socket_file(path)
        yield "socket file", finding
        if is_in_use:
            yield "listener", _listener(address, keys)
    yield "memory", memory(arena_bytes)
    yield "container", container(arena_bytes)
    yield "open files", open_files(*getrlimit(RLIMIT_NOFILE), subscribers)
    yield "huge pages", huge_pages()


def software() -> Finding:
    """Report the versions of the software in one line."""
    found = f"aiotensor {__version__}, Python {platform.python_version()}"
    try:
        return Finding(Status.OK, f"{found}, torch {version('torch')}")
    except PackageNotFoundError:
        return Finding(Status.PROBLEM, f"{found}, but no torch", "Install it: pip install torch")


# Unix sockets


def socket_folder(folder: Path, *, asked_for: bool = True) -> Finding:
    """Check that this user can make sockets in a folder, and that no other user can replace them.

    Makes a socket with a random name, and removes it.

    Args:
        folder: the folder to check.
        asked_for: whether the user named the folder, so that a failure is a problem and not only a note.
    """
    bad = Status.PROBLEM if asked_for else Status.NOTE
    place = shlex.quote(str(folder))
    try:
        facts = folder.stat()
    except FileNotFoundError:
        return Finding(bad, f"{folder} does not exist", f"Create it: mkdir -p -m 700 {place}, or {_ANOTHER}")
    except OSError as error:
        return Finding(bad, f"{folder} cannot be examined: {error.strerror or error}", _OTHERWISE)
    if not stat.S_ISDIR(facts.st_mode):
        return Finding(bad, f"{folder} is not a folder", _OTHERWISE)
    try:
        _make_a_socket(folder)
    except OSError as error:
        found = f"no socket can be created in {folder}: {error.strerror or error}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return Finding(bad, found, f"Make it writable for this user, or {_ANOTHER}")
        # Folders that a virtual machine shares with its host often do not support sockets.
        return Finding(bad, found, f"Not every file system supports sockets: {_ANOTHER}")
    if facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
        found = f"{folder} is writable by all users, who could replace a socket there"
        return Finding(Status.NOTE, found, f"Restrict it: chmod o-w {place}, or {_ANOTHER}")
    if facts.st_uid not in (os.geteuid(), 0):
        found = f"{folder} belongs to user {facts.st_uid}, who could replace a socket there"
        return Finding(Status.NOTE, found, f"Use a folder of your own: {_ANOTHER}")
    return Finding(Status.OK, f"this user can create sockets in {folder}")


def _make_a_socket(folder: Path) -> None:
    """Bind a socket in a folder and remove it; the path of the folder may have any length."""
    name = f".aiotensor-doctor-{secrets.token_hex(4)}"
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind(f"/proc/self/fd/{descriptor}/{name}")
            os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def socket_file(path: Path) -> tuple[Finding, bool]:
    """Check the file at the path of a socket; return also whether a process has that socket open."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if _is_bound(path):
            found = f"a process listens at {path}, but its socket file was removed, so no other can connect"
            return Finding(Status.PROBLEM, found, "Restart it"), False
        return Finding(Status.OK, f"nothing exists at {path} yet"), False
    except OSError as error:
        found = f"{path} cannot be examined: {error.strerror or error}"
        return Finding(Status.PROBLEM, found, _OTHERWISE), False
    if not stat.S_ISSOCK(facts.st_mode):
        found = f"{path} exists and is not a socket"
        return Finding(Status.PROBLEM, found, f"Move it away, or {_ANOTHER}"), False
    if facts.st_uid != os.geteuid():
        found = f"{path} is a socket of user {facts.st_uid}, and only the same user may connect"
        return Finding(Status.PROBLEM, found, f"Run as that user, or {_ANOTHER}"), False
    # A datagram socket cannot connect to a socket of another type: the kernel raises EPROTOTYPE if a process
    # has that socket open, and ECONNREFUSED otherwise.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        error_number = probe.connect_ex(str(path))
    if error_number == errno.ECONNREFUSED:
        found = f"{path} was left by a process that has ended; the next one takes it over"
        return Finding(Status.OK, found), False
    return Finding(Status.OK, f"{path} is in use by a process of this user"), True


def _is_bound(path: Path) -> bool:
    """Return whether a process in this network namespace listens at a path, even if its file was removed."""
    lines = _read(Path("/proc/net/unix")).splitlines()
    return any(line.endswith(f" {path}") and f" {_ACCEPTS} " in line for line in lines)


# Ports


def _examine_port(text: str, keys: Keys) -> Iterator[tuple[str, Finding]]:
    """Yield the findings about a ``tcp://`` address."""
    address = tcp_address(text, has_keys=True, connects=True)
    found = _keys(address, keys)
    yield "keys", found
    try:
        places = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = f"{address.host} cannot be resolved: {error.strerror or error}"
        advice = "Check the name, /etc/hosts and /etc/resolv.conf, or write the numeric address"
        yield "host", Finding(Status.PROBLEM, reason, advice)
        return
    numbers = ", ".join(str(place[0]) for *_, place in places)
    yield "host", Finding(Status.OK, numbers if numbers == address.host else f"{address.host} is {numbers}")
    place = f"{address.host} port {address.port}"
    try:
        with socket.create_connection((address.host, address.port), _CONNECT_S):
            pass
    except OSError as error:  # which a timeout is, too, without a number
        reason = os.strerror(error.errno) if error.errno else f"no answer for {_CONNECT_S:g} s"
        advice = "Start the process that listens there, or check the address, the routes and the firewalls"
        yield "port", Finding(Status.PROBLEM, f"no process accepts connections at {place}: {reason}", advice)
        return
    yield "port", Finding(Status.OK, f"a process accepts connections at {place}")
    if found.status is Status.OK:
        yield "listener", _listener(text, keys)


def _keys(address: TcpAddress, keys: Keys) -> Finding:
    """Check that there are keys if an address needs them; report the public key of this side."""
    if keys.secret_key is not None:
        public = zmq.curve_public(keys.secret_key.encode()).decode()
        return Finding(Status.OK, f"the public key of this side, for client_keys of the other, is {public}")
    if address.is_local:
        return Finding(Status.OK, f"none needed: only this machine can reach {address.host}")
    found = f"none, but other machines can reach {address.host}: only 127.0.0.1, ::1 and localhost need none"
    return Finding(Status.PROBLEM, found, HOW_TO_GIVE)


def _listener(address: str, keys: Keys) -> Finding:
    """Inspect the process at an address: its kind, and whether it accepts this user and these keys."""
    try:
        seen = asyncio.run(inspect(address, patience_s=_ANSWER_S, **keys._asdict()))
    except AccessDeniedError as error:
        advice = HOW_TO_GIVE if is_port(address) else "Run as the user of that process"
        return Finding(Status.PROBLEM, printable(str(error)), advice)
    except PeerLostError as error:
        advice = (
            "Check that it is a process of aiotensor, that it is not stopped, and that both sides use keys"
        )
        return Finding(Status.PROBLEM, printable(str(error)), advice)
    except AioTensorError as error:
        advice = "Check the address, and use the same version of aiotensor on both sides"
        return Finding(Status.PROBLEM, printable(str(error)), advice)
    except OSError as error:
        return Finding(Status.NOTE, f"the inspection failed: {error.strerror}", "Try again")
    return Finding(Status.OK, f"a {seen.kind} (pid {seen.pid}) answers")


# Limits. None of these checks reports a problem, because no process needs them at startup.


def memory(arena_bytes: int, root: Path = Path("/")) -> Finding:
    """Compare the available memory of the machine with an arena."""
    line = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    if line is None:
        return Finding(Status.NOTE, "/proc/meminfo does not report the available memory", "Mount /proc")
    available = int(line[1]) * 1024
    found = f"{in_words(available)} available"
    if available >= arena_bytes:
        return Finding(Status.OK, f"{found}, enough for an arena of {in_words(arena_bytes)}")
    return Finding(
        Status.NOTE,
        f"{found}, too little for an arena of {in_words(arena_bytes)}",
        f"Stop other processes that use memory, or {_SMALLER}",
    )


def container(arena_bytes: int, root: Path = Path("/")) -> Finding:
    """Compare the memory limit of this process's control group, v1 or v2, with an arena.

    The memory in use is not subtracted, because it may belong to the senders for which the check is made.
    """
    limit, file = min(_memory_limits(root), default=(None, ""))
    if limit is None:
        return Finding(Status.OK, "no memory limit")
    found = f"a memory limit of {in_words(limit)} ({file})"
    if limit >= arena_bytes + _BESIDE_ARENA:
        return Finding(Status.OK, f"{found}, enough for an arena of {in_words(arena_bytes)}")
    return Finding(
        Status.NOTE,
        f"{found}, too little for an arena of {in_words(arena_bytes)} and the processes",
        "Raise it (docker run --memory, MemoryMax= of systemd), or the kernel kills a process at the limit "
        f"without an OSError. Or {_SMALLER}",
    )


def _memory_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Yield the memory limits in bytes of the control group of this process and the groups above it.

    In a container, a group may be visible only as the topmost one, without its path.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers:
            mounted, name = "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mounted, name = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        inside = PurePosixPath(group.lstrip("/"))
        for folder in (inside, *inside.parents):
            file = PurePosixPath("/", mounted, folder, name)
            limit = _read(root / file.relative_to("/")).strip()
            if limit.isdecimal() and int(limit) < _UNLIMITED:  # otherwise "max", or no such file
                yield int(limit), str(file)


def open_files(soft: int, hard: int, subscribers: int) -> Finding:
    """Compare the limits on open descriptors (RLIMIT_NOFILE) with the subscribers of a publisher.

    Each subscriber needs two descriptors: its connection, and the pipe that shows when it unmaps the arena.
    """
    needed = _FEW_DESCRIPTORS + 2 * subscribers
    if soft == RLIM_INFINITY or soft >= needed:
        return Finding(Status.OK, f"enough descriptors for {subscribers} subscribers of one publisher")
    advice = (
        f"Raise the limit where the process is started: ulimit -n {max(needed, 1024)} (LimitNOFILE= of "
        "systemd, docker run --ulimit nofile=1024), or lower max_subscribers"
    )
    if hard != RLIM_INFINITY and hard < needed:
        advice += f"; an administrator has to raise the hard limit of {hard} first"
    found = f"at most {soft} descriptors, but {subscribers} subscribers of one publisher need {needed}"
    return Finding(Status.NOTE, found, advice)


def huge_pages(root: Path = Path("/")) -> Finding:
    """Report whether the kernel may use huge pages for shared memory."""
    chosen = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    setting = f'"{chosen[1]}"' if chosen else "not supported by this kernel"
    return Finding(Status.OK, f"shmem_enabled is {setting}; for your information only")


def _read(file: Path) -> str:
    """Return the text of a file in /proc or /sys; "" if it cannot be read."""
    try:
        return file.read_text(errors="backslashreplace")
    except (OSError, ValueError):  # a path from /proc may be invalid
        return ""
