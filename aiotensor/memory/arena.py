"""The arena: the shared memory of one sender or publisher, divided into blocks and kept warm between tensors.

A segment has several times as many addresses as the arena may have memory, so that there is a contiguous
range for each block regardless of the positions of the others. The descriptor of a segment is sent once, and
both sides map it once. After that, the number of the segment and an offset identify the bytes of a tensor.

A memfd has no name, so a killed process leaves no file, and the size of ``/dev/shm`` does not matter. It is
sealed, because a process that shrank it would cause SIGBUS in the others.
"""

import resource
import struct
import time
from collections.abc import Callable, Iterator

import msgspec

from aiotensor.memory.segments import Segment, whole_pages
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.pages import Range

__all__ = ["WHERE", "Arena", "Block", "Extent", "PinnedBlock"]

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
    """

    number: int
    is_owned: bool = True
    sent: int = 0
    moves: int = 0

    @property
    def is_free(self) -> bool:
        """Whether it has no pin."""
        return not (self.is_owned or self.sent or self.moves)


class Block(PinnedBlock, kw_only=True):
    """A block of the arena, with the grant of its bytes."""

    place: Extent
    ticket: Ticket[Extent]


class Arena:
    """Allocate blocks in a segment, and replace the segment when a lost receiver may still read it.

    Args:
        nbytes: the maximum number of bytes of memory.
        release: closes a segment without blocks, immediately or later.
    """

    def __init__(self, nbytes: int, release: Callable[[Segment], object] = Segment.close) -> None:
        self._limit = whole_pages(nbytes)
        self._addresses = _address_bytes(nbytes)
        self._release = release
        self._next_number = 0
        self._retired: list[Segment] = []
        self._segment = self._new_segment()

    def allocate(self, nbytes: int) -> Extent | None:
        """Allocate a block; return None if no free run is long enough."""
        segment = self._segment
        offset = segment.blocks.allocate(nbytes)
        if offset is None:
            return None
        segment.used.add(offset)
        return Extent(segment, offset, nbytes)

    def prepare(self, place: Extent) -> tuple[list[Range], list[Range]]:
        """Return the ranges to return and to fill for the memory of a block, as `Segment.prepare` does."""
        return place.segment.prepare(place.offset, place.nbytes, self._limit)

    def free(self, place: Extent) -> None:
        """Free a block; its memory stays warm for a while."""
        segment = place.segment
        segment.free(place.offset, place.nbytes, time.monotonic())
        if segment.is_retired and not segment.used and segment in self._retired:
            self._retired.remove(segment)
            self._release(segment)

    @property
    def largest_free(self) -> int:
        """The size of the longest free run in bytes."""
        return self._segment.blocks.largest_free

    def retire(self, segment: Segment) -> None:
        """Place no more blocks in the current segment, because lost readers may still read it."""
        segment.is_retired = True
        self._retired.append(segment)
        self._segment = self._new_segment()

    def take_idle(self, before: float) -> tuple[Segment, list[Range]]:
        """Return the current segment, and its idle chunks that were last used before a time."""
        return self._segment, self._segment.take_idle(before)

    @property
    def warm_bytes(self) -> int:
        """The number of bytes that have memory, in use or not."""
        return sum(segment.warm.nbytes for segment in self.segments())

    def close(self) -> None:
        """Release all memory; remaining views keep their segments mapped."""
        segments = list(self.segments())
        self._retired = []
        for segment in segments:
            self._release(segment)

    def segments(self) -> Iterator[Segment]:
        """Iterate over the current segment and the retired ones."""
        yield self._segment
        yield from self._retired

    def next_number(self) -> int:
        """Return the number of a new segment, or of a segment of a peer whose blocks are forwarded."""
        self._next_number += 1
        return self._next_number - 1

    def _new_segment(self) -> Segment:
        return Segment(self.next_number(), self._addresses)


def _address_bytes(arena_bytes: int) -> int:
    """Return the size of a segment in bytes; smaller in a process with limits on addresses or files."""
    wanted = ADDRESSES_PER_BYTE * whole_pages(arena_bytes)
    limits = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    is_limited = any(limit != resource.RLIM_INFINITY for limit in limits)
    return whole_pages(arena_bytes) if is_limited or wanted > _MAX_ADDRESSES else wanted
