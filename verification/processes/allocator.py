"""Settings of the C allocator of this process, so that its resident memory is the memory in use."""

import ctypes
import gc

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_libc = ctypes.CDLL(None)


def forget_free_memory() -> None:
    """Collect garbage, and return free memory to the system.

    Otherwise the allocator keeps freed memory, about as much as some of the largest tensors, and two
    measurements of resident memory differ with the order in which threads run.
    """
    gc.collect()
    _libc.malloc_trim(0)


def keep_no_large_pieces() -> None:
    """Allocate each block of 128 KiB or more from the system, even after larger blocks were freed."""
    _libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)


def use_one_heap() -> None:
    """Give all threads one heap, and keep no large pieces.

    Otherwise each thread has a heap with free gaps, whose size differs by some MiB between measurements.
    """
    keep_no_large_pieces()
    _libc.mallopt(_M_ARENA_MAX, 1)
