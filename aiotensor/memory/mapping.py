"""Shared memory in the address space of this process, and the segment of a sender at its receiver.

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
from aiotensor.memory.copied_pages import copied_pages
from aiotensor.memory.page_locks import PageLocks
from aiotensor.memory.raw import ArrayMemory
from aiotensor.memory.views import View, view_over
from aiotensor.protocol.pages import Range
from aiotensor.runtime.descriptors import Descriptor

__all__ = ["MappedSegment", "Mapping", "open_segment"]

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MAP_PRIVATE = 0x02 | 0x4000  # with MAP_NORESERVE: most of its pages never become private
_FAILED = ctypes.c_void_p(-1).value
_WRITE_SEALS = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, which has no name in Python 3.11
_MADV_POPULATE_WRITE = 23  # the module `mmap` of Python 3.11 has no name for it


class Mapping:
    """Shared memory, mapped for reading and writing until its last view is freed.

    A forked child does not inherit the mapping: there, accessing a view ends the process. The caller keeps
    the descriptor of the memory, and may close it.

    Args:
        descriptor: the descriptor of the memory.
        nbytes: the size of the memory in bytes.
        locks: the locks on the pages that this process uses; None for the process that created the memory.
        tokens: the tokens of the memory, which are closed when it is unmapped.
        is_private: whether the first write to a page replaces it with a copy that no other process sees.

    Attributes:
        address: the address of the first byte.
        view: the memory.
        is_private: the argument.

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
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = _MAP_PRIVATE if is_private else mmap.MAP_SHARED
        address = _mmap(None, nbytes, protection, flags, descriptor, 0)
        if address is None or address == _FAILED:
            raise _error()
        memory = ArrayMemory(None, {"data": (address, False), "shape": (nbytes,), "typestr": "|u1"})
        weakref.finalize(memory, _unmap, os.getpid(), address, nbytes, tokens).atexit = False
        self.address = address
        self.is_private = is_private
        self._locks = locks
        self.view: memoryview = np.asarray(memory).data
        self._advise(mmap.MADV_DONTFORK, 0, nbytes)

    def populate(self, start: int, length: int) -> None:
        """Map the pages of a range before the first write; has no effect before Linux 5.14."""
        with suppress(OSError):
            self._advise(_MADV_POPULATE_WRITE, start, length)

    def remove(self, ranges: list[Range]) -> None:
        """Return the memory of ranges of pages to the system; they read as zeros afterwards.

        With locks, other processes keep the pages that they use.

        Raises:
            OSError: the kernel refuses.
        """
        if self._locks is not None:
            if self.is_private:
                for start, length in ranges:
                    self._advise(mmap.MADV_DONTNEED, start, length)
            self._locks.return_unused(ranges)
            return
        for start, length in ranges:
            self._advise(mmap.MADV_REMOVE, start, length)

    def drop_copies(self, start: int, length: int) -> None:
        """Drop the copied pages in a range of a private mapping, so that it shows the shared memory again.

        Do not call this on the event loop if the range is large: 150 MiB take 2 ms.
        """
        view = self.view
        for offset, nbytes in copied_pages(self.address + start, length):
            self._advise(mmap.MADV_DONTNEED, start + offset, nbytes)
        del view

    def _advise(self, advice: int, start: int, length: int) -> None:
        view = self.view  # keeps the memory mapped during the call
        if _madvise(self.address + start, length, advice):
            raise _error()
        del view


class MappedSegment:
    """A segment of a peer, mapped in this process.

    Attributes:
        is_private: whether writes are visible to this process only.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.nbytes = len(mapping.view)
        self.is_private = mapping.is_private
        self._mapping: Mapping | None = mapping

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        """Return a tensor over the memory at an offset.

        Raises:
            ProtocolError: the range is not within the segment, or not aligned.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self._mapping is None or not nbytes or offset % dtype.itemsize or offset + nbytes > self.nbytes:
            raise ProtocolError(
                f"the peer placed a tensor of {nbytes} bytes at byte {offset} of a segment of {self.nbytes}"
            )
        return view_over(self._mapping.view, offset, dtype, shape)

    def drop_copies(self, start: int, stop: int) -> None:
        """Drop the pages in a range that this process has copied by writing to them."""
        mapping = self._mapping
        if mapping is not None:
            first = start - start % mmap.PAGESIZE
            mapping.drop_copies(first, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE - first)

    def remove(self, ranges: list[Range]) -> None:
        """Return the memory of ranges to the system, as `Mapping.remove` does; not for the event loop."""
        mapping = self._mapping
        if mapping is not None:
            mapping.remove(ranges)

    def close(self) -> None:
        """Release the memory, which is unmapped with its last view."""
        self._mapping = None

    def remove_and_close(self) -> None:
        """Return all memory, which no tensor uses, to the system, and release it; not for the event loop."""
        self.remove([(0, self.nbytes)])
        self.close()


def open_segment(
    descriptor: int, nbytes: int, tokens: Sequence[Descriptor] = (), *, is_private: bool = False
) -> MappedSegment:
    """Map the segment of a peer; the caller keeps the descriptor.

    Args:
        descriptor: the descriptor of the memory.
        nbytes: the size of the memory in bytes, as the peer stated it.
        tokens: the tokens that the peer has sent with it; this function takes them over.
        is_private: whether writes are visible to this process only.

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
    locks = PageLocks(descriptor)
    return MappedSegment(Mapping(locks.descriptor, nbytes, locks, tokens, is_private=is_private))


def _unmap(pid: int, address: int, nbytes: int, tokens: Sequence[Descriptor]) -> None:
    # A forked child inherits the object, but not the memory: something else may be mapped there.
    if os.getpid() == pid:
        _munmap(address, nbytes)
        for token in tokens:
            token.close()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
