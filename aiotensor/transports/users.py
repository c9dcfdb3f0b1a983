"""Checks of the user and the process at the other end of a local socket."""

import os
import socket
import stat
import struct

from aiotensor.errors import AccessDeniedError, UsageError

__all__ = ["check_file", "check_user", "not_permitted"]


_CREDENTIALS = struct.Struct("3i")  # of the peer: pid, uid, gid


def check_user(sock: socket.socket) -> int:
    """Check that the peer runs as this user, and return its process id; 0 if not in this PID namespace.

    Raises:
        AccessDeniedError: the peer runs as another user.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise AccessDeniedError(
            f"the peer (pid {pid}) runs as user {uid}, but this process runs as user {os.geteuid()}: run "
            "both as the same user"
        )
    return int(pid)


def check_file(path: str) -> None:
    """Check the path of a socket without connecting; do nothing if there is no file.

    `check_user` needs a connection, and connecting fails if the backlog is full or this user has no access
    to the file.

    Raises:
        AccessDeniedError: the file belongs to another user, or this user may not enter its folder.
        UsageError: there is a folder at the path, or a file in place of its folder.
    """
    try:
        found = os.stat(path)
    except PermissionError as error:
        raise not_permitted(path) from error
    except NotADirectoryError as error:
        raise UsageError(
            f"there can be no socket at {path}, because {os.path.dirname(path)} is not a folder"
        ) from error
    except OSError:
        return
    if stat.S_ISDIR(found.st_mode):
        raise UsageError(f"there is no socket at {path}, but a folder: pass the path of a socket in it")
    owner, user = found.st_uid, os.geteuid()
    if owner != user:
        raise AccessDeniedError(
            f"nothing accepts connections at {path}: the file belongs to user {owner}, but this process runs "
            f"as user {user}; run both as the same user"
        )


def not_permitted(path: str) -> AccessDeniedError:
    """Return the error for a path that this user may not connect to."""
    return AccessDeniedError(
        f"this user may not connect to {path}: run both sides as the same user, in a folder that it may enter"
    )
