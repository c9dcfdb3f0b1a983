"""The segments of peers that are mapped here, and the leases of living tensors in them.

A segment stays mapped while its peer is connected, or a tensor over it lives. A block is released to the peer
when the tensor over it is freed. Once the process of the peer no longer uses the segment, all its memory that
no tensor uses is returned to the system.
"""

import asyncio
import contextlib
import errno
import mmap
import os
import resource
import stat
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec
import torch

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.memory.arena import WHERE
from aiotensor.memory.inline import MAX_INLINE_BYTES, open_inline
from aiotensor.memory.landing import LandingSegment
from aiotensor.memory.leased import BlockUse, LeasedSegment, PeerMemory, mapped_segments
from aiotensor.memory.mapping import TokenEnd, open_segment
from aiotensor.memory.raw import DTYPES, unknown_dtype
from aiotensor.memory.segments import whole_pages
from aiotensor.memory.views import Owner, Watch, with_attributes
from aiotensor.protocol.frames import ARENA, FORWARDED, INLINE, Attach, PlacedTensor, Put
from aiotensor.protocol.pages import gaps
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.descriptors import Descriptor
from aiotensor.runtime.worker import Worker
from aiotensor.transports.base import Mover

__all__ = ["Mappings", "PeerMemory"]

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
            RefusedError: this process has a limit on its address space, and too little of it is free.
            OSError: the segment cannot be mapped here for another reason, or no descriptors are left.
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
        with _too_few_addresses(nbytes):
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
        """
        dtype, payload = DTYPES.get(put.dtype), put.payload
        if dtype is None:
            raise unknown_dtype(put.dtype)
        if put.placement == INLINE:
            if len(payload) > MAX_INLINE_BYTES:
                raise ProtocolError(
                    f"the peer sent {len(payload)} bytes inline, more than {MAX_INLINE_BYTES}"
                )
            tensor = open_inline(payload, dtype, put.shape)
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
            self._lease(segment, put.block, offset, owner)
        return tensor if put.attributes is None else with_attributes(tensor, put.attributes)

    def _lease(self, segment: LeasedSegment, block: int, offset: int, owner: Owner) -> None:
        """Lease a block from its peer until the storage of a tensor over it is freed."""
        if segment.forwarder is not None:
            start, stop = offset, offset + owner.nbytes
            if segment.overlaps(block, start, stop):
                raise ProtocolError(f"it forwarded block {block} in pages of another one")
            try:
                segment.mapped.lock(start, stop)
            except OSError as error:
                raise RefusedError(f"its memory cannot be locked by this process: {error}") from error
        number = self._next_lease
        self._next_lease += 1
        watch = Watch(owner, self.freed)
        watch.number = number
        self._leases[number] = _Lease(segment, block, watch)
        start, stop = segment.leases[number] = (offset, offset + owner.nbytes)
        use = segment.uses.get(block)
        if use is None:
            segment.uses[block] = BlockUse(start, stop, 1, 1)
        else:
            use.start, use.stop = min(use.start, start), max(use.stop, stop)
            use.leases += 1
            use.pins += 1
        self.leased_bytes += owner.nbytes
        self.peak_leased_bytes = max(self.peak_leased_bytes, self.leased_bytes)

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
            drop()
            self._dropped(segment, block, use)
        else:
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
        # Other readers of a peer that is gone may keep the segment mapped, and with it the memory that only
        # this process has used.
        removes = memory.release is None
        # In the worker, because unmapping much memory takes milliseconds.
        self._worker.begin("unmapping", segment.mapped.remove_and_close if removes else segment.mapped.close)


@contextlib.contextmanager
def _too_few_addresses(nbytes: int) -> Iterator[None]:
    """Raise a `RefusedError` with a remedy if a mapping exceeds the address limit of this process."""
    try:
        yield
    except OSError as error:
        addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
        if error.errno != errno.ENOMEM or addresses == resource.RLIM_INFINITY:
            raise
        raise RefusedError(
            f"its segment needs {nbytes} bytes of addresses, but too few are left of the {addresses} that "
            "the receiver may use (RLIMIT_AS): raise `ulimit -v` of the receiver, lower arena_bytes, or set "
            "`ulimit -v` for the sender too, whose segment is then only as large as its arena"
        ) from error
