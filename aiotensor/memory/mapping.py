"""Shared memory in the address space of this process.

Python's `mmap` module keeps a duplicate of the descriptor of each mapping, holds the interpreter lock during
``madvise`` and ``munmap``, and in a forked child unmaps the addresses even if another mapping uses them by
then. This module calls the C library instead: a mapping needs no descriptor, other threads run during the
system calls, and a forked child has no mapping and unmaps nothing.
"""

import ctypes
import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from aiotensor.errors import ProtocolError
from aiotensor.memory.copied_pages import copied_pages, has_few_pages
from aiotensor.memory.page_locks import PageLocks
from aiotensor.memory.raw import ArrayMemory
from aiotensor.memory.views import View, view_over
from aiotensor.protocol.pages import Range
from aiotensor.runtime.descriptors import Descriptor

__all__ = ["Mapping", "open_segment"]

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MAP_PRIVATE = 0x02 | 0x4000  # with MAP_NORESERVE: most of its pages never become private
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_WRITE_SEALS = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, which has no name in Python 3.11
_MADV_POPULATE_WRITE = 23  # the module `mmap` of Python 3.11 has no name for it


class Mapping:
    """Shared memory, mapped for reading and writing until it is closed and its last view is freed.

    A forked child does not inherit the mapping: there, accessing a view ends the process. The caller keeps
    the descriptor of the memory, and may close it. Methods have no effect after `close`, which another thread
    may call in the meantime.

    Args:
        descriptor: the descriptor of the memory.
        nbytes: the size of the memory in bytes.
        locks: the locks on the pages that this process uses; None for the process that created the memory.
        tokens: the tokens of the memory, which are closed when it is unmapped.
        is_private: whether the first write to a page replaces it with a copy that no other process sees.

    Attributes:
        address: the address of the first byte.
        nbytes: the argument.
        view: the memory; empty after `close`.
        is_private: the argument.
        locks: the argument; None after `close`.
        tokens: the argument, to which others can be added.

    Raises:
        OSError: the memory cannot be mapped, for example because the process has no addresses left.
    """

    def __init__(
        self,
        descriptor: int,
        nbytes: int,
        locks: PageLocks | None = None,
        tokens: Sequence[Descriptor] = (),
        *,
        is_private: bool = False,
    ) -> None:
        flags = _MAP_PRIVATE if is_private else mmap.MAP_SHARED
        address = _mmap(None, nbytes, _PROTECTION, flags, descriptor, 0)
        if address is None or address == _FAILED:
            raise _error()
        memory = ArrayMemory(None, {"data": (address, False), "shape": (nbytes,), "typestr": "|u1"})
        self.tokens = list(tokens)
        weakref.finalize(memory, _unmap, os.getpid(), address, nbytes, self.tokens).atexit = False
        self.address = address
        self.nbytes = nbytes
        self.is_private = is_private
        self.locks = locks
        self.view: memoryview = np.asarray(memory).data
        self._advise(mmap.MADV_DONTFORK, 0, nbytes)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        """Return a tensor over the memory at an offset.

        Raises:
            ProtocolError: the range is not within the memory, or not aligned.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        view = self.view
        if not nbytes or offset % dtype.itemsize or offset + nbytes > len(view):
            raise ProtocolError(
                f"the peer placed a tensor of {nbytes} bytes at byte {offset} of a segment of {self.nbytes}"
            )
        return view_over(view, offset, dtype, shape)

    def populate(self, start: int, length: int) -> None:
        """Map the pages of a range before the first write; has no effect before Linux 5.14."""
        with suppress(OSError):
            self._advise(_MADV_POPULATE_WRITE, start, length)

    def remove(self, ranges: list[Range]) -> None:
        """Return the memory of ranges of pages to the system; they read as zeros afterwards.

        With locks, other processes keep the pages that they use. Do not call this on the event loop.

        Raises:
            OSError: the kernel refuses.
        """
        if (locks := self.locks) is not None:
            if self.is_private:
                for start, length in ranges:
                    self._advise(mmap.MADV_DONTNEED, start, length)
            locks.return_unused(ranges)
            return
        for start, length in ranges:
            self._advise(mmap.MADV_REMOVE, start, length)

    def lock(self, start: int, stop: int) -> None:
        """Lock the pages of a range for reading; errors are those of `PageLocks.lock`."""
        if (locks := self.locks) is not None:
            locks.lock(*_pages(start, stop))

    def unlock(self, start: int, stop: int) -> bool:
        """Unlock the pages of a range; return whether the owner has locked all of them."""
        locks = self.locks
        return locks is not None and locks.unlock(*_pages(start, stop))

    def isolate(self, start: int, stop: int) -> bool:
        """Make the pages of a range private, and return whether that was possible."""
        with suppress(OSError):
            return self._change(*_pages(start, stop), is_private=True)
        return False

    def has_copies(self, start: int, stop: int) -> bool:
        """Return whether this process has written to a range of a private mapping, or of an isolated one."""
        view, (first, length) = self.view, _pages(start, stop)
        has = not view or bool(copied_pages(self.address + first, length))
        del view
        return has

    def is_quick(self, start: int, stop: int) -> bool:
        """Return whether the other methods take little time for a range, so that they may block the loop."""
        first, length = _pages(start, stop)
        return has_few_pages(self.address + first, length)

    def drop_copies(self, start: int, stop: int, *, unlocks: bool = False) -> None:
        """Drop the pages in a range that this process has copied by writing to them.

        Do not call this on the event loop unless it is quick: 150 MiB take 2 ms if they were read.

        Args:
            start: the position of the first byte of the range.
            stop: the position after its last byte.
            unlocks: whether to unlock the pages, and to return them to the system if no process uses them.

        Raises:
            OSError: the process has no mappings left.
        """
        (first, length), locks, view = _pages(start, stop), self.locks, self.view
        if not view:
            return
        if self.is_private:
            for offset, nbytes in copied_pages(self.address + first, length):
                self._advise(mmap.MADV_DONTNEED, first + offset, nbytes)
        else:
            self._change(first, length, is_private=False)
        if unlocks and locks is not None:
            locks.return_unused([(first, length)])

    def close(self) -> None:
        """Release the memory, which is unmapped with its last view."""
        self.view = memoryview(b"")
        self.locks = None

    def remove_and_close(self) -> None:
        """Return all memory, which no tensor uses, to the system, and release it; not for the event loop."""
        self.remove([(0, self.nbytes)])
        self.close()

    def _change(self, start: int, length: int, *, is_private: bool) -> bool:
        """Map a range of pages privately or shared, without their copies, at the same addresses.

        Return whether the memory is still mapped. This may take long.
        """
        view, locks = self.view, self.locks
        if not view or locks is None:
            return False
        flags = _MAP_FIXED | (_MAP_PRIVATE if is_private else mmap.MAP_SHARED)
        if _mmap(self.address + start, length, _PROTECTION, flags, locks.own.number, start) == _FAILED:
            raise _error()
        self._advise(mmap.MADV_DONTFORK, start, length)
        return True

    def _advise(self, advice: int, start: int, length: int) -> None:
        view = self.view  # keeps the memory mapped during the call
        if view and _madvise(self.address + start, length, advice):
            raise _error()


def open_segment(
    descriptor: int,
    nbytes: int,
    tokens: Sequence[Descriptor] = (),
    *,
    is_private: bool = False,
    locks_all: bool = True,
) -> Mapping:
    """Map the segment of a peer; the caller keeps the descriptor.

    Args:
        descriptor: the descriptor of the memory.
        nbytes: the size of the memory in bytes, as the peer stated it.
        tokens: the tokens that the peer has sent with it; this function takes them over.
        is_private: whether writes are visible to this process only.
        locks_all: whether all pages are locked for reading, as long as the peer uses the segment.

    Raises:
        ProtocolError: the memory is not a memfd of this size, consists of huge pages, or has other seals than
            a sender sets.
        OSError: this process has no addresses left to map the memory, or no descriptors.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # it is not a memfd
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the peer shared memory that could shrink while it is read")
    if seals & _WRITE_SEALS or not seals & fcntl.F_SEAL_SEAL:
        raise ProtocolError("the peer shared memory whose pages cannot be returned, because of its seals")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        # Reading a hole that the peer has made causes SIGBUS if no huge page is left to fill it.
        raise ProtocolError("the peer shared memory of huge pages, which are not always available")
    size = os.fstat(descriptor).st_size
    if size != nbytes or not nbytes:
        raise ProtocolError(f"the peer shared {size} bytes of memory, but announced {nbytes}")
    locks = PageLocks(descriptor, locks_all=locks_all)
    return Mapping(locks.own.number, nbytes, locks, tokens, is_private=is_private)


def _pages(start: int, stop: int) -> Range:
    """Return the whole pages that contain a range, as (start, length)."""
    first = start - start % mmap.PAGESIZE
    return first, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE - first


def _unmap(pid: int, address: int, nbytes: int, tokens: Sequence[Descriptor]) -> None:
    # A forked child inherits the object, but not the memory: something else may be mapped there.
    if os.getpid() == pid:
        _munmap(address, nbytes)
        for token in tokens:
            token.close()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
