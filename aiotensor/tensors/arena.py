"""The arena: the shared memory of one connection, cut into blocks, and kept warm between tensors.

Its segment has several times as many addresses as it may have memory: a block then finds a place in one
piece wherever the living ones lie. The descriptor goes over the connection once, both sides map it once, and
a tensor is then named by two numbers.

A memfd has no name, so no process leaves anything behind, and the size of ``/dev/shm`` does not matter. It is
sealed, so that nothing can turn a read into SIGBUS by shrinking it.
"""

import resource
import struct
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch

from aiotensor.errors import ProtocolError
from aiotensor.protocol.blocks import ADDRESSES_PER_BYTE
from aiotensor.protocol.pages import Range
from aiotensor.tensors.segments import Segment, whole_pages
from aiotensor.tensors.views import View, view_over

__all__ = ["Arena", "Extent", "read_where", "segment_bytes"]

_MAX_ADDRESSES = 1 << 44  # of 2**47 that a process has

_WHERE = struct.Struct("<QQ")  # segment, offset


class Extent(msgspec.Struct, frozen=True):
    """Where a block is."""

    segment: Segment
    offset: int
    nbytes: int

    @property
    def is_warm(self) -> bool:
        """Return whether the block has memory, so that writing to it takes no longer than the writing."""
        return self.segment.warm.has(self.offset, self.nbytes)

    def describe(self, inner_offset: int) -> bytes:
        """Name a byte of the block for the receiver."""
        return _WHERE.pack(self.segment.number, self.offset + inner_offset)

    def view(self) -> memoryview:
        """Return the memory of the block."""
        return self.segment.view(self.offset, self.nbytes)

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        """Return a tensor over the whole block."""
        return view_over(self.segment.memory, self.offset, dtype, shape, self.nbytes)


class Arena:
    """Hand out blocks of one segment; begin another when a receiver that is gone may still read the first.

    Args:
        nbytes: how many bytes of memory it may have.
        now: the clock that says how long a chunk has been idle.
        release: closes a segment that nothing here needs any more, at once or later.
    """

    def __init__(
        self, nbytes: int, now: Callable[[], float], release: Callable[[Segment], object] = Segment.close
    ) -> None:
        self._limit = whole_pages(nbytes)
        self._addresses = _address_bytes(nbytes)
        self._now = now
        self._release = release
        self._next_number = 0
        self._retired: list[Segment] = []
        self._segment = self._new_segment()

    def allocate(self, nbytes: int) -> Extent | None:
        """Take a block, or None if no free run is long enough."""
        segment = self._segment
        offset = segment.blocks.allocate(nbytes)
        if offset is None:
            return None
        segment.used.add(offset)
        return Extent(segment, offset, nbytes)

    def prepare(self, place: Extent) -> tuple[list[Range], list[Range]]:
        """Return what its segment is to give back and to fill, so that a block has memory."""
        return place.segment.prepare(place.offset, place.nbytes, self._limit)

    def free(self, place: Extent) -> None:
        """Take a block back; its memory stays warm for a while."""
        segment = place.segment
        segment.free(place.offset, place.nbytes, self._now())
        if segment.is_retired and not segment.used and segment in self._retired:
            self._retired.remove(segment)
            self._release(segment)

    @property
    def largest_free(self) -> int:
        """Return the bytes of the longest run of free addresses."""
        return self._segment.blocks.largest_free

    def detach(self, elsewhere: Iterable[Extent] = ()) -> Segment | None:
        """Note that the receiver is gone, and return the segment that is retired if it may still read some.

        Args:
            elsewhere: the blocks that it may still read: these must not be written to any more.
        """
        segment = self._segment
        segment.is_attached = False
        offsets = [place.offset for place in elsewhere if place.segment is segment]
        if not offsets:
            return None
        segment.retire(offsets)
        self._segment = self._new_segment()
        self._retired.append(segment)
        return segment

    def take_idle(self, before: float) -> tuple[Segment, list[Range]]:
        """Return the chunks that were left before a time, and their segment; see `Segment.return_memory`."""
        return self._segment, self._segment.take_idle(before)

    @property
    def warm_bytes(self) -> int:
        """Count the bytes that have memory, in use or not."""
        return sum(segment.warm.nbytes for segment in self.segments())

    def close(self) -> None:
        """Release all memory; a view that is left keeps its segment."""
        segments = list(self.segments())
        self._retired = []
        for segment in segments:
            self._release(segment)

    def segments(self) -> Iterator[Segment]:
        """Go through the present segment and the retired ones."""
        yield self._segment
        yield from self._retired

    def _new_segment(self) -> Segment:
        number = self._next_number
        self._next_number += 1
        return Segment(number, self._addresses)


def _address_bytes(arena_bytes: int) -> int:
    """Return how many bytes of addresses the segment of an arena has."""
    wanted = segment_bytes(arena_bytes)
    limits = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE))
    is_limited = any(limit != resource.RLIM_INFINITY for limit in limits)
    return whole_pages(arena_bytes) if is_limited or wanted > _MAX_ADDRESSES else wanted


def segment_bytes(arena_bytes: int) -> int:
    """Return the most bytes of addresses that the segment of an arena has."""
    return ADDRESSES_PER_BYTE * whole_pages(arena_bytes)


def read_where(payload: bytes) -> tuple[int, int]:
    """Return the segment and the offset that `Extent.describe` named.

    Raises:
        ProtocolError: the payload does not name any.
    """
    if len(payload) != _WHERE.size:
        raise ProtocolError(f"the peer placed a tensor by {len(payload)} bytes, which name no place")
    segment, offset = _WHERE.unpack(payload)
    return int(segment), int(offset)
