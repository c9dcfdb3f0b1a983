"""The arena: one sealed memfd for each connection, cut into blocks, and kept warm between tensors.

A segment is a memfd of the size of the whole arena. It is sparse: the kernel gives it memory a chunk at a
time, when a block first lies there, and those pages stay for the next block. Fresh pages cost several times
what the copy costs, so that is where the time goes; warm ones cost the copy alone. The descriptor goes over
the link once, both sides map it once, and a tensor is then named by two numbers.

A memfd has no name, so nothing is left behind whoever is killed when, and the size of ``/dev/shm`` does
not matter. It is sealed, so that nobody can turn a read into SIGBUS by shrinking it.
"""

import errno
import fcntl
import math
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import torch

from aiotensor.errors import ProtocolError
from aiotensor.placements.views import View, view_over
from aiotensor.protocol.blocks import Blocks

__all__ = [
    "Arena",
    "MappedSegment",
    "Place",
    "Segment",
    "open_segment",
    "read_where",
    "segment_bytes",
]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE = 23  # the module `mmap` of Python 3.11 has no name for it

# Memory is taken from the kernel, and given back, in chunks of this size.
_CHUNK_BYTES = 1 << 20

_WHERE = struct.Struct("<QQ")  # segment, offset


class Segment:
    """One memfd, mapped here, and the blocks in it.

    Everything but `fill`, `give_back` and `close` belongs to the event loop's thread; they may take long, and
    run in the worker.

    Args:
        number: what the other side calls it.
        nbytes: how much it can hold.
    """

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = segment_bytes(nbytes)
        self.blocks = Blocks(self.nbytes)
        self.descriptor = -1
        self.is_attached = False  # the other side has it
        self.is_retired = False  # nothing new is placed in it
        self._mapping: mmap.mmap | None = None
        self.memory = memoryview(b"")  # all of it, while it is open
        self._warm = bytearray()  # a one for each chunk that has memory
        self._leaving: set[int] = set()  # chunks to be given back, unless they are filled before
        self._changing = threading.Lock()  # filling a chunk and giving it back exclude each other
        self._left = np.zeros(0)  # when a chunk was last left by a block

    def open(self) -> None:
        """Make the memfd, if it is not there yet; it takes no memory by itself.

        Raises:
            OSError: the process has no descriptors or no addresses left.
        """
        if self._mapping is not None:
            return
        if self.nbytes > sys.maxsize:  # of so many bytes no call of the kernel could be told
            raise OSError(errno.ENOMEM, f"no process has {self.nbytes} bytes of addresses")
        descriptor = os.memfd_create("aiotensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, self.nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(descriptor, self.nbytes)
            chunks = len(_chunks(0, self.nbytes))
            self._warm = bytearray(chunks)
            self._left = np.zeros(chunks)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self.memory = memoryview(mapping)
        self._mapping = mapping

    @property
    def is_open(self) -> bool:
        """Say whether it is mapped here."""
        return self._mapping is not None

    def close(self) -> None:
        """Let go of the memory, once; whoever still has a view of it keeps it."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            self.memory = memoryview(b"")
            os.close(self.descriptor)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return some of the memory, writable; the mapping lives at least as long as the view."""
        return self.memory[offset : offset + nbytes]

    def is_warm(self, offset: int, nbytes: int) -> bool:
        """Say whether all of a range has memory."""
        first, last = offset // _CHUNK_BYTES, (offset + nbytes - 1) // _CHUNK_BYTES
        return not self._warm.count(0, first, last + 1)

    def cold(self, offset: int, nbytes: int) -> list[int]:
        """List the chunks of a range that have no memory yet."""
        return [chunk for chunk in _chunks(offset, nbytes) if not self._warm[chunk]]

    def fill(self, chunks: list[int]) -> None:
        """Get memory for chunks, and map it. Not for the event loop.

        Raises:
            OSError: the machine has no memory left (ENOSPC, ENOMEM).
        """
        for chunk in chunks:
            start, length = self._chunk(chunk)
            with self._changing:
                self._leaving.discard(chunk)
                # Not by touching the pages: where memory is short that would be a signal and not an error.
                os.posix_fallocate(self.descriptor, start, length)
                mapping = self._mapping
                if mapping is not None:
                    _populate(mapping, start, length)

    def filled(self, chunks: list[int]) -> None:
        """Note that chunks have memory."""
        for chunk in chunks:
            self._warm[chunk] = 1

    def leave(self, offset: int, nbytes: int, now: float) -> None:
        """Note when a block left its chunks."""
        chunks = _chunks(offset, nbytes)
        self._left[chunks.start : chunks.stop] = now

    def take_idle(self, before: float) -> list[int]:
        """Return the chunks that are in no block and were left before a time; they count as cold now."""
        idle = [chunk for chunk in self._idle() if self._left[chunk] <= before]
        for chunk in idle:
            self._warm[chunk] = 0
        self._leaving.update(idle)
        return idle

    @property
    def has_idle(self) -> bool:
        """Say whether there are warm chunks in no block."""
        return any(True for _ in self._idle())

    def _idle(self) -> Iterator[int]:
        if self._mapping is None:
            return
        for start, stop in self.blocks.free_runs():
            # The last chunk of the segment may be shorter than the others.
            last = stop // _CHUNK_BYTES if stop < self.blocks.size else -(-stop // _CHUNK_BYTES)
            chunk = self._warm.find(1, -(-start // _CHUNK_BYTES), last)
            while chunk >= 0:
                yield chunk
                chunk = self._warm.find(1, chunk + 1, last)

    @property
    def warm_bytes(self) -> int:
        """Count the bytes that have memory."""
        nbytes = self._warm.count(1) * _CHUNK_BYTES
        if nbytes and self._warm[-1]:
            nbytes -= len(self._warm) * _CHUNK_BYTES - self.nbytes  # the last one may be shorter
        return nbytes

    def give_back(self, chunks: list[int]) -> None:
        """Give the memory of chunks back to the kernel. Not for the event loop."""
        for chunk in chunks:
            with self._changing:
                mapping = self._mapping
                if chunk in self._leaving and mapping is not None:
                    self._leaving.discard(chunk)
                    mapping.madvise(mmap.MADV_REMOVE, *self._chunk(chunk))

    def _chunk(self, chunk: int) -> tuple[int, int]:
        start = chunk * _CHUNK_BYTES
        return start, min(_CHUNK_BYTES, self.nbytes - start)


def _populate(mapping: mmap.mmap, start: int, length: int) -> None:
    try:
        mapping.madvise(_MADV_POPULATE_WRITE, start, length)
    except OSError:
        return  # kernels before 5.14 cannot: the pages are mapped when they are first written


def _chunks(offset: int, nbytes: int) -> range:
    return range(offset // _CHUNK_BYTES, (offset + nbytes - 1) // _CHUNK_BYTES + 1)


class Place(msgspec.Struct, frozen=True):
    """Where a block is."""

    segment: Segment
    offset: int
    nbytes: int

    @property
    def is_warm(self) -> bool:
        """Say whether the block has memory, so that writing to it takes no longer than the writing."""
        return self.segment.is_warm(self.offset, self.nbytes)

    @property
    def cold(self) -> list[int]:
        """List the chunks of the block that have no memory yet."""
        return self.segment.cold(self.offset, self.nbytes)

    def describe(self, inner_offset: int) -> bytes:
        """Name a byte of the block for the other side."""
        return _WHERE.pack(self.segment.number, self.offset + inner_offset)

    def view(self) -> memoryview:
        """Return the memory of the block."""
        return self.segment.view(self.offset, self.nbytes)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        """Return a tensor over the whole block."""
        return view_over(self.segment.memory, self.offset, dtype, shape, self.nbytes)


class Arena:
    """Hand out blocks of one segment; begin another when a peer that is gone may still read the first.

    Args:
        nbytes: how much it holds.
        now: the clock that says how long a chunk has been idle.
        let_go: closes a segment that nobody here needs any more, at once or later.
    """

    def __init__(
        self, nbytes: int, now: Callable[[], float], let_go: Callable[[Segment], object] = Segment.close
    ) -> None:
        self._nbytes = nbytes
        self._now = now
        self._let_go = let_go
        self._next_number = 0
        self._retired: list[Segment] = []
        self._segment = self._new_segment()

    def allocate(self, nbytes: int) -> Place | None:
        """Take a block, or None if no free stretch is long enough."""
        offset = self._segment.blocks.allocate(nbytes)
        return None if offset is None else Place(self._segment, offset, nbytes)

    def free(self, place: Place) -> None:
        """Give a block back; its memory stays warm for a while."""
        segment = place.segment
        segment.blocks.free(place.offset)
        segment.leave(place.offset, place.nbytes, self._now())
        if segment in self._retired and not segment.blocks.in_use:
            self._retired.remove(segment)
            self._let_go(segment)

    def detach(self, *, retire: bool) -> None:
        """Note that the other side is gone.

        Args:
            retire: views of the memory may live on there, so that nothing may be written to it any more.
        """
        segment = self._segment
        segment.is_attached = False
        if retire:
            segment.is_retired = True
            self._segment = self._new_segment()
            if segment.blocks.in_use:
                self._retired.append(segment)
            else:
                self._let_go(segment)

    def take_idle(self, before: float) -> tuple[Segment, list[int]]:
        """Return the chunks that were left before a time, and their segment; see `Segment.give_back`."""
        return self._segment, self._segment.take_idle(before)

    @property
    def warm_bytes(self) -> int:
        """Count the bytes that have memory, in use or not."""
        return sum(segment.warm_bytes for segment in self._segments())

    def close(self) -> None:
        """Let go of all memory; whoever has a view of some keeps that segment."""
        retired, self._retired = self._retired, []
        for segment in (self._segment, *retired):
            self._let_go(segment)

    def _segments(self) -> Iterator[Segment]:
        yield self._segment
        yield from self._retired

    def _new_segment(self) -> Segment:
        number = self._next_number
        self._next_number += 1
        return Segment(number, self._nbytes)


class MappedSegment:
    """A segment of the other side, mapped here.

    Args:
        mapping: the memory.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self.nbytes = len(mapping)
        self._view: memoryview | None = memoryview(mapping)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        """Return a tensor over some of the memory.

        Raises:
            ProtocolError: the range is not within the segment.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self._view is None or not nbytes or offset % dtype.itemsize or offset + nbytes > self.nbytes:
            raise ProtocolError(
                f"the peer placed a tensor of {nbytes} bytes at byte {offset} of a segment of {self.nbytes}"
            )
        return view_over(self._view, offset, dtype, shape, nbytes)

    def close(self) -> None:
        """Let go of the memory; the last view of it unmaps it."""
        self._view = None


def open_segment(descriptor: int, nbytes: int) -> MappedSegment:
    """Map a segment that was sent. The descriptor stays the caller's.

    Raises:
        ProtocolError: it is not a sealed memfd of this size.
        OSError: this process has no room or no descriptors left to map it.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # it is no memfd at all
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the peer shared memory that could shrink while it is read")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        # There may be none left to fill a hole that the peer makes, and to read there is then SIGBUS.
        raise ProtocolError("the peer shared memory of huge pages, which are not to be had at any time")
    size = os.fstat(descriptor).st_size
    if size != nbytes or not nbytes:
        raise ProtocolError(f"the peer shared {size} bytes of memory and announced {nbytes}")
    return MappedSegment(mmap.mmap(descriptor, nbytes))


def segment_bytes(arena_bytes: int) -> int:
    """Return the size of the segment that holds an arena."""
    return -(-arena_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def read_where(payload: bytes) -> tuple[int, int]:
    """Return the segment and the offset that `Place.describe` named.

    Raises:
        ProtocolError: the payload does not name any.
    """
    if len(payload) != _WHERE.size:
        raise ProtocolError(f"the peer placed a tensor by {len(payload)} bytes, which name no place")
    segment, offset = _WHERE.unpack(payload)
    return int(segment), int(offset)
