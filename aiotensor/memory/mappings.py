"""The segments of peers that are mapped here, the leases of living tensors in them, and forwarding.

A segment stays mapped while its peer is connected, or a tensor over it lives. A block is released to the peer
when the tensor over it is freed. Once the process of the peer no longer uses the segment, all its memory that
no tensor uses is returned to the system.

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

import asyncio
import errno
import math
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.memory.arena import WHERE, PinnedBlock, whole_pages
from aiotensor.memory.landing import LandingSegment
from aiotensor.memory.mapping import Mapping, TokenEnd, open_segment, pages_of
from aiotensor.memory.pages import gaps
from aiotensor.memory.source import Source, is_flat
from aiotensor.memory.tensors import (
    DTYPES,
    MAX_INLINE_BYTES,
    Watch,
    open_empty,
    unknown_dtype,
    view_over,
    with_attributes,
)
from aiotensor.protocol.frames import ARENA, FORWARDED, INLINE, Attach, PlacedTensor, Put
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.descriptors import Descriptor
from aiotensor.runtime.worker import Worker
from aiotensor.transports.base import Mover


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

    def lock(self, block: int, start: int, stop: int) -> None:
        """Lock the pages of a tensor in a forwarded block.

        Raises:
            ProtocolError: another block that is in use has one of these pages.
            RefusedError: the system has no memory left for a lock.
        """
        others = [*self.dropping.values(), *(use for number, use in self.uses.items() if number != block)]
        free = gaps(start, stop, [(use.start, use.stop) for use in others], mmap.PAGESIZE)
        if free != [pages_of(start, stop)]:
            raise ProtocolError(f"it forwarded block {block} in pages of another one")
        try:
            self.mapped.lock(start, stop)
        except OSError as error:
            raise RefusedError(f"its memory cannot be locked by this process: {error}") from error

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

    def close(self) -> None:
        """Release the descriptors; a block of a closed object may still refer to this segment."""
        self.locks = self.end = Descriptor(-1)
        self.tokens = ()


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
                for one, length in gaps(start, stop, use.isolated, mmap.PAGESIZE):
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


_LOCKS_S = 0.05  # longer than the kernel needs to release all locks of a process that has ended


class _Lease(msgspec.Struct, frozen=True):
    """The lease of a block by a living tensor."""

    segment: LeasedSegment
    block: int
    watch: Watch


class Mappings:
    """The memory of all peers of one receiver or subscriber; belongs to the running loop.

    Args:
        are_private: whether segments are mapped privately, so that other processes do not see writes to a
            tensor. If so, the copied pages of a block are dropped before the block is released.

    Attributes:
        freed: the freed tensors whose blocks have not been released yet.
        leased_bytes: the number of bytes of the tensors that lease blocks.
        peak_leased_bytes: the maximum of `leased_bytes` so far.
        lingering_bytes: the number of bytes of segments that living tensors use after their peer is gone.
    """

    def __init__(self, *, are_private: bool = False) -> None:
        self._are_private = are_private
        self.leased_bytes = self.peak_leased_bytes = 0
        self.lingering_bytes = 0
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 0
        self._is_closed = False
        self.freed: FreedItems[Watch] = FreedItems(self._leases_ended)
        self._worker = Worker("aiotensor-receiver")

    @property
    def leases(self) -> int:
        """The number of living tensors that lease blocks."""
        return len(self._leases)

    async def settle(self) -> None:
        """Wait until the worker has unmapped all segments that are no longer used."""
        await self._worker.settle()

    def close(self) -> None:
        """Stop the worker; a segment that living tensors use is unmapped when the last of them is freed."""
        self._is_closed = True
        for segment in {lease.segment for lease in self._leases.values()}:
            mapped_segments.pop(segment.mapped.address, None)
            segment.unmapped()
            if segment.owner_end is not None:
                segment.owner_end.cancel()
            segment.mapped.close()
        self._worker.close()

    def attach(self, memory: PeerMemory, attach: Attach, mover: Mover | None, descriptors: list[int]) -> None:
        """Map a segment of a peer, or create the landing segment for a peer on another machine.

        Args:
            memory: the memory of the peer.
            attach: the frame that describes the segment.
            mover: the mover of the connection to the peer; None on one machine.
            descriptors: the descriptors that arrived with the frame, which are removed from the list, even
                if an error is raised.

        Raises:
            ProtocolError: the segment differs from its description, or is not sealed.
            OSError: the segment cannot be mapped here, or no descriptors are left.
        """
        number, nbytes, count = attach.segment, attach.nbytes, attach.tokens + 1
        is_forwarded = attach.placement == FORWARDED
        given = [Descriptor(one) for one in descriptors[:count]]
        del descriptors[:count]
        if number in memory.segments:  # detached, but used by tensors
            raise ProtocolError(f"it attached segment {number} again")
        if is_forwarded and mover is not None:
            raise ProtocolError("it forwarded memory to another machine")
        landing = None
        if mover is None:
            if len(given) < count:
                raise OSError(
                    errno.EMFILE,
                    "its descriptors did not arrive: no descriptors are left in this process (ulimit -n)",
                )
            if not all(stat.S_ISFIFO(os.fstat(one.number).st_mode) for one in given[1:]):
                raise ProtocolError("it attached a segment with a token that is not a pipe")
            mapped = open_segment(
                given[0].number,
                nbytes,
                given[2:],
                is_private=self._are_private or is_forwarded,
                locks_all=not is_forwarded,
            )
        else:
            if memory.segments:  # also detached ones, whose memory is still in use
                raise ProtocolError("it attached a second segment from another machine")
            landing = LandingSegment(number, nbytes, memory.arena_bytes, self._worker)
            mover.land(number, landing)
            mapped = landing.mapped
        arena_bytes = attach.arena_bytes if is_forwarded else min(memory.arena_bytes, nbytes)
        segment = memory.segments[number] = LeasedSegment(number, mapped, memory, arena_bytes, landing)
        if mover is None:
            segment.owner = given[1] if count > 1 else None
            mapped_segments[mapped.address] = weakref.ref(segment)
        if is_forwarded:
            memory.arena_bytes += attach.arena_bytes
            segment.forwarder = given[0]

    def open(self, memory: PeerMemory, put: Put | PlacedTensor) -> torch.Tensor:
        """Return a tensor that has arrived; its block is released when the storage of the tensor is freed.

        Raises:
            ProtocolError: the frame describes an impossible tensor, or an unknown dtype, placement or
                segment.
            RefusedError: the system has no memory left to lock a forwarded block.
        """
        dtype, payload = DTYPES.get(put.dtype), put.payload
        if dtype is None:
            raise unknown_dtype(put.dtype)
        if put.placement == INLINE:
            if len(payload) > MAX_INLINE_BYTES:
                raise ProtocolError(
                    f"the peer sent {len(payload)} bytes inline, more than {MAX_INLINE_BYTES}"
                )
            if payload and len(payload) == math.prod(put.shape) * dtype.itemsize:
                tensor, _ = view_over(bytearray(payload), 0, dtype, put.shape)
            else:
                tensor = open_empty(len(payload), dtype, put.shape)
        elif put.placement != ARENA:
            raise ProtocolError(f"the peer used the unknown placement {put.placement[:64]!r} for a tensor")
        elif len(payload) != WHERE.size:
            raise ProtocolError(f"the peer sent an invalid position of a tensor, of {len(payload)} bytes")
        else:
            number, offset = WHERE.unpack(payload)
            segment = memory.segments.get(number)
            if segment is None or not segment.is_attached:
                raise ProtocolError(f"the peer placed a tensor in segment {number}, which it never attached")
            if put.block is None:
                raise ProtocolError("it placed a tensor in a block without a number")
            tensor, owner = segment.mapped.tensor(offset, dtype, put.shape)
            block, stop = put.block, offset + owner.nbytes
            if segment.forwarder is not None:
                segment.lock(block, offset, stop)
            lease = self._next_lease
            self._next_lease += 1
            watch = Watch(owner, self.freed)
            watch.number = lease
            self._leases[lease] = _Lease(segment, block, watch)
            segment.leases[lease] = offset, stop
            use = segment.uses.get(block)
            if use is None:
                segment.uses[block] = BlockUse(offset, stop, 1, 1)
            else:
                use.start, use.stop = min(use.start, offset), max(use.stop, stop)
                use.leases += 1
                use.pins += 1
            self.leased_bytes += owner.nbytes
            self.peak_leased_bytes = max(self.peak_leased_bytes, self.leased_bytes)
        return tensor if put.attributes is None else with_attributes(tensor, put.attributes)

    def detach(self, memory: PeerMemory, number: int) -> None:
        """Unmap a segment in which the peer places no more tensors, as soon as no tensor uses it."""
        segment = memory.segments.get(number)
        if segment is None:
            return
        if segment.forwarder is not None:
            memory.arena_bytes -= segment.arena_bytes
        segment.detach()
        if not segment.leases:
            self._unmap(segment)

    def peer_gone(self, memory: PeerMemory) -> None:
        """Handle a peer that is gone: unmap each of its segments that no living tensor uses."""
        memory.release = None
        for segment in list(memory.segments.values()):
            segment.detach()
            if not segment.leases:
                self._unmap(segment)
            elif not segment.returns_memory:
                # The address range of a segment is larger than the memory that it may have.
                self._set_lingering(segment, min(segment.mapped.nbytes, whole_pages(segment.arena_bytes)))
                if segment.owner is None:
                    self._take_over(segment)
                elif segment.owner_end is None:
                    # The kernel may close the token of a killed process before the descriptor of its locks.
                    later = asyncio.get_running_loop().call_later
                    owner_gone = partial(later, _LOCKS_S, self._take_over, segment)
                    segment.owner_end = TokenEnd(segment.owner, owner_gone)
                    self._trim(segment)  # so that other processes can return memory that is unused here

    def _take_over(self, segment: LeasedSegment) -> None:
        """Return unused memory to the system from now on, because the owner has unmapped the segment."""
        segment.returns_memory = True
        self._trim(segment)

    def _leases_ended(self, watches: Sequence[Watch]) -> None:
        lingering = set()
        for watch in watches:
            number = watch.number
            lease = self._leases.pop(number)
            segment = lease.segment
            start, stop = segment.leases.pop(number)
            self.leased_bytes -= stop - start
            use = segment.uses[lease.block]
            use.leases -= 1
            if not use.leases:
                del segment.uses[lease.block]
            if not (segment.mapped.is_private or use.isolated):
                use.pins -= 1
                if (release := segment.memory.release) is not None:
                    release(lease.block)
            elif not (use.leases or self._is_closed):
                self._drop_copies(segment, lease.block, use)
            if not segment.is_attached:
                lingering.add(segment)
        for segment in lingering:
            if not segment.leases:
                self._unmap(segment)
            elif segment.returns_memory:
                self._trim(segment)

    def _drop_copies(self, segment: LeasedSegment, block: int, use: BlockUse) -> None:
        """Drop the copied pages of a block after its last lease, and then release the block.

        They cannot be dropped earlier, because another tensor of the block may use one of these pages.
        """
        mapped, start, stop = segment.mapped, use.start, use.stop
        # Returning the memory of an owner that is gone may take long, even if it was never read here.
        unlocks = segment.forwarder is not None and not mapped.unlock(start, stop)
        drop = partial(mapped.drop_copies, start, stop, unlocks=unlocks)
        if not unlocks and mapped.is_quick(start, stop):
            with suppress(OSError):  # the process has too little memory for now, and the worker tries again
                drop()
                self._dropped(segment, block, use)
                return
        segment.dropping[block] = use
        self._worker.begin("dropping copied pages", drop, partial(self._dropped, segment, block, use))

    def _dropped(self, segment: LeasedSegment, block: int, use: "BlockUse") -> None:
        segment.dropping.pop(block, None)
        release = segment.memory.release
        if release is None:
            return  # the peer has gone in the meantime
        for _ in range(use.pins):
            release(block)
        if not (segment.is_attached or segment.leases):
            self._unmap(segment)  # it was detached while the tensors still lived

    def _set_lingering(self, segment: LeasedSegment, nbytes: int) -> None:
        self.lingering_bytes += nbytes - segment.lingering_bytes
        segment.lingering_bytes = nbytes

    def _trim(self, segment: LeasedSegment) -> None:
        """Return the memory that no tensor here uses to the system."""
        if self._is_closed:
            return
        unused = gaps(0, segment.mapped.nbytes, list(segment.leases.values()), mmap.PAGESIZE)
        if segment.returns_memory:
            self._set_lingering(segment, segment.mapped.nbytes - sum(length for _, length in unused))
        # In the worker, because returning much memory takes milliseconds.
        self._worker.begin("returning memory", partial(segment.mapped.remove, unused))

    def _unmap(self, segment: LeasedSegment) -> None:
        memory = segment.memory
        if memory.segments.pop(segment.number, None) is None:
            return  # it was unmapped for another of its blocks
        mapped_segments.pop(segment.mapped.address, None)
        segment.unmapped()
        self._set_lingering(segment, 0)
        if segment.owner_end is not None:
            segment.owner_end.cancel()
        if self._is_closed:
            segment.mapped.close()
            return
        # In the worker, because returning and unmapping much memory takes milliseconds.
        if memory.release is None:
            # Other readers of a peer that is gone may keep the segment mapped, and with it the memory that
            # only this process has used.
            everything = [(0, segment.mapped.nbytes)]
            self._worker.begin("returning memory", partial(segment.mapped.remove, everything))
        self._worker.begin("unmapping", segment.mapped.close)
