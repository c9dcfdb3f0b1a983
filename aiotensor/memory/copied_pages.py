"""The pages of a private mapping that this process has copied by writing to them."""

import mmap
import os

import numpy as np
import numpy.typing as npt

from aiotensor.protocol.pages import Range

__all__ = ["copied_pages"]

# The entry of a page in /proc/self/pagemap: eight bytes with these flags (Linux, admin-guide/mm/pagemap.rst).
_ENTRY_BYTES = 8
_IN_USE = np.uint64(3 << 62)  # in memory or swapped out
_OF_FILE = np.uint64(1 << 61)  # of a file or of shared memory

# Dropping at most this many pages without a check takes less time than reading the file.
_FEW_PAGES = 64


def copied_pages(address: int, nbytes: int, *, always_checks: bool = False) -> list[Range]:
    """Return the copied pages in a range of whole pages, as (offset, length); may be called in any thread.

    The result is the whole range if the kernel does not report the state of pages, and, unless
    `always_checks` is true, if it has few pages.
    """
    count = nbytes // mmap.PAGESIZE
    if count <= _FEW_PAGES and not always_checks:
        return [(0, nbytes)]
    try:
        entries = _read(address // mmap.PAGESIZE, count)
    except OSError:
        return [(0, nbytes)]
    is_copied = (entries & _IN_USE != 0) & (entries & _OF_FILE == 0)
    if not is_copied.any():
        return []
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_copied, [False])).astype(np.int8)))
    return [
        (int(start) * mmap.PAGESIZE, int(stop - start) * mmap.PAGESIZE)
        for start, stop in zip(edges[::2], edges[1::2], strict=True)
    ]


def _read(page: int, count: int) -> npt.NDArray[np.uint64]:
    """Return the entries of consecutive pages in /proc/self/pagemap.

    Raises:
        OSError: the file cannot be opened or read.
    """
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        data = os.pread(file.fileno(), count * _ENTRY_BYTES, page * _ENTRY_BYTES)
    if len(data) != count * _ENTRY_BYTES:
        raise OSError("/proc/self/pagemap ended early")
    return np.frombuffer(data, np.uint64)
