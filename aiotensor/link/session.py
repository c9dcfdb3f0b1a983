"""One connection to a peer: the transport, and the rules of the protocol on it."""

import abc
import asyncio
import errno
import resource
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress

from aiotensor.errors import ProtocolError, RefusedError
from aiotensor.link.events import PeerLog
from aiotensor.memory.arena import Block, Segment
from aiotensor.memory.mapping import new_token
from aiotensor.memory.mappings import ForeignSegment, Mappings, PeerMemory
from aiotensor.memory.memory import Memory
from aiotensor.memory.source import Source
from aiotensor.memory.tensors import Watch
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.frames import ARENA, FORWARDED, MAX_REASON, Attach, Close, Frame, Hello, encode
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.descriptors import Descriptor, close_all
from aiotensor.runtime.waiting import Waiters, timeout_at_close, until
from aiotensor.transports.base import Transport

# The time for which an object that closes waits for peers that read nothing, if their messages are safe.
LAST_RECORDS_S = 1.0


async def all_accepted(sessions: "Iterable[Session]") -> None:
    """Wait until the transports of sessions have accepted all records, at most `LAST_RECORDS_S`."""
    with suppress(TimeoutError):
        async with timeout_at_close(LAST_RECORDS_S):
            for session in sessions:
                await session.accepted()


class Session(abc.ABC):
    """Exchange frames with one peer; belongs to the running loop. Each role derives its own class.

    A session begins when the transport has connected, and ends when the connection ends. The frames of one
    iteration of the event loop share a record, unless `flush` writes them earlier.

    Args:
        transport: the connection, which has not been started yet.
        connection: the rules.
        log: the log of the owner.
        freed: the freed tensors whose blocks the answers return; None if this end takes no tensors.

    Attributes:
        name: the name of the peer in the log.
        is_over: whether the session has ended.
        is_refused: whether this end has refused the peer, whose memory cannot be mapped.
        attached: the reading ends of the tokens of the segments that the peer has, by their numbers.
        peer_uses_memory: whether the peer, if it has closed, may still use memory of this end.
        pins: for each block that the peer may read, the number of announcements that it has not released.
    """

    name: str

    def __init__(
        self,
        transport: Transport,
        connection: Connection,
        log: PeerLog,
        freed: FreedItems[Watch] | None = None,
    ) -> None:
        self.transport = transport
        self.connection = connection
        self.is_over = self.is_refused = False
        self.log = log
        self._freed = freed
        self._loop = asyncio.get_running_loop()
        self._flushing: asyncio.Handle | None = None  # set while a flush is scheduled
        self._is_collecting = False  # whether a flush, which is under way, releases blocks
        self.attached: dict[int, Descriptor] = {}
        self.peer_uses_memory = True
        self.pins: dict[int, int] = {}
        self._writing = Waiters()  # for the transport

    @property
    def pid(self) -> int | None:
        """The process id that the peer has stated; None before its hello."""
        return self.connection.peer_pid

    @property
    def hello(self) -> Hello:
        """The hello of a peer that was admitted."""
        if self.connection.theirs is None:
            raise AssertionError("a peer was admitted before its hello")
        return self.connection.theirs

    @abc.abstractmethod
    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record.

        Args:
            frames: the frames, which the connection has validated.
            descriptors: the descriptors that arrived with the record. After this call, the remaining ones
                in the list are closed.

        Raises:
            ProtocolError: a frame violates the rules of the role.
        """

    @abc.abstractmethod
    def lost(self, loss: Loss) -> None:
        """Handle the end of the session, once; the transport is closed afterwards."""

    def begin(self) -> None:
        """Start the transport, and write the first record.

        Raises:
            OSError: the record could not be written.
        """
        self.transport.start(self)
        for record in self.connection.data_to_send():
            self.transport.write(record)

    # Writing

    def flush(self, is_scheduled: bool = False) -> None:
        """Write the pending frames now; a failure ends the session.

        Args:
            is_scheduled: whether `schedule_flush` has scheduled this call.
        """
        flushing, self._flushing = self._flushing, None
        if flushing is not None and not is_scheduled:
            flushing.cancel()
        # If a tensor was freed right after it was taken, its `Release` is sent together with the `Taken`.
        if (freed := self._freed) is not None and freed.rest is None:
            freed.is_scheduled = False
            if freed.items:
                self._is_collecting = True  # so that the releases schedule no other flush
                try:
                    freed.collect()
                finally:
                    self._is_collecting = False
        try:
            for record in self.connection.data_to_send():
                self.transport.write(record)
        except OSError as error:
            self.unwritable(error)

    def unwritable(self, error: OSError) -> None:
        """End the session, because a record could not be written."""
        reason = f"writing to it failed: {error}"
        self.log.disconnected.add(self.name, self.pid, reason)
        # If another record can be written, the peer gets the pending frames, and knows that this end lives.
        self.connection.close(Close(reason[:MAX_REASON], retry=True))
        with suppress(OSError):
            for record in self.connection.data_to_send():
                self.transport.write(record)
        self.end(self.connection.lost(reason, is_retried=True))

    def schedule_flush(self) -> None:
        """Write the pending frames at the end of this iteration of the event loop."""
        if self._flushing is None:
            self._flushing = self._loop.call_soon(self.flush, True)
            if self._freed is not None:
                self._freed.is_scheduled = True  # since a flush collects the freed tensors

    def release(self, block: int) -> None:
        """Return a block to the peer."""
        self.connection.release(block)
        if not self._is_collecting:
            self.schedule_flush()

    def keep_pins(self, memory: Memory, pins: Sequence[int] | None = None) -> None:
        """Keep the blocks that the peer may still read, after the end of the session.

        Args:
            memory: the memory of the blocks.
            pins: their numbers, once for each announcement that was not released; None for those in `pins`.
        """
        if pins is None:
            pins = [block for block, count in self.pins.items() for _ in range(count)]
            self.pins.clear()
        can_read = self.transport.mover is None and self.peer_uses_memory
        memory.reader_lost(pins, self.attached if can_read else {})

    def attach(self, segment: Segment | ForeignSegment) -> None:
        """Share a segment with the peer, once.

        Raises:
            OSError: the kernel refused the descriptor; nothing was sent.
        """
        if segment.number in self.attached:
            return
        self.flush()
        if self.is_over:
            return  # writing has failed
        # Written at once and in a separate record, so that this call raises the error.
        if self.transport.mover is not None and isinstance(segment, Segment):
            self.transport.write(encode(Attach(segment.number, ARENA, segment.nbytes)))
            self.attached[segment.number] = Descriptor(-1)
            return
        if isinstance(segment, ForeignSegment):
            given, leased = [segment.locks, segment.end, *segment.tokens], segment.segment
            attach = Attach(segment.number, FORWARDED, leased.mapped.nbytes, len(given), leased.arena_bytes)
        else:
            given = [segment.descriptor, segment.end()]
            attach = Attach(segment.number, ARENA, segment.nbytes, 2)
        reading, token = new_token()
        try:
            numbers = [descriptor.number for descriptor in (*given, token)]
            self.transport.write(encode(attach), numbers)
        finally:
            token.close()
        self.attached[segment.number] = reading

    async def fill(
        self, memory: Memory, source: Source, block: Block, holder: Hashable, *, is_copied: bool = False
    ) -> None:
        """Copy a tensor to a block; if the peer is on another machine, also move it there.

        An error removes the pin of the block's owner. Cancellation stops the copy and the move.

        Args:
            memory: the memory of the block.
            source: the tensor.
            block: the block.
            holder: the argument of `Memory.abandon` that stops the copy and the move.
            is_copied: whether the block already contains the tensor, which may have changed since.

        Raises:
            CopyAbandonedError: `Memory.abandon` was called for the holder, or the peer is gone.
            OSError: the machine has no memory or no descriptors left.
        """
        mover = self.transport.mover
        if mover is None:
            if not is_copied:
                await memory.copy(source, block, holder)
            return
        try:
            self.attach(block.place.segment)
        except BaseException:
            memory.unpin_owner(block)
            raise
        await memory.move(mover, source, block, holder, is_copied=is_copied)

    def map(
        self,
        mappings: Mappings,
        memory: PeerMemory,
        attach: Attach,
        descriptors: list[int],
        left: int | None = None,
    ) -> None:
        """Map a segment of the peer, or refuse the peer if that is impossible; see `Mappings.attach`.

        Args:
            mappings: the mappings of this end.
            memory: the memory of the peer.
            attach: the frame that describes the segment.
            descriptors: the descriptors that arrived with the frame.
            left: the size of the arena of a forwarded segment that may still be mapped; None for no limit.
        """
        try:
            if left is not None and attach.arena_bytes > left:
                raise RefusedError(
                    f"it forwards tensors of an arena of {attach.arena_bytes} bytes, but max_mapped_bytes "
                    f"allows only {left} more: raise max_mapped_bytes, or send copies with tensor.clone()"
                )
            mappings.attach(memory, attach, self.transport.mover, descriptors)
        except (RefusedError, OSError) as error:
            self.refuse(error)

    def detach(self, segment: ForeignSegment) -> None:
        """Withdraw a forwarded segment without used blocks, if the peer has it."""
        if segment.number in self.attached:
            del self.attached[segment.number]
            self.connection.detach(segment.number)
            self.schedule_flush()

    # Events of the transport

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Process a record."""
        try:
            self.received(self.connection.receive(data), descriptors)
        except RefusedError as error:
            self.end(Loss(error, is_retried=False))
        except ProtocolError as error:
            self.violated(error)
        finally:
            if descriptors:
                close_all(descriptors)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """End the session, because the connection has ended."""
        if isinstance(reason, ProtocolError):
            self.violated(reason)
        else:
            self.end(self.connection.lost(reason, is_retried=True))

    def resume_writing(self) -> None:
        """Called when the transport accepts records again."""
        self._writing.wake()

    # The end

    def close(self, close: Close | None = None) -> None:
        """Write the last frame; `accepted` waits until closing the transport does not lose it."""
        self.connection.close(close or Close())
        self.flush()
        self.transport.finish()

    async def accepted(self) -> None:
        """Wait until the transport has accepted all records, or is closed."""
        transport = self.transport
        await until(lambda: transport.is_writable or transport.is_closed or None, self._writing)

    def closed(self, close: Close) -> None:
        """End the session after the last frame of the peer."""
        self.peer_uses_memory = close.uses_memory
        self.end(self.connection.closed(close))

    def violated(self, error: ProtocolError) -> None:
        """End the session, because the peer broke the protocol."""
        if not self.is_over:
            self.log.broken.add(self.name, self.pid, str(error))
            self.end(self.connection.violated(error))

    def refuse(self, error: RefusedError | OSError) -> None:
        """End the session, because this process cannot map the memory of the peer."""
        self.is_refused = True
        is_refusal, reason = isinstance(error, RefusedError), str(error)
        if isinstance(error, OSError):
            has_limit = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
            is_refusal = error.errno == errno.ENOMEM and has_limit  # the next attempt would fail, too
            reason = f"its memory cannot be mapped into this process: {error}"
        self.log.refused.add(self.name, self.pid, reason)
        self.connection.refuse(reason, is_refusal=is_refusal)
        self.flush()
        self.end(self.connection.rejected(reason, is_refusal=is_refusal))

    def end(self, loss: Loss) -> None:
        """End the session."""
        if self.is_over:
            return
        self.is_over = True
        try:
            self.lost(loss)  # before the transport is closed, since it can watch the process of the peer
        finally:
            self.transport.close()
            self._writing.wake()
