"""The segments of peers that are mapped in this process, and the blocks in them that are sent on.

A tensor in a segment of a peer is *forwarded* without a copy: this process announces the same block to
another reader, and keeps it until that reader has released it.

    owner --announces--> this process --forwards--> reader
      ^                     |     ^                    |
      '------ releases -----'     '----- releases -----'

- If this process is killed, the reader has the token of the owner, which waits for its end.
- Sending promises that the tensor may change afterwards. So the block is *isolated* first: the pages of the
  block become private here, and the reader maps the segment privately. Writes then replace pages with copies
  that no other process sees. If a page is a copy already, the tensor is copied.
- Only tensors of at least a page are forwarded. Their blocks have whole pages, so isolating a block does not
  affect others.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from mmap import PAGESIZE
from typing import NamedTuple

import msgspec

from aiotensor.memory.arena import WHERE, PinnedBlock
from aiotensor.memory.landing import LandingSegment
from aiotensor.memory.mapping import Mapping, TokenEnd, pages_of
from aiotensor.memory.source import Source, is_flat
from aiotensor.protocol.pages import gaps
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.descriptors import Descriptor

__all__ = [
    "BlockUse",
    "ForeignExtent",
    "ForeignSegment",
    "Forwardable",
    "ForwardedBlock",
    "LeasedSegment",
    "PeerMemory",
    "find_leased",
    "mapped_segments",
]


class PeerMemory(msgspec.Struct, eq=False):
    """The segments of one sender, publisher or rank.

    Attributes:
        arena_bytes: the maximum number of bytes in its arena and in the arenas from which it forwards blocks.
        release: called with the number of each block that the peer may use again; None once the peer is gone.
        segments: the mapped segments, including segments that only living tensors still use, by number.
    """

    arena_bytes: int
    release: Callable[[int], None] | None
    segments: "dict[int, LeasedSegment]" = {}

    @property
    def leases(self) -> int:
        """The number of living tensors that lease blocks."""
        return sum(len(segment.leases) for segment in self.segments.values())

    @property
    def leased_bytes(self) -> int:
        """The number of bytes of the tensors that lease blocks."""
        return sum(stop - start for one in self.segments.values() for start, stop in one.leases.values())


class BlockUse(msgspec.Struct, eq=False):
    """A block of a peer, and its tensors.

    Attributes:
        start: the position of the first byte of its tensors in the segment.
        stop: the position after the last byte of its tensors.
        leases: the number of its living tensors.
        pins: the number of its tensors for each of which the block is still to be released once.
        isolated: the ranges of its pages that were made private, as (start, stop), for forwarding.
    """

    start: int
    stop: int
    leases: int = 0
    pins: int = 0
    isolated: list[tuple[int, int]] = []


class LeasedSegment(msgspec.Struct, eq=False, weakref=True):
    """A segment of a peer, and the living tensors over it.

    Attributes:
        number: its number on the connection.
        mapped: its mapping.
        memory: the memory of the peer.
        arena_bytes: the maximum number of bytes in the arena of its owner.
        landing: stores the bytes that a peer on another machine moves to it; None on one machine.
        is_attached: whether the peer may place tensors in it.
        leases: the range of each living tensor, by the number of its lease.
        uses: the blocks of these tensors, by their numbers.
        dropping: the blocks whose copied pages are being dropped in the worker, by their numbers.
        returns_memory: whether memory that no tensor here uses is returned to the system.
        lingering_bytes: its part of `Mappings.lingering_bytes`.
        forwarder: if the peer forwards blocks of this segment, the descriptor that it has sent. It keeps the
            page locks of the peer until all frames of the peer were read, even if the peer is killed.
        owner: the reading end of the token of the owner; None on another machine.
        owner_end: watches that token after the peer is gone.
        forwards: the segment as it is forwarded, by the queue to which the end of the mapping is reported.
    """

    number: int
    mapped: Mapping
    memory: PeerMemory
    arena_bytes: int
    landing: LandingSegment | None = None
    is_attached: bool = True
    leases: dict[int, tuple[int, int]] = {}
    uses: dict[int, BlockUse] = {}
    dropping: dict[int, BlockUse] = {}
    returns_memory: bool = False
    lingering_bytes: int = 0
    forwarder: Descriptor | None = None
    owner: Descriptor | None = None
    owner_end: TokenEnd | None = None
    forwards: "dict[FreedItems[ForeignSegment], ForeignSegment]" = {}

    def overlaps(self, block: int, start: int, stop: int) -> bool:
        """Return whether another block that is in use has a page in a range; only for forwarded blocks."""
        others = [*self.dropping.values(), *(use for number, use in self.uses.items() if number != block)]
        return gaps(start, stop, [(use.start, use.stop) for use in others], PAGESIZE) != [
            pages_of(start, stop)
        ]

    def detach(self) -> None:
        """Place no more tensors in it."""
        self.is_attached, self.forwarder = False, None
        if self.landing is not None:
            self.landing.close()

    def unmapped(self) -> None:
        """Report the end of the mapping to the objects that forward its blocks."""
        for queue, foreign in list(self.forwards.items()):
            queue(foreign)
        self.forwards.clear()


class ForeignSegment(msgspec.Struct, eq=False):
    """A segment of a peer, as it is attached to the readers to which its blocks are forwarded.

    Attributes:
        number: its number on the connections to these readers.
        segment: the segment.
        locks: the descriptor of this process, which has its page locks.
        end: the reading end of the token of the owner.
        tokens: the tokens of this process.
        in_use: the pages of the forwarded blocks that are in use, as (start, stop).
        is_unmapped: whether the mapping of this process ends, apart from the forwarded blocks.
    """

    number: int
    segment: LeasedSegment
    locks: Descriptor
    end: Descriptor
    tokens: Sequence[Descriptor]
    in_use: "dict[ForwardedBlock, tuple[int, int]]" = {}
    is_unmapped: bool = False

    def overlaps(self, start: int, stop: int) -> bool:
        """Return whether a block that is in use has a page in a range.

        A reader that has written to such a page has its own copy of it, which would hide another block.
        """
        return any(start < one_stop and one_start < stop for one_start, one_stop in self.in_use.values())


class ForeignExtent(msgspec.Struct, frozen=True):
    """The range of a segment of a peer that a forwarded tensor occupies."""

    segment: ForeignSegment
    offset: int
    nbytes: int

    def describe(self, inner_offset: int) -> bytes:
        """Encode the position of a byte of the tensor, for the receiver."""
        return WHERE.pack(self.segment.number, self.offset + inner_offset)


class ForwardedBlock(PinnedBlock, kw_only=True):
    """A forwarded block; its source keeps the block of the peer leased."""

    place: ForeignExtent
    source: Source | None


class Forwardable(NamedTuple):
    """A tensor in a block of a peer, which can be forwarded."""

    segment: LeasedSegment
    use: BlockUse
    offset: int

    def isolate(self, source: Source) -> bool:
        """Keep later writes to a tensor in this process; return whether there were none after earlier calls.

        Do not call this on the event loop unless it is quick: 150 MiB take 5 ms if they were read. The
        argument keeps the block in use during the call.
        """
        use, mapped = self.use, self.segment.mapped
        start, stop = self.pages(source)
        with _isolating:
            is_first = not (mapped.is_private or use.isolated)
            if not mapped.is_private:
                for one, length in gaps(start, stop, use.isolated, PAGESIZE):
                    if not mapped.isolate(one, one + length):
                        return False
                    use.isolated.append((one, one + length))
            return is_first or not mapped.has_copies(start, stop)

    def pages(self, source: Source) -> tuple[int, int]:
        """Return the range of the pages that contain the tensor, as (start, stop)."""
        start, length = pages_of(self.offset, self.offset + source.nbytes)
        return start, start + length


# The mapped segments by their addresses. Senders look up tensors here in any thread; while a tensor lives,
# its segment stays mapped, and its block stays in use.
mapped_segments: dict[int, weakref.ref[LeasedSegment]] = {}


_isolating = threading.Lock()  # a second sender of a block waits until its pages are private


def find_leased(source: Source) -> Forwardable | None:
    """Find the block of a peer that contains the bytes of a tensor; None if there is none."""
    start = source.data_ptr()
    for reference in list(mapped_segments.values()):
        segment = reference()
        if segment is None:
            continue
        offset = start - segment.mapped.address
        if 0 <= offset < segment.mapped.nbytes:
            if offset % source.dtype.itemsize == 0 and is_flat(source):
                for use in list(segment.uses.values()):
                    if use.start <= offset and offset + source.nbytes <= use.stop:
                        return Forwardable(segment, use, offset)
            return None
    return None
