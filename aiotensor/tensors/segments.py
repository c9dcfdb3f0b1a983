"""A sender's segment: one sealed memfd, mapped here, and the blocks in it.

A segment is sparse: the system gives it memory when a block first lies there, and those pages stay for the
next block. Fresh pages cost several times what the copy costs; warm ones cost the copy alone.
"""

import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Iterator

import numpy as np

from aiotensor.protocol.blocks import Blocks
from aiotensor.protocol.pages import CHUNK_BYTES, Range, WarmPages, gaps
from aiotensor.runtime.descriptors import Descriptor
from aiotensor.tensors.mapping import Mapping

__all__ = ["Segment", "whole_pages"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """One memfd, mapped here, and the blocks in it.

    `fill`, `return_memory` and `close` may take long, and run in the worker; everything else belongs to the
    thread of the event loop.

    Args:
        number: names the segment on the connection.
        nbytes: how many bytes of addresses it has.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = whole_pages(nbytes)
        self.blocks = Blocks(self.nbytes)
        self.is_attached = False  # the receiver has it
        self.is_retired = False  # nothing new is placed in it
        self.memory = memoryview(b"")  # all of it, while it is open
        self.used: set[int] = set()  # offsets of the blocks that this process uses
        self._elsewhere: set[int] = set()  # and of those that a lost receiver may still read
        self._mapping: Mapping | None = None
        self._descriptor = Descriptor(-1)
        self.warm = WarmPages(0, mmap.PAGESIZE)
        self._awaited_bytes = 0  # that were promised by `prepare` and are not filled yet
        self._shared: list[Range] = []  # of these, those in which other blocks may come to lie
        self._leaving: dict[int, list[Range]] = {}  # what is to be given back, by its chunk
        self._noting = threading.Lock()  # of what is leaving; never held for long
        self._changing = threading.Lock()  # filling a chunk and giving it back exclude each other
        self._left = np.zeros(0)  # when a chunk was last left by a block

    def open(self) -> None:
        """Make the memfd, if it is not there yet; it takes no memory by itself.

        Raises:
            OSError: the process has no descriptors or no addresses left.
        """
        if self._mapping is not None:
            return
        if self.nbytes > sys.maxsize:  # no system call takes so many bytes
            raise OSError(errno.ENOMEM, f"no process has {self.nbytes} bytes of addresses")
        descriptor = Descriptor(os.memfd_create("aiotensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            os.ftruncate(descriptor.number, self.nbytes)
            fcntl.fcntl(descriptor.number, fcntl.F_ADD_SEALS, _SEALS)
            mapping = Mapping(descriptor.number, self.nbytes)
            self.warm = WarmPages(self.nbytes, mmap.PAGESIZE)
            self._left = np.zeros(-(-self.nbytes // CHUNK_BYTES))
        except BaseException:
            descriptor.close()
            raise
        self._descriptor = descriptor
        self._mapping = mapping
        self.memory = mapping.view

    @property
    def is_open(self) -> bool:
        """Return whether it is mapped here."""
        return self._mapping is not None

    @property
    def descriptor(self) -> int:
        """The descriptor of the memfd; -1 while there is none."""
        return self._descriptor.number

    def close(self) -> None:
        """Release the memory, once; a view that is left keeps it mapped."""
        self._mapping = None
        self.memory = memoryview(b"")
        with self._changing:
            self._descriptor.close()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return some of the memory, writable; the mapping lives at least as long as the view."""
        return self.memory[offset : offset + nbytes]

    # Blocks

    def free(self, offset: int, nbytes: int, now: float) -> None:
        """Take a block back at a time; its memory stays warm for a while."""
        self.used.discard(offset)
        if offset not in self._elsewhere:
            self.blocks.free(offset)
            self._left[offset // CHUNK_BYTES : (offset + nbytes - 1) // CHUNK_BYTES + 1] = now

    def retire(self, elsewhere: Iterable[int]) -> None:
        """Extent nothing new here, since a receiver that was lost may still read some blocks.

        Args:
            elsewhere: the offsets of these blocks.
        """
        self.is_retired = True
        self._elsewhere = set(elsewhere)

    def reader_ended(self) -> None:
        """Note that the process of the lost receiver has ended, and reads nothing any more."""
        for offset in self._elsewhere - self.used:
            self.blocks.free(offset)
        self._elsewhere = set()

    # Memory

    def prepare(self, offset: int, nbytes: int, limit: int) -> tuple[list[Range], list[Range]]:
        """Return what to give back and what to fill, so that a block has memory.

        Blocks may lie anywhere in the addresses, which are more than the memory may be: where it would exceed
        the limit, memory that lies idle between blocks is given back first.

        Args:
            offset: of the block.
            nbytes: of the block.
            limit: the most bytes of memory, but for pages that blocks share in part.
        """
        present, idle = self.warm.nbytes + self._awaited_bytes, []
        cold = self.warm.missing(offset, nbytes, whole_chunks=True)
        if present + _total(cold) > limit:
            cold = self.warm.missing(offset, nbytes, whole_chunks=False)
            excess = present + _total(cold) - limit
            if excess > 0:
                idle = self._take_idle_pages(excess)
        self._awaited_bytes += _total(cold)
        self._shared += _at_the_ends(cold)
        return idle, cold

    def fill(self, ranges: list[Range]) -> None:
        """Get memory for ranges, and map it. Not for the event loop.

        Raises:
            OSError: the machine has no memory left (ENOSPC, ENOMEM). At the limit of a control group the
                kernel kills a process instead.
        """
        for start, length in ranges:
            with self._changing:
                mapping = self._mapping
                self._return_memory(start // CHUNK_BYTES, mapping)
                # Not by touching the pages: where memory is short that would be a signal and not an error.
                if self.descriptor >= 0:
                    os.posix_fallocate(self.descriptor, start, length)
                if mapping is not None:
                    mapping.populate(start, length)

    def filled(self, cold: list[Range], done: list[Range]) -> None:
        """Note which ranges have memory, of those that `prepare` returned."""
        self._awaited_bytes -= _total(cold)
        for one in _at_the_ends(cold):
            self._shared.remove(one)
        self.warm.add(done)

    def take_idle(self, before: float) -> list[Range]:
        """Return the chunks that are in no block and were left before a time; they count as cold now."""
        taken = []
        for chunk in list(self._idle()):
            if self._left[chunk] <= before:
                taken += self._take(chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.nbytes), None)
        return taken

    def take_free(self) -> list[Range]:
        """Return all pages that are in no block; they count as cold now."""
        return self._take_idle_pages(None)

    @property
    def has_idle(self) -> bool:
        """Return whether there are warm chunks in no block."""
        return any(True for _ in self._idle())

    def return_memory(self, ranges: list[Range]) -> None:
        """Return the memory of ranges to the system, unless they were filled since. Not for the loop."""
        for start, _ in ranges:
            with self._changing:
                self._return_memory(start // CHUNK_BYTES, self._mapping)
        if self.is_retired:  # it is sent to no other receiver
            with self._changing:
                self._descriptor.close()

    def make_way(self, ranges: list[Range]) -> None:
        """Give back memory before ranges are filled, as much as they will need. Not for the loop.

        Two threads fill a segment, so what is to be given back may still wait for the other one.
        """
        left = _total(ranges)
        for chunk, leaving in list(self._leaving.items()):
            if left <= 0:
                return
            left -= _total(leaving)
            with self._changing:
                self._return_memory(chunk, self._mapping)

    def _return_memory(self, chunk: int, mapping: Mapping | None) -> None:
        with self._noting:
            leaving = self._leaving.pop(chunk, ())
        if mapping is not None:
            for start, length in leaving:
                mapping.remove(start, length)

    def _take(self, start: int, stop: int, most: int | None) -> list[Range]:
        """Take the pages of a free run to give them back, but not from chunks that are being filled.

        These will be noted as warm, and a block that comes to lie there would then lose its memory.
        """
        taken: list[Range] = []
        being_filled = [(low, low + length) for low, length in self._shared]
        for low, length in gaps(start, stop, being_filled, mmap.PAGESIZE):
            left = None if most is None else most - _total(taken)
            taken += self.warm.take(max(low, start), min(low + length, stop), left)
        with self._noting:
            for one in taken:
                self._leaving.setdefault(one[0] // CHUNK_BYTES, []).append(one)
        return taken

    def _take_idle_pages(self, most: int | None) -> list[Range]:
        """Take the pages between blocks, of the longest free runs first."""
        taken: list[Range] = []
        left = most
        for start, stop in self.blocks.longest_free_runs():
            found = self._take(start, stop, left)
            taken += found
            if left is not None:
                left -= _total(found)
                if left <= 0:
                    break
        return taken

    def _idle(self) -> Iterator[int]:
        if self._mapping is None:
            return
        for start, stop in self.blocks.free_runs():
            # The last chunk of the segment may be shorter than the others.
            last = stop // CHUNK_BYTES if stop < self.blocks.size else -(-stop // CHUNK_BYTES)
            yield from self.warm.chunks(-(-start // CHUNK_BYTES), last)


def whole_pages(nbytes: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _at_the_ends(cold: list[Range]) -> set[Range]:
    """Return the first and the last range of a block, which may reach beyond it."""
    return {*cold[:1], *cold[-1:]}


def _total(ranges: list[Range]) -> int:
    return sum(length for _, length in ranges)
