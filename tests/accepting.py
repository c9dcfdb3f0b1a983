"""The connections that a server of this process has accepted, as its kernel lists them."""

import os
import socket

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
        sock = socket.socket(fileno=os.dup(descriptor))  # it may be closed here at any time
    except OSError:
        return False  # it is none any more, or no socket
    with sock:
        is_listener = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return not is_listener and sock.family == socket.AF_UNIX and sock.getsockname() == path
