"""Checks of the path of a Unix socket: its folder, its length, and an existing file."""

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
_OTHERWISE = "Choose another path"


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the usual folder for sockets: the user's runtime folder, or the folder for temporary files."""
    if folder := environment.get("XDG_RUNTIME_DIR"):
        return Path(folder)
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # none of its candidates is writable
        return Path("/tmp")  # noqa: S108 - only a socket is made there, and removed immediately


def socket_folder(folder: Path, *, asked_for: bool, is_created: bool = False) -> Finding:
    """Check that this user can make sockets in a folder, and that no other user can replace them.

    Makes a socket with a random name, and removes it.

    Args:
        folder: the folder to check.
        asked_for: whether the user named the folder, so that a failure is a problem and not only a note.
        is_created: whether an engine creates the folder if it does not exist.
    """
    bad = Status.PROBLEM if asked_for else Status.NOTE
    place = shlex.quote(str(folder))
    try:
        facts = folder.stat()
    except FileNotFoundError:
        if is_created:
            parent = socket_folder(folder.parent, asked_for=asked_for)
            is_ready = parent.status is Status.OK
            return Finding(Status.OK, f"the engine creates {folder}") if is_ready else parent
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


def socket_file(path: Path) -> Finding:
    """Check that a socket can have a path; report the user and the state of an existing socket."""
    length = len(os.fsencode(path))
    if length > _LONGEST_PATH:
        found = f"a path of {length} bytes, more than the {_LONGEST_PATH} that the kernel allows"
        return Finding(Status.PROBLEM, found, "Choose a shorter path")
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Finding(Status.OK, f"{length} of {_LONGEST_PATH} bytes, nothing exists there yet")
    except OSError as error:
        return Finding(Status.PROBLEM, f"{path} cannot be examined: {error.strerror or error}", _OTHERWISE)
    if not stat.S_ISSOCK(facts.st_mode):
        return Finding(Status.PROBLEM, f"{path} exists and is not a socket", f"Move it away, or {_ANOTHER}")
    if facts.st_uid != os.geteuid():
        found = f"{path} is a socket of user {facts.st_uid}, and only the same user may connect"
        return Finding(Status.PROBLEM, found, f"Run as that user, or {_ANOTHER}")
    return _alive(path)


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


def _alive(path: Path) -> Finding:
    """Check whether a process has the socket open, without making a connection.

    A datagram socket cannot connect to a socket of another type: the kernel raises EPROTOTYPE if a process
    has that socket open, and ECONNREFUSED otherwise.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(str(path))
    except ConnectionRefusedError:
        found = f"{path} was left by a process that has ended; the next receiver takes it over"
        return Finding(Status.OK, found)
    except OSError as error:
        if error.errno == errno.EPROTOTYPE:
            found = f"{path} is in use by a receiver of this user, or by another program"
            return Finding(Status.OK, found)
        found = f"connecting to {path} failed: {error.strerror or error}"
        return Finding(Status.PROBLEM, found, _OTHERWISE)
    return Finding(Status.PROBLEM, f"{path} is a datagram socket of another program", _OTHERWISE)
