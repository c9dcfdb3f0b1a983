"""Locks of the kernel on ranges of bytes in a file.

They belong to an open file description (``F_OFD_SETLK``, see fcntl(2)), which exists as long as a descriptor
or a mapping refers to it. The kernel therefore releases them when a process ends for any reason.
"""

import fcntl
import os
import struct

__all__ = ["change_lock", "conflicting_lock"]

_FLOCK = struct.Struct("hhqqi0q")  # type, whence, start, length and process of a lock


def change_lock(descriptor: int, kind: int, start: int, length: int) -> None:
    """Lock or unlock a range of bytes, which need not exist; never waits.

    Args:
        descriptor: a descriptor of the file.
        kind: `fcntl.F_RDLCK`, `fcntl.F_WRLCK` or `fcntl.F_UNLCK`.
        start: the first byte.
        length: the number of bytes; 0 extends the range to the end of any file.

    Raises:
        BlockingIOError: another open file description has a conflicting lock in the range.
        OSError: the system has no memory left for a lock.
    """
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))


def conflicting_lock(descriptor: int, kind: int, start: int, length: int) -> tuple[int, int] | None:
    """Return the start and the length of one lock that prevents `change_lock`; None if nothing does."""
    asked = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
    found, _, locked, nbytes, _ = _FLOCK.unpack(answer)
    return None if found == fcntl.F_UNLCK else (locked, nbytes)
