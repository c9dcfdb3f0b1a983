"""Where a Unix socket is to be: its folder, the length of its path, and what is there already."""

import errno
import os
import secrets
import shlex
import socket
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from aiotensor.cli.doctor.finding import Finding, Status

__all__ = ["default_folder", "socket_file", "socket_folder"]

_LONGEST_PATH = 107  # sun_path has 108 bytes, the last of which is zero
_ANOTHER = "choose another path"


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where sockets usually are: the user's own folder, or the one for temporary files."""
    if folder := environment.get("XDG_RUNTIME_DIR"):
        return Path(folder)
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # it tries to write, and found no place
        return Path("/tmp")  # noqa: S108 - nothing but a socket that is removed at once


def socket_folder(folder: Path, *, asked_for: bool) -> Finding:
    """Check that this user can make sockets in a folder, and that nobody else can take them away.

    Makes one, under a name of its own, and removes it.

    Args:
        folder: the folder to look at.
        asked_for: whether the user named it. If so it is needed, and else somewhere else will do.
    """
    bad = Status.PROBLEM if asked_for else Status.NOTE
    place = shlex.quote(str(folder))
    try:
        facts = folder.stat()
    except FileNotFoundError:
        advice = f"Make it: mkdir -p -m 700 {place}, or {_ANOTHER}"
        return Finding("socket folder", bad, f"{folder} does not exist", advice)
    except OSError as error:
        found = f"{folder} cannot be looked at: {error.strerror or error}"
        return Finding("socket folder", bad, found, _sentence(_ANOTHER))
    if not stat.S_ISDIR(facts.st_mode):
        return Finding("socket folder", bad, f"{folder} is no folder", _sentence(_ANOTHER))
    try:
        _make_a_socket(folder)
    except OSError as error:
        found = f"no socket can be made in {folder}: {error.strerror or error}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = f"Make it writable for this user, or {_ANOTHER}"
        else:  # folders that a virtual machine shares with its host often have none
            advice = f"Not every file system has sockets: {_ANOTHER}"
        return Finding("socket folder", bad, found, advice)
    if facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
        found = f"{folder} is writable by everybody, who may replace a socket there"
        return Finding("socket folder", Status.NOTE, found, f"Close it: chmod o-w {place}, or {_ANOTHER}")
    if facts.st_uid not in (os.geteuid(), 0):
        found = f"{folder} belongs to user {facts.st_uid}, who may replace a socket there"
        return Finding("socket folder", Status.NOTE, found, f"Use one of your own: {_ANOTHER}")
    return Finding("socket folder", Status.OK, f"{folder} takes sockets of this user")


def socket_file(path: Path) -> Finding:
    """Check that a path can be that of a socket, and say whose is there and whether it lives.

    Args:
        path: the path of the socket.
    """
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        found = f"a path of {length} bytes, where the kernel takes {_LONGEST_PATH}"
        return Finding("socket file", Status.PROBLEM, found, "Choose a shorter path")
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Finding("socket file", Status.OK, f"{length} of {_LONGEST_PATH} bytes, nothing is there yet")
    except OSError as error:
        found = f"{path} cannot be looked at: {error.strerror or error}"
        return Finding("socket file", Status.PROBLEM, found, _sentence(_ANOTHER))
    if not stat.S_ISSOCK(facts.st_mode):
        found = f"{path} is there and is no socket"
        return Finding("socket file", Status.PROBLEM, found, f"Move it away, or {_ANOTHER}")
    if facts.st_uid != os.geteuid():
        found = f"{path} is a socket of user {facts.st_uid}, and only the same user may connect"
        return Finding("socket file", Status.PROBLEM, found, f"Run as that user, or {_ANOTHER}")
    return _alive(path)


def _make_a_socket(folder: Path) -> None:
    """Bind a socket in a folder, however long its path is, and remove it."""
    name = f".aiotensor-doctor-{secrets.token_hex(4)}"
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.bind(f"/proc/self/fd/{descriptor}/{name}")
            os.unlink(name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _alive(path: Path) -> Finding:
    """Ask the kernel whether a process has the socket open, without a connection that it would notice.

    A datagram socket can never connect to one with connections. The kernel says so if the other is
    alive, and else that nobody is there.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(str(path))
    except ConnectionRefusedError:
        found = f"{path} is left over from a process that is dead; the next receiver takes it over"
        return Finding("socket file", Status.OK, found)
    except OSError as error:
        if error.errno == errno.EPROTOTYPE:
            found = f"{path} is in use: a receiver of this user lives there, or another program"
            return Finding("socket file", Status.OK, found)
        found = f"{path} cannot be connected to: {error.strerror or error}"
        return Finding("socket file", Status.PROBLEM, found, _sentence(_ANOTHER))
    found = f"{path} is a datagram socket of another program"
    return Finding("socket file", Status.PROBLEM, found, _sentence(_ANOTHER))


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]
