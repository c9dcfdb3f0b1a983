"""Which user is at the other end of a local socket, as the kernel knows it."""

import os
import socket
import struct

from aiotensor.errors import AccessDeniedError

__all__ = ["check_owner", "check_user"]

_CREDENTIALS = struct.Struct("3i")  # of the peer: pid, uid, gid


def check_user(sock: socket.socket) -> int:
    """Refuse a peer that is another user, and return its process id; 0 if it has none here.

    Raises:
        AccessDeniedError: it is.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise AccessDeniedError(
            f"the other side (pid {pid}) runs as user {uid}, this process as user {os.geteuid()}: "
            "run both as the same user"
        )
    return int(pid)


def check_owner(path: str) -> None:
    """Refuse a socket file of another user that takes no connection.

    `check_user` needs a connection. A listener that never accepts gives none once its backlog is full, and a
    process without rights to the file gets none either.

    Args:
        path: of the file. Does nothing if there is no file.

    Raises:
        AccessDeniedError: the file belongs to another user, or this user may not enter its folder.
    """
    user = os.geteuid()
    try:
        owner = os.stat(path).st_uid
    except PermissionError as error:
        raise AccessDeniedError(
            f"this user may not connect to {path}: run both sides as the same user, in a folder that it may "
            "enter"
        ) from error
    except OSError:
        return
    if owner != user:
        raise AccessDeniedError(
            f"nothing accepts a connection at {path}: the file belongs to user {owner}, this process runs as "
            f"user {user}; run both as the same user"
        )
