"""What is mapped here of the memory of senders, and the living tensors that pin it.

A segment stays mapped while its sender has it attached, or a tensor over it lives. A block of it goes back
to the sender when the tensor over it is freed. Of a segment whose sender is gone, and that no other process
uses, everything that no tensor lies in is returned to the system.
"""

import asyncio
import errno
import mmap
import resource
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.protocol.pages import gaps
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.process_end import ProcessEnd
from aiotensor.runtime.worker import Worker
from aiotensor.tensors.arena import segment_bytes
from aiotensor.tensors.mapped import MappedSegment, open_segment
from aiotensor.tensors.placement import ArrivedTensor
from aiotensor.tensors.segments import whole_pages
from aiotensor.tensors.views import Watch, watch_storage
from aiotensor.transports.base import ReceiverLink

__all__ = ["MAX_SEGMENTS", "Mappings", "Segments"]

# Of one sender, mapped here at once. Ours attach one; without a bound a sender could attach a byte at a time,
# until this process has no room left in its table of mappings (65530 by default on Linux).
MAX_SEGMENTS = 8


class Segments:
    """What one sender attached, and what living tensors keep of it.

    Args:
        link: the way to the sender, which is told of its blocks.
    """

    def __init__(self, link: ReceiverLink) -> None:
        self.link = link
        self.arena_bytes = 0  # as the sender announced it
        self.mapped: dict[int, MappedSegment] = {}  # what it may place tensors in
        self.attached: dict[int, _Segment] = {}
        self.held: set[_Segment] = set()  # those too that are detached, and that living views keep

    @property
    def leases(self) -> int:
        """Count the blocks of this sender that living tensors pin."""
        return sum(len(segment.leases) for segment in self.held)

    @property
    def leased_bytes(self) -> int:
        """Count the bytes of the tensors that pin them."""
        return sum(stop - start for segment in self.held for start, stop in segment.leases.values())


class _Segment:
    """A segment that a sender attached, and the views of it that live."""

    def __init__(self, mapped: MappedSegment, segments: Segments) -> None:
        self.mapped = mapped
        self.segments = segments
        self.leases: dict[int, tuple[int, int]] = {}  # where each of these tensors begins and ends
        self.is_attached = True
        self.is_ours = False  # no other process uses the memory
        self.lingering_bytes = 0


class _Lease(msgspec.Struct, frozen=True):
    """A block that a living tensor pins."""

    segment: _Segment
    block: int
    watch: Watch


class Mappings:
    """The memory of all senders of one receiver; belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.leased_bytes = self.peak_leased_bytes = 0
        self.lingering_bytes = 0  # of segments whose sender is gone, and that living views keep
        self._leases: dict[int, _Lease] = {}
        self._ends: dict[Segments, ProcessEnd] = {}  # of senders that are gone and whose processes may live
        self._next_lease = 0
        self._is_closed = False

    def open(self, released: Callable[[ReceiverLink, int], None]) -> None:
        """Move into the running loop.

        Args:
            released: called with the link and the number of a block that its sender may use again.
        """
        self._released = released
        self._freed: FreedItems[int] = FreedItems(asyncio.get_running_loop(), self._leases_ended)
        self._worker = Worker("aiotensor-receiver")

    @property
    def leases(self) -> int:
        """Count the blocks that living tensors pin."""
        return len(self._leases)

    def collect(self) -> None:
        """Give back the blocks whose tensors were freed until now; of many only some."""
        self._freed.collect()

    def collect_all(self) -> None:
        """Give back every block whose tensor was freed until now."""
        self._freed.collect_all()

    async def settle(self) -> None:
        """Wait until everything that is to be unmapped is unmapped."""
        await self._worker.settle()

    def close(self) -> None:
        """End the worker; what living tensors keep is unmapped with the last of them."""
        self._is_closed = True
        for end in self._ends.values():
            end.cancel()
        self._ends.clear()
        for lease in self._leases.values():
            lease.segment.mapped.close()
        self._worker.close()

    def check(self, segments: Segments, number: int, nbytes: int) -> None:
        """Refuse a segment that a sender may not attach.

        Raises:
            ProtocolError: it is attached already, or one too many, or larger than what was announced.
        """
        held = sum(segment.mapped.nbytes for segment in segments.held)
        if number in segments.attached:
            raise ProtocolError(f"it attached segment {number} twice")
        if len(segments.held) >= MAX_SEGMENTS:
            raise ProtocolError(f"it attached more than {MAX_SEGMENTS} segments")
        if held + nbytes > segment_bytes(segments.arena_bytes):
            raise ProtocolError(
                f"it attached {held + nbytes} bytes and announced an arena of {segments.arena_bytes}"
            )

    def attach(self, segments: Segments, number: int, nbytes: int, descriptor: int) -> None:
        """Map a segment that may be attached; its descriptor stays the caller's.

        Raises:
            ProtocolError: it is not what the sender says, or not sealed.
            RefusedError: this process has a limit on its addresses, and too few are left.
            OSError: it cannot be mapped here for another reason.
        """
        try:
            mapped = segments.mapped[number] = open_segment(descriptor, nbytes)
        except OSError as error:
            addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
            if error.errno != errno.ENOMEM or addresses == resource.RLIM_INFINITY:
                raise
            raise RefusedError(
                f"its segment has {nbytes} bytes of addresses, and too few are left of the {addresses} that "
                "the receiver may have (RLIMIT_AS): raise `ulimit -v` of the receiver, lower arena_bytes, or "
                "set `ulimit -v` for the sender too, whose segment is then only as large as its arena"
            ) from error
        segment = segments.attached[number] = _Segment(mapped, segments)
        segments.held.add(segment)

    def detach(self, segments: Segments, number: int) -> None:
        """Note that a sender needs a segment no more.

        Raises:
            ProtocolError: it never attached such a segment.
        """
        segment = segments.attached.pop(number, None)
        if segment is None:
            raise ProtocolError(f"it detached segment {number}, which it never attached")
        del segments.mapped[number]
        self._let_go(segment)

    def let_go(self, segments: Segments) -> None:
        """Note that a sender is gone."""
        for segment in segments.attached.values():
            self._let_go(segment)
        segments.attached.clear()
        segments.mapped.clear()

    def take_over(self, segments: Segments) -> None:
        """Note that a sender that is gone does not use its memory any more, nor does its process."""
        self._ends.pop(segments, None)
        for segment in segments.held:
            segment.is_ours = True
            self._trim(segment)

    def take_over_after(self, segments: Segments, pid: int) -> None:
        """Do the same once the sender's process has ended: until then it may use the memory."""
        if segments.held:
            self._ends[segments] = ProcessEnd(pid, partial(self.take_over, segments))

    def lease(self, segments: Segments, opened: ArrivedTensor, block: int) -> None:
        """Keep a block of an attached segment from its sender for as long as a tensor over it lives."""
        owner = opened.owner
        if owner is None or opened.segment is None:
            raise AssertionError("a tensor without a segment leases nothing")
        segment = segments.attached[opened.segment]
        number = self._next_lease
        self._next_lease += 1
        watch = watch_storage(owner, self._storage_ended, number)
        self._leases[number] = _Lease(segment, block, watch)
        segment.leases[number] = (opened.offset, opened.offset + owner.nbytes)
        self.leased_bytes += owner.nbytes
        self.peak_leased_bytes = max(self.peak_leased_bytes, self.leased_bytes)

    def _storage_ended(self, watch: Watch) -> None:
        """Note that a tensor's storage was freed; in any thread, perhaps inside the garbage collector."""
        self._freed(watch.number)

    def _leases_ended(self, numbers: Sequence[int]) -> None:
        lingering = set()
        for number in numbers:
            lease = self._leases.pop(number)
            segment = lease.segment
            start, stop = segment.leases.pop(number)
            self.leased_bytes -= stop - start
            if segment.is_attached:
                self._released(segment.segments.link, lease.block)
            else:
                lingering.add(segment)
        for segment in lingering:
            if not segment.leases:
                self._unmap(segment)
            elif segment.is_ours:
                self._trim(segment)

    def _let_go(self, segment: _Segment) -> None:
        segment.is_attached = False
        if segment.leases:
            # It has more addresses than memory.
            arena = whole_pages(segment.segments.arena_bytes)
            self._lingers(segment, min(segment.mapped.nbytes, arena))
        else:
            self._unmap(segment)

    def _lingers(self, segment: _Segment, nbytes: int) -> None:
        self.lingering_bytes += nbytes - segment.lingering_bytes
        segment.lingering_bytes = nbytes

    def _trim(self, segment: _Segment) -> None:
        """Return the memory to the system that no tensor here lies in."""
        if self._is_closed:
            return
        unused = gaps(0, segment.mapped.nbytes, list(segment.leases.values()), mmap.PAGESIZE)
        self._lingers(segment, segment.mapped.nbytes - sum(length for _, length in unused))
        # Much memory takes milliseconds.
        self._worker.begin("giving memory back", partial(segment.mapped.remove, unused))

    def _unmap(self, segment: _Segment) -> None:
        self._lingers(segment, 0)
        segments = segment.segments
        segments.held.discard(segment)
        if not segments.held and (end := self._ends.pop(segments, None)) is not None:
            end.cancel()
        if self._is_closed:
            segment.mapped.close()
        else:
            # Unmapping much memory takes milliseconds.
            self._worker.begin("unmapping", segment.mapped.close)
