"""The descriptors of this process that belong to the library or to its connections."""

import os
import socket

from verification.processes.watch import links


def our_descriptors() -> dict[int, str]:
    """Return the targets of all descriptors that may be the library's: record sockets and shared memory."""
    found = {int(path.rpartition("/")[2]): target for path, target in links(os.getpid()).items()}
    return {number: target for number, target in found.items() if _is_ours(number, target)}


def _is_ours(descriptor: int, target: str) -> bool:
    if "socket" not in target:
        return "shm" in target or "memfd" in target
    try:
        copy = os.dup(descriptor)
    except OSError:  # a thread has just closed it
        return False
    with socket.socket(fileno=copy) as sock:
        return sock.type == socket.SOCK_SEQPACKET
