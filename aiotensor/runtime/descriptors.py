"""File descriptors of this library, which are closed in every forked child, and locks on ranges of files.

Locks belong to an open file description (``F_OFD_SETLK``, see fcntl(2)), which exists as long as a descriptor
or a mapping refers to it. The kernel therefore releases them when a process ends for any reason.
"""

import contextlib
import fcntl
import os
import socket
import struct
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

_FLOCK = struct.Struct("hhqqi0q")  # type, whence, start, length and process of a lock


class SupportsClose(Protocol):
    """An object that owns a descriptor."""

    def close(self) -> object:
        """Close the descriptor."""


# A child that kept one of these would keep memory alive, and hide the end of this process from its peers.
_ours: weakref.WeakSet[SupportsClose] = weakref.WeakSet()


def close_after_fork(one: SupportsClose) -> None:
    """Close a socket, a file or a descriptor in every child that is forked from now on."""
    _ours.add(one)


def _close_in_child() -> None:
    for one in list(_ours):
        with contextlib.suppress(OSError):  # another fork hook may have closed it already
            one.close()


os.register_at_fork(after_in_child=_close_in_child)


class Descriptor:
    """A file descriptor that this object owns, and that is closed in forked children."""

    def __init__(self, number: int) -> None:
        self.number = number
        close_after_fork(self)

    def close(self) -> None:
        """Close the descriptor; closing again has no effect."""
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Usually closed already, unless its owner was garbage-collected after its event loop was closed.
        if self.number >= 0:
            close(self.number)


class ForeignDescriptor:
    """A descriptor that another library owns and may close at any time; it is closed in forked children."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._file = file_of(number)
        close_after_fork(self)

    def close(self) -> None:
        """Close the descriptor, unless the library has closed it and its number was reused."""
        if self._file is not None and file_of(self._number) == self._file:
            os.close(self._number)


def copy_of(descriptor: int) -> socket.socket:
    """Return a socket over a duplicate of a descriptor whose owner may close it at any time.

    Raises:
        OSError: the descriptor is closed or is not a socket, or this process has no descriptors left.
    """
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def close_all(descriptors: Iterable[int]) -> None:
    """Close all descriptors, even if closing one of them fails."""
    with contextlib.ExitStack() as closing:
        for descriptor in descriptors:
            closing.callback(os.close, descriptor)


def file_of(descriptor: int) -> tuple[int, int] | None:
    """Return the device and the inode of an open file; None for a closed descriptor."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


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
