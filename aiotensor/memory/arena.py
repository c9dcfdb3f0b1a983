"""The arena: the shared memory of one sender or publisher, divided into blocks and kept warm between tensors.

A segment is a sealed memfd, mapped in this process. It has several times as many addresses as the arena may
have memory, so that there is a contiguous range for each block regardless of the positions of the others. The
descriptor of a segment is sent once, and both sides map it once. After that, the number of the segment and an
offset identify the bytes of a tensor.

A segment is sparse: pages get memory when a block first needs it, and keep it for the next block. Copying
into new pages takes several times as long as copying into such warm pages.

A memfd has no name, so a killed process leaves no file, and the size of ``/dev/shm`` does not matter. It is
sealed, because a process that shrank it would cause SIGBUS in the others.
"""

import errno
import fcntl
import mmap
import os
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from aiotensor.memory.mapping import Mapping, lock_all_pages, new_token
from aiotensor.memory.pages import CHUNK_BYTES, Range, WarmPages, gaps
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE, Blocks
from aiotensor.protocol.credits import Ticket
from aiotensor.runtime.descriptors import Descriptor

_EARLY_S = 0.01  # timers expire up to some milliseconds early
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Segment:
    """A memfd, mapped in this process, and its blocks.

    `provide`, `return_memory` and `close` may take long, and run in the worker; everything else
    belongs to the thread of the event loop. The number identifies the segment on the connection.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = whole_pages(nbytes)
        self.blocks = Blocks(self.nbytes, mmap.PAGESIZE)
        self.memory = memoryview(b"")  # the whole mapping, while the segment is open
        self.address = 0  # of its first byte
        self._mapping: Mapping | None = None
        self.descriptor = Descriptor(-1)  # of the memfd
        self._end = Descriptor(-1)  # the reading end of the token of this process
        self.warm = WarmPages(0, mmap.PAGESIZE)
        self._awaited_bytes = 0  # in ranges that `prepare` has returned and that are not filled yet
        self._shared: list[Range] = []  # the part of these ranges that other blocks may overlap
        self.taken: set[Range] = set()  # cold ranges, each in one chunk, whose memory is to be returned
        self._changing = threading.Lock()  # held while memory is filled or returned
        self._left = np.zeros(0)  # the time when each chunk was last used by a block

    def open(self) -> Mapping:
        """Create and map the memfd, which has no memory yet, unless it exists; return its mapping.

        Raises:
            OSError: the process has no descriptors or no addresses left.
        """
        if self._mapping is not None:
            return self._mapping
        if self.nbytes > sys.maxsize:  # beyond the range of system calls
            raise OSError(errno.ENOMEM, f"no process has an address space of {self.nbytes} bytes")
        descriptor = Descriptor(os.memfd_create("aiotensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            os.ftruncate(descriptor.number, self.nbytes)
            fcntl.fcntl(descriptor.number, fcntl.F_ADD_SEALS, _SEALS)
            lock_all_pages(descriptor.number)  # until every process that receives it has mapped the segment
            mapping = Mapping(descriptor.number, self.nbytes)
            self.warm = WarmPages(self.nbytes, mmap.PAGESIZE)
            self._left = np.zeros(-(-self.nbytes // CHUNK_BYTES))
        except BaseException:
            descriptor.close()
            raise
        self.descriptor, self._mapping = descriptor, mapping
        self.memory, self.address = mapping.view, mapping.address
        return mapping

    def end(self) -> Descriptor:
        """Return the reading end of a pipe that ends once this process has unmapped the open segment.

        Raises:
            OSError: this process has no descriptors left.
        """
        if self._end.number < 0 and self._mapping is not None:
            self._end, token = new_token()
            self._mapping.tokens.append(token)
        return self._end

    def close(self) -> None:
        """Release the memory, which remaining views keep mapped."""
        with self._changing:  # before the token, which is closed with the mapping
            self.descriptor.close()
            self._end.close()
        self._mapping = None
        self.memory = memoryview(b"")

    def free(self, place: "Extent") -> None:
        """Free a block; its memory stays warm, and is idle from now on."""
        offset = place.offset
        self.blocks.free(offset)
        last = (offset + place.nbytes - 1) // CHUNK_BYTES
        self._left[offset // CHUNK_BYTES : last + 1] = time.monotonic()

    # Memory

    def prepare(self, offset: int, nbytes: int, limit: int) -> list[Range]:
        """List the ranges to fill for the memory of a block.

        A segment has more addresses than memory. If the memory would exceed the limit in bytes, apart from
        pages at the ends of blocks, idle memory between blocks is taken.
        """
        present = self.warm.nbytes + self._awaited_bytes
        cold = self.warm.missing(offset, nbytes, whole_chunks=True)
        if present + _total(cold) > limit:
            cold = self.warm.missing(offset, nbytes, whole_chunks=False)
            self._take_idle_pages(present + _total(cold) - limit)
        self._awaited_bytes += _total(cold)
        self._shared += _at_the_ends(cold)
        return cold

    def provide(
        self, cold: Sequence[Range], filled: list[Range], is_abandoned: Callable[[], object] = int
    ) -> None:
        """Allocate and map the memory of cold ranges, and before, return as much taken memory to the system.

        How long this takes depends on the ranges, and not on how much memory was taken before.

        Args:
            cold: the ranges from `prepare`.
            filled: the ranges that have got their memory are appended to it.
            is_abandoned: returns whether to stop; called before each range is returned or filled.

        Raises:
            OSError: the machine has no memory left (ENOSPC, ENOMEM). At the limit of a control group the
                kernel kills a process instead.
        """
        missing = _total(cold)
        chunks = {start // CHUNK_BYTES for start, _ in cold}
        # The memory of the same pages first: no page being filled is taken, so this is all of it.
        for one in sorted(self.taken.copy(), key=lambda one: one[0] // CHUNK_BYTES not in chunks):
            if missing <= 0 and one[0] // CHUNK_BYTES not in chunks:
                break
            if is_abandoned():
                return
            self._return(one)
            missing -= one[1]
        for start, length in cold:
            if is_abandoned():
                return
            with self._changing:
                mapping = self._mapping
                # Writing to the pages would cause a signal instead of an error if memory is short.
                if self.descriptor.number >= 0:
                    os.posix_fallocate(self.descriptor.number, start, length)
                if mapping is not None:
                    mapping.populate(start, length)
            filled.append((start, length))

    def filled(self, cold: list[Range], done: list[Range]) -> None:
        """Record which of the ranges from `prepare` have memory."""
        self._awaited_bytes -= _total(cold)
        for one in _at_the_ends(cold):
            self._shared.remove(one)
        self.warm.add(done)

    def take_idle(self, idle_s: float) -> list[Range]:
        """Take the chunks without blocks that were not used for a time in seconds, and list them."""
        before, taken = time.monotonic() - idle_s + _EARLY_S, []
        for chunk in list(self._idle()):
            if self._left[chunk] <= before:
                taken += self._take(chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.nbytes))
        return taken

    def take_free(self) -> list[Range]:
        """Take all pages without blocks, and list them."""
        return self._take_idle_pages(self.nbytes)

    def take_excess(self, limit: int) -> None:
        """Take pages without blocks while the memory exceeds the limit in bytes."""
        self._take_idle_pages(self.warm.nbytes + self._awaited_bytes - limit)

    @property
    def has_idle(self) -> bool:
        """Whether there are warm chunks without blocks."""
        return any(True for _ in self._idle())

    def return_memory(self) -> None:
        """Return all memory that was taken before to the system; not for use on the event loop."""
        for one in self.taken.copy():
            self._return(one)

    def _return(self, one: Range) -> None:
        """Return the memory of a taken range, unless another thread has returned it."""
        with self._changing:
            if one in self.taken:
                self.taken.remove(one)
                if (mapping := self._mapping) is not None:
                    mapping.remove([one])

    def _take(self, start: int, stop: int, most: int = sys.maxsize) -> list[Range]:
        """Mark pages of a free run as cold, to be returned, except in ranges that are being filled.

        Otherwise, `filled` would mark these ranges as warm although they have lost their memory.
        """
        taken: list[Range] = []
        being_filled = [(low, low + length) for low, length in self._shared]
        for low, length in gaps(start, stop, being_filled, mmap.PAGESIZE):
            taken += self.warm.take(max(low, start), min(low + length, stop), most - _total(taken))
        self.taken.update(taken)
        return taken

    def _take_idle_pages(self, most: int) -> list[Range]:
        """Take pages between blocks, beginning with the longest free runs, and list them."""
        taken: list[Range] = []
        for start, stop in self.blocks.longest_free_runs():
            if most <= 0:
                break
            found = self._take(start, stop, most)
            taken += found
            most -= _total(found)
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
    """Return the first and the last range of a block, which may extend beyond it."""
    return {*cold[:1], *cold[-1:]}


def _total(ranges: Sequence[Range]) -> int:
    return sum(length for _, length in ranges)


_MAX_ADDRESSES = 1 << 44  # a process has 2**47

WHERE = struct.Struct("<QQ")  # the position of a tensor: the number of its segment, and the offset there


class Extent(msgspec.Struct, frozen=True):
    """The range of a segment that a block occupies."""

    segment: Segment
    offset: int
    nbytes: int

    def describe(self, inner_offset: int) -> bytes:
        """Encode the position of a byte of the block, for the receiver."""
        return WHERE.pack(self.segment.number, self.offset + inner_offset)

    def view(self) -> memoryview:
        """Return the memory of the block."""
        return self.segment.memory[self.offset : self.offset + self.nbytes]


class PinnedBlock(msgspec.Struct, eq=False):
    """A block in use, which is free when its last pin ends.

    A block is pinned by its owner (the copy that fills it, or the tensor that the caller allocated in it),
    once for each announcement of a tensor in it, and once for each move of its bytes to another machine. So
    it can be sent several times and to several receivers, and no peer can free memory that this side still
    writes or reads.

    Attributes:
        number: its number on the connections.
        is_owned: whether its owner pins it.
        sent: the number of its announcements that were not released.
        moves: the number of its moves that are under way.
        lost: the number of its announcements that lost readers may still read, whose processes live on. They
            pin the place of the block, but its bytes only if few addresses remain.
    """

    number: int
    is_owned: bool = True
    sent: int = 0
    moves: int = 0
    lost: int = 0


class Block(PinnedBlock, kw_only=True):
    """A block of the arena, with the grant of its bytes."""

    place: Extent
    ticket: Ticket[Extent]


class Arena(Segment):
    """A segment with more addresses than memory, in which this process allocates blocks.

    Args:
        nbytes: the maximum number of bytes of memory.

    Attributes:
        max_bytes: the maximum number of bytes of memory.
        lost_bytes: the number of bytes of the blocks that only lost readers may still read; they are beyond
            the maximum.
    """

    def __init__(self, nbytes: int) -> None:
        super().__init__(0, _address_bytes(nbytes))
        self.max_bytes = whole_pages(nbytes)
        self.lost_bytes = 0

    def allocate(self, nbytes: int) -> Extent | None:
        """Allocate a block; return None if no free run is long enough."""
        offset = self.blocks.allocate(nbytes)
        return None if offset is None else Extent(self, offset, nbytes)

    def open_for(self, place: Extent) -> Extent:
        """Open the segment for its first block; return the place of this block, perhaps in fewer addresses.

        Raises:
            OSError: the process has no descriptors or no addresses left.
        """
        try:
            self.open()
        except OSError:
            if len(self.blocks.lengths) > 1:
                raise  # bytes without a block, of messages that are not taken, have places here
            before = self.nbytes, self.blocks
            self.nbytes, self.blocks = self.max_bytes, Blocks(self.max_bytes, mmap.PAGESIZE)
            try:
                self.open()
            except BaseException:
                self.nbytes, self.blocks = before
                raise
            first = self.allocate(place.nbytes)
            if first is None:
                raise AssertionError("a block is larger than the arena") from None
            return first
        return place

    @property
    def memory_limit(self) -> int:
        """The number of bytes of memory beyond which idle memory is taken."""
        return self.max_bytes + self.lost_bytes

    def has_space_beside(self, kept: Iterable[Range]) -> bool:
        """Return whether a block of the maximum size has a place if only the kept ranges are in use."""
        stops = [(start, start + length) for start, length in kept]
        free = gaps(0, self.nbytes, stops, mmap.PAGESIZE)
        return any(length >= self.max_bytes for _, length in free)


def _address_bytes(arena_bytes: int) -> int:
    """Return the size of a segment in bytes; smaller in a process with limits on addresses or files."""
    wanted = ADDRESSES_PER_BYTE * whole_pages(arena_bytes)
    limits = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    is_limited = any(limit != resource.RLIM_INFINITY for limit in limits)
    return 2 * whole_pages(arena_bytes) if is_limited or wanted > _MAX_ADDRESSES else wanted
