"""File locks of the kernel on the pages of a segment that several processes use.

Several processes may map the same segment: the subscribers of a publisher, or the successive receivers of a
sender. When its owner is gone, pages that no process uses return to the system, but a process cannot see
which pages the others use. Therefore, the owner and each reader hold a lock for reading on the pages that
they use, and a reader returns pages only while it holds an exclusive lock on them:

    mapped --> all pages locked for reading --the owner is gone--> only pages in use locked for reading

The last process that unlocks a page returns it, since no other one has locked it then. The locks last
until the last tensor is freed, or the process ends for any reason.
"""

import ctypes
import fcntl
import os

from aiotensor.protocol.pages import Range
from aiotensor.runtime.descriptors import Descriptor
from aiotensor.runtime.range_locks import change_lock, conflicting_lock

__all__ = ["PageLocks", "lock_all_pages"]

_PUNCH_HOLE = 0x01 | 0x02  # with FALLOC_FL_KEEP_SIZE

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class PageLocks:
    """The locks of one reader on a segment.

    They outlive this object if the segment is mapped with its descriptor.

    Args:
        descriptor: the descriptor of the segment; the caller keeps it.
        locks_all: whether to lock all pages for reading.

    Attributes:
        own: the descriptor that has the locks, with which the segment is mapped.

    Raises:
        OSError: the segment cannot be opened again, because the process has no descriptors left or no
            ``/proc``.
    """

    def __init__(self, descriptor: int, *, locks_all: bool = True) -> None:
        # The given descriptor shares its locks with the owner and the other readers; a new one does
        # not. The new one is closed with this object, and not before, since a thread may still use it.
        self.own = Descriptor(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
        if locks_all:
            lock_all_pages(self.own.number)

    def lock(self, start: int, length: int) -> None:
        """Lock pages for reading that another reader, or the owner, has locked.

        Raises:
            OSError: the system has no memory left for a lock.
        """
        change_lock(self.own.number, fcntl.F_RDLCK, start, length)

    def unlock(self, start: int, length: int) -> bool:
        """Unlock pages; return whether the owner has locked all of them, so that none is to be returned."""
        change_lock(self.own.number, fcntl.F_UNLCK, start, length)
        lock = conflicting_lock(self.own.number, fcntl.F_WRLCK, start, length)
        return lock == (0, 0)  # from the first byte to the end

    def return_unused(self, ranges: list[Range]) -> None:
        """Return pages that this process does not use to the system, unless another process uses them.

        Do not call this on the event loop.

        Raises:
            OSError: the kernel refuses.
        """
        for start, length in ranges:
            change_lock(self.own.number, fcntl.F_UNLCK, start, length)
        remaining = list(ranges)
        while remaining:
            start, length = remaining.pop()
            try:
                change_lock(self.own.number, fcntl.F_WRLCK, start, length)
            except BlockingIOError:
                remaining += self._around_the_lock_in(start, length)
                continue
            try:
                if _fallocate(self.own.number, _PUNCH_HOLE, start, length):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            finally:
                change_lock(self.own.number, fcntl.F_UNLCK, start, length)

    def _around_the_lock_in(self, start: int, length: int) -> list[Range]:
        """Return the parts of a range before and after one lock of another process in it."""
        lock = conflicting_lock(self.own.number, fcntl.F_WRLCK, start, length)
        if lock is None:
            return []  # the other process has just unlocked it, and returns the pages itself
        locked, nbytes = lock
        stop, unlocked = start + length, locked + nbytes
        parts = [(start, locked - start)]
        if nbytes:  # otherwise it extends to the end
            parts.append((unlocked, stop - unlocked))
        return [part for part in parts if part[1] > 0]


def lock_all_pages(descriptor: int) -> None:
    """Lock all pages of a segment for reading.

    A publisher calls this before it shares a segment. Its lock exists as long as one of the descriptors that
    it has sent, so no page is returned before a subscriber that is still attaching has locked it.

    Raises:
        OSError: the system has no memory left for a lock.
    """
    change_lock(descriptor, fcntl.F_RDLCK, 0, 0)
