"""Shared memory in the address space of this process.

Python's `mmap` module keeps a duplicate of the descriptor of each mapping, holds the interpreter lock during
``madvise`` and ``munmap``, and in a forked child unmaps the addresses even if another mapping uses them by
then. This module calls the C library instead: a mapping needs no descriptor, other threads run during the
system calls, and a forked child has no mapping and unmaps nothing.

**Page locks.** Several processes may map the same segment: the subscribers of a publisher, or the successive
receivers of a sender. When its owner is gone, pages that no process uses return to the system, but a process
cannot see which pages the others use. Therefore, the owner and each reader hold a lock of the kernel for
reading on the pages that they use, and a reader returns pages only while it holds an exclusive lock on them:

    mapped --> all pages locked for reading --the owner is gone--> only pages in use locked for reading

The last process that unlocks a page returns it, since no other one has locked it then. The locks last until
the last tensor is freed, or the process ends for any reason.

**Tokens.** The kernel reports when other processes have unmapped a segment or have ended: a token is the
writing end of a pipe, which a process keeps as long as it has mapped a segment. Even if the process is
killed, the token is closed then, and the reading end reports the end of the pipe.

- The owner of a segment keeps one, and sends the reading end to each reader: after the end of the owner, the
  readers return unused memory to the system.
- The owner sends another one to each reader, and keeps the reading end: as long as a lost reader has the
  segment, its blocks are not used again.

A reader that forwards blocks of the segment sends the token and the reading end on.

**Copied pages** of a private mapping are those that this process has written to. The file /proc/self/pagemap
lists them (admin-guide/mm/pagemap.rst of the kernel). Dropping all pages instead would let the next tensor at
the same place be read at half the speed.
"""

import asyncio
import ctypes
import fcntl
import functools
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch

from aiotensor.errors import ProtocolError
from aiotensor.memory.pages import Range
from aiotensor.memory.tensors import ArrayMemory, View, view_over
from aiotensor.runtime.descriptors import Descriptor, change_lock, conflicting_lock

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]

_MAP_PRIVATE = 0x02 | 0x4000  # with MAP_NORESERVE: most of its pages never become private
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE
_WRITE_SEALS = fcntl.F_SEAL_WRITE | 0x10  # F_SEAL_FUTURE_WRITE, which has no name in Python 3.11
_MADV_POPULATE_WRITE = 23  # the module `mmap` of Python 3.11 has no name for it
_PUNCH_HOLE = 0x01 | 0x02  # with FALLOC_FL_KEEP_SIZE

_PAGEMAP = "/proc/self/pagemap"
_ENTRY_BYTES = 8
_IN_USE = np.uint64(3 << 62)  # in memory or swapped out
_OF_FILE = np.uint64(1 << 61)  # of a file or of shared memory

_PAGEMAP_SCAN = 0xC0606610  # an ioctl since Linux 6.7
# The argument: size, flags, start, end, end of the walk, address and length of the vector of results, maximum
# of pages, inverted categories, required categories, categories of which one is required, returned ones.
_ARGUMENT = struct.Struct("12Q")
_IS_PRESENT = 1 << 3
_REGIONS = 64  # the length of the vector of results, each of which has a start, an end and categories

_FEW_PAGES = 2048  # changing them takes less than a millisecond
_QUICK_PAGES = 64  # changing them takes less time than starting work in a thread


class Mapping:
    """Shared memory, mapped for reading and writing until it is closed and its last view is freed.

    A forked child does not inherit the mapping: there, accessing a view ends the process. The caller keeps
    the descriptor of the memory, and may close it. Methods have no effect after `close`, which another thread
    may call in the meantime.

    Args:
        descriptor: the descriptor of the memory.
        nbytes: the size of the memory in bytes.
        locks: the descriptor, if its locks are those on the pages that this process uses, which outlive this
            object; None for the process that created the memory.
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
        locks: Descriptor | None = None,
        tokens: Sequence[Descriptor] = (),
        *,
        is_private: bool = False,
    ) -> None:
        flags = _MAP_PRIVATE if is_private else mmap.MAP_SHARED
        address = _mmap(None, nbytes, _PROTECTION, flags, descriptor, 0)
        if address is None or address == _FAILED:
            reason = f"{nbytes} bytes of addresses cannot be mapped: raise `ulimit -v`, or lower arena_bytes"
            raise OSError(ctypes.get_errno(), reason)
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
        locks = self.locks
        if locks is None or self.is_private:
            advice = mmap.MADV_REMOVE if locks is None else mmap.MADV_DONTNEED
            for start, length in ranges:
                self._advise(advice, start, length)
        if locks is not None:
            _return_unused(locks, ranges)

    def lock(self, start: int, stop: int) -> None:
        """Lock the pages of a range for reading that another reader, or the owner, has locked.

        Raises:
            OSError: the system has no memory left for a lock.
        """
        if (locks := self.locks) is not None:
            change_lock(locks.number, fcntl.F_RDLCK, *pages_of(start, stop))

    def unlock(self, start: int, stop: int) -> bool:
        """Unlock the pages of a range; return whether the owner has locked all, so that none is to return."""
        if (locks := self.locks) is None:
            return False
        change_lock(locks.number, fcntl.F_UNLCK, *pages_of(start, stop))
        lock = conflicting_lock(locks.number, fcntl.F_WRLCK, *pages_of(start, stop))
        return lock == (0, 0)  # from the first byte to the end

    def isolate(self, start: int, stop: int) -> bool:
        """Make the pages of a range private, and return whether that was possible."""
        with suppress(OSError):
            return self._change(*pages_of(start, stop), is_private=True)
        return False

    def has_copies(self, start: int, stop: int) -> bool:
        """Return whether this process has written to a range of a private mapping, or of an isolated one."""
        view, (first, length) = self.view, pages_of(start, stop)
        has = not view or bool(_copied_pages(self.address + first, length))
        del view
        return has

    def is_quick(self, start: int, stop: int) -> bool:
        """Return whether the other methods take little time for a range, so that they may block the loop."""
        first, length = pages_of(start, stop)
        if length <= _QUICK_PAGES * mmap.PAGESIZE:
            return True
        start, stop = self.address + first, self.address + first + length
        results = (ctypes.c_uint64 * (3 * _REGIONS))()
        limits = ctypes.addressof(results), _REGIONS, _FEW_PAGES
        present = 0, _IS_PRESENT, _IS_PRESENT, _IS_PRESENT
        argument = bytearray(_ARGUMENT.pack(_ARGUMENT.size, 0, start, stop, 0, *limits, *present))
        with suppress(OSError):
            fcntl.ioctl(_pagemap_of(os.getpid()).number, _PAGEMAP_SCAN, argument, True)
            return bool(_ARGUMENT.unpack(argument)[4] == stop)  # it ends early if it finds too many pages
        return False

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
        (first, length), locks, view = pages_of(start, stop), self.locks, self.view
        if not view:
            return
        if self.is_private:
            for offset, nbytes in _copied_pages(self.address + first, length):
                self._advise(mmap.MADV_DONTNEED, first + offset, nbytes)
        else:
            self._change(first, length, is_private=False)
        if unlocks and locks is not None:
            _return_unused(locks, [(first, length)])

    def close(self) -> None:
        """Release the memory, which is unmapped with its last view."""
        self.view = memoryview(b"")
        self.locks = None

    def _change(self, start: int, length: int, *, is_private: bool) -> bool:
        """Map a range of pages privately or shared, without their copies, at the same addresses.

        Return whether the memory is still mapped. This may take long.
        """
        view, locks = self.view, self.locks
        if not view or locks is None:
            return False
        flags = _MAP_FIXED | (_MAP_PRIVATE if is_private else mmap.MAP_SHARED)
        if _mmap(self.address + start, length, _PROTECTION, flags, locks.number, start) == _FAILED:
            raise _error()
        self._advise(mmap.MADV_DONTFORK, start, length)
        return True

    def _advise(self, advice: int, start: int, length: int) -> None:
        view = self.view  # keeps the memory mapped during the call
        if view and _madvise(self.address + start, length, advice):
            raise _error()


class TokenEnd:
    """Call a function once all copies of a token are closed; belongs to the running loop.

    Args:
        reading: the reading end of the pipe of the token, which no other object of this class uses.
        ended: the function, which is called in the loop.

    Attributes:
        ended: the second argument.
    """

    def __init__(self, reading: Descriptor, ended: Callable[[], object]) -> None:
        self.ended = ended
        self._reading: Descriptor | None = reading
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(reading.number, self._has_ended)

    def cancel(self) -> None:
        """Stop waiting; may be called again."""
        if self._reading is not None:
            self._loop.remove_reader(self._reading.number)
            # So that it is closed, unless another object needs it. The function often refers to the object
            # that has both, and such a cycle would keep the descriptor until a garbage collection.
            self._reading, self.ended = None, int

    def _has_ended(self) -> None:
        ended = self.ended
        self.cancel()
        ended()


def new_token() -> tuple[Descriptor, Descriptor]:
    """Return the reading end of a new pipe, and the token.

    Raises:
        OSError: this process has no descriptors left.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    return Descriptor(reading), Descriptor(writing)


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
    # The given descriptor shares its locks with the owner and the other readers; a new one does not. The new
    # one is closed with the last object that refers to it, since a thread may still use it.
    locks = Descriptor(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
    if locks_all:
        lock_all_pages(locks.number)
    return Mapping(locks.number, nbytes, locks, tokens, is_private=is_private)


def lock_all_pages(descriptor: int) -> None:
    """Lock all pages of a segment for reading.

    A publisher calls this before it shares a segment. Its lock exists as long as one of the descriptors that
    it has sent, so no page is returned before a subscriber that is still attaching has locked it.

    Raises:
        OSError: the system has no memory left for a lock.
    """
    change_lock(descriptor, fcntl.F_RDLCK, 0, 0)


def pages_of(start: int, stop: int) -> Range:
    """Return the whole pages that contain a range, as (start, length)."""
    first = start & -mmap.PAGESIZE
    return first, ((stop + mmap.PAGESIZE - 1) & -mmap.PAGESIZE) - first


def _return_unused(locks: Descriptor, ranges: list[Range]) -> None:
    """Unlock pages, and return those that no other process uses to the system; not for the event loop.

    Raises:
        OSError: the kernel refuses.
    """
    for start, length in ranges:
        change_lock(locks.number, fcntl.F_UNLCK, start, length)
    remaining = list(ranges)
    while remaining:
        start, length = remaining.pop()
        try:
            change_lock(locks.number, fcntl.F_WRLCK, start, length)
        except BlockingIOError:
            remaining += _around_the_lock_in(locks, start, length)
            continue
        try:
            if _fallocate(locks.number, _PUNCH_HOLE, start, length):
                raise _error()
        finally:
            change_lock(locks.number, fcntl.F_UNLCK, start, length)


def _around_the_lock_in(locks: Descriptor, start: int, length: int) -> list[Range]:
    """Return the parts of a range before and after one lock of another process in it."""
    lock = conflicting_lock(locks.number, fcntl.F_WRLCK, start, length)
    if lock is None:
        return []  # the other process has just unlocked it, and returns the pages itself
    locked, nbytes = lock
    stop, unlocked = start + length, locked + nbytes
    parts = [(start, locked - start)]
    if nbytes:  # otherwise it extends to the end
        parts.append((unlocked, stop - unlocked))
    return [part for part in parts if part[1] > 0]


def _copied_pages(address: int, nbytes: int) -> list[Range]:
    """Return the copied pages in a range of whole pages, as (offset, length); may be called in any thread.

    The result is the whole range if the kernel does not report the state of pages.
    """
    count = nbytes // mmap.PAGESIZE
    start = address // mmap.PAGESIZE * _ENTRY_BYTES
    try:
        data = os.pread(_pagemap_of(os.getpid()).number, count * _ENTRY_BYTES, start)
    except OSError:
        return [(0, nbytes)]
    if len(data) != count * _ENTRY_BYTES:
        return [(0, nbytes)]
    entries = np.frombuffer(data, np.uint64)
    is_copied = (entries & _IN_USE != 0) & (entries & _OF_FILE == 0)
    if not is_copied.any():
        return []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_copied, [False])).astype(np.int8)))
    return [
        (int(start) * mmap.PAGESIZE, int(stop - start) * mmap.PAGESIZE)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]


@functools.cache  # opening it takes as long as scanning it; a forked child opens its own
def _pagemap_of(_pid: int) -> Descriptor:
    return Descriptor(os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC))


def _unmap(pid: int, address: int, nbytes: int, tokens: Sequence[Descriptor]) -> None:
    # A forked child inherits the object, but not the memory: something else may be mapped there.
    if os.getpid() == pid:
        _munmap(address, nbytes)
        for token in tokens:
            token.close()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
