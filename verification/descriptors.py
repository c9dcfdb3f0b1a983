"""The descriptors of this process that belong to the library or to its connections."""

import os
import socket


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
