"""The memory of the buffers in which ZeroMQ receives messages."""

import functools

from aiotensor.protocol.moves import WINDOW_BYTES

__all__ = ["keep_buffers"]


@functools.cache
def keep_buffers() -> None:
    """Keep freed buffers in this process, up to 8 MiB at the end of each heap.

    ZeroMQ allocates a buffer for each message. By default, glibc returns a megabyte to the system as soon as
    it is freed, so that the next message causes a page fault for each page. After a larger block was freed,
    glibc keeps twice the size of that block (`mallopt(3)`, ``M_MMAP_THRESHOLD`` and ``M_TRIM_THRESHOLD``). An
    application that frees such a block has the same effect. With other allocators, there is no effect.
    """
    block = bytes(WINDOW_BYTES)  # not touched, so it takes no memory
    del block
