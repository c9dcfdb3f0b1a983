"""The allocator of this process: it gives back what is free, so that what is left is what is used."""

import ctypes
import gc

__all__ = ["forget_free_memory", "keep_no_large_pieces"]

_M_MMAP_THRESHOLD = -3

_libc = ctypes.CDLL(None)


def forget_free_memory() -> None:
    """Collect garbage and give what is free back to the system.

    Between two measurements of resident memory without it lies what the allocator keeps for later: some
    pieces of the size of the largest tensors, as the threads happen to take turns.
    """
    gc.collect()
    _libc.malloc_trim(0)


def keep_no_large_pieces() -> None:
    """Take each piece of 128 KiB or more from the system, whatever was freed before."""
    _libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
