"""The connections that a server of this process has accepted, as its kernel lists them."""

import os
import socket
import stat

__all__ = ["accepted_at"]


def accepted_at(address: str) -> list[int]:
    """Return the descriptors here of all connections that were accepted at an address.

    Args:
        address: of a server or of a receiver, at a path: ``ipc://`` or ``unix://``.
    """
    path = address.partition("://")[2]
    return [int(name) for name in os.listdir("/proc/self/fd") if _is_accepted(int(name), path)]


def _is_accepted(descriptor: int, path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        sock = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False  # a thread of ZeroMQ has closed it just now
    with sock:
        is_listener = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return not is_listener and sock.family == socket.AF_UNIX and sock.getsockname() == path
