"""Who is at the other end of a local socket, as the kernel knows it."""

import os
import socket
import struct

from aiotensor.errors import AccessDeniedError

__all__ = ["check_user"]

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
