"""The descriptors of this process that belong to the library or to its connections."""

import os
import socket
import stat

__all__ = ["accepted_at", "our_descriptors"]


def our_descriptors() -> dict[int, str]:
    """Return the targets of all descriptors that may be the library's: record sockets and shared memory."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor that listed the folder
        if "shm" in target or "memfd" in target or ("socket" in target and _is_seqpacket(int(name))):
            found[int(name)] = target
    return found


def _is_seqpacket(descriptor: int) -> bool:
    try:
        copy = os.dup(descriptor)
    except OSError:  # a thread has just closed it
        return False
    with socket.socket(fileno=copy) as sock:
        return sock.type == socket.SOCK_SEQPACKET


def accepted_at(address: str) -> list[int]:
    """Return the descriptors of all connections that this process has accepted at an address.

    Args:
        address: the address of a server or receiver, with a path: ``ipc://`` or ``unix://``.
    """
    path = address.partition("://")[2]
    return [int(name) for name in os.listdir("/proc/self/fd") if _is_accepted(int(name), path)]


def _is_accepted(descriptor: int, path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        sock = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False  # a thread of ZeroMQ has just closed it
    with sock:
        is_listener = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return not is_listener and sock.family == socket.AF_UNIX and sock.getsockname() == path
