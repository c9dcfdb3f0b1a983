"""The pages of a private mapping that this process has copied by writing to them.

The kernel lists them with the ioctl PAGEMAP_SCAN since Linux 6.7, which skips pages that this process never
used, and in the file /proc/self/pagemap before that (admin-guide/mm/pagemap.rst of the kernel).
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
import threading

import numpy as np

from aiotensor.protocol.pages import Range
from aiotensor.runtime.descriptors import Descriptor

__all__ = ["copied_pages", "has_few_pages"]

_FILE = "/proc/self/pagemap"
_ENTRY_BYTES = 8
_IN_USE = np.uint64(3 << 62)  # in memory or swapped out
_OF_FILE = np.uint64(1 << 61)  # of a file or of shared memory

_PAGEMAP_SCAN = 0xC0606610
# The argument: size, flags, start, end, end of the walk, address and length of the vector of results, maximum
# of pages, inverted categories, required categories, categories of which one is required, returned ones.
_ARGUMENT = struct.Struct("12Q")
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGIONS = 64  # the length of the vector of results, each of which has a start, an end and categories

_FEW_PAGES = 2048  # changing them takes less than a millisecond
_QUICK_PAGES = 64  # changing them takes less time than starting work in a thread

_opened = Descriptor(-1)
_opening = threading.Lock()


def copied_pages(address: int, nbytes: int) -> list[Range]:
    """Return the copied pages in a range of whole pages, as (offset, length); may be called in any thread.

    The result is the whole range if the kernel does not report the state of pages.
    """
    found: list[Range] = []
    start = address
    try:
        while start < address + nbytes:
            regions, start = _scan(start, address + nbytes, _IS_FILE, 0)
            found += [(first - address, last - first) for first, last in regions]
    except OSError:
        with contextlib.suppress(OSError):
            return _read(address, nbytes)
        return [(0, nbytes)]
    return found


def has_few_pages(address: int, nbytes: int) -> bool:
    """Return whether few pages of a range are mapped, so that changing or scanning it takes little time."""
    if nbytes <= _QUICK_PAGES * mmap.PAGESIZE:
        return True
    try:
        regions, end = _scan(address, address + nbytes, 0, _FEW_PAGES)
    except OSError:
        return False
    return (
        end == address + nbytes and sum(last - first for first, last in regions) < _FEW_PAGES * mmap.PAGESIZE
    )


def _file() -> int:
    """Return a descriptor of the file, which is opened once; a forked child opens its own.

    Raises:
        OSError: the file cannot be opened.
    """
    with _opening:
        if _opened.number < 0:
            _opened.number = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        return _opened.number


def _scan(start: int, stop: int, excluded: int, most: int) -> tuple[list[tuple[int, int]], int]:
    """Return the pages in use in a range, as (start, stop), and the end of the part that was scanned.

    Raises:
        OSError: the kernel has no such ioctl, or the file cannot be opened.
    """
    vector = (ctypes.c_uint64 * (3 * _REGIONS))()
    limits = ctypes.addressof(vector), _REGIONS, most
    in_use = _IS_PRESENT | _IS_SWAPPED
    categories = excluded, excluded, in_use, in_use
    argument = bytearray(_ARGUMENT.pack(_ARGUMENT.size, 0, start, stop, 0, *limits, *categories))
    count = fcntl.ioctl(_file(), _PAGEMAP_SCAN, argument, True)
    return [(vector[3 * one], vector[3 * one + 1]) for one in range(count)], _ARGUMENT.unpack(argument)[4]


def _read(address: int, nbytes: int) -> list[Range]:
    """Read the entries of the pages in the file.

    Raises:
        OSError: the file cannot be opened or read.
    """
    count = nbytes // mmap.PAGESIZE
    data = os.pread(_file(), count * _ENTRY_BYTES, address // mmap.PAGESIZE * _ENTRY_BYTES)
    if len(data) != count * _ENTRY_BYTES:
        raise OSError(f"{_FILE} ended early")
    entries = np.frombuffer(data, np.uint64)
    is_copied = (entries & _IN_USE != 0) & (entries & _OF_FILE == 0)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_copied, [False])).astype(np.int8)))
    return [
        (int(start) * mmap.PAGESIZE, int(stop - start) * mmap.PAGESIZE)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]
