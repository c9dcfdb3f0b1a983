"""The messages that one end of a pipe sends: bytes, placement, announcement in order, and rollback.

    begun --bytes granted, tensor placed--> placed --all earlier ones placed--> announced --taken--> (ended)
      |                                       |                                    |
      '--cancelled, failed------------------->'--the peer is gone, closed--------->'--> (ended)

The number of a message is assigned by its call, so messages arrive in the order of the calls, even if the
copies of large tensors end in another order. A message that failed is skipped.

A message counts towards `max_bytes` until the peer has taken it and, if its tensor is in shared memory, has
freed the last view of the tensor.
"""

import math
from collections.abc import Callable

import msgspec
import torch

from aiotensor.errors import AioTensorError, ProtocolError, TooLargeError, WouldBlockError
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.frames import ARENA, INLINE, OUT_OF_BAND, Put, Release, Taken
from aiotensor.protocol.ranks import PutNone, counted
from aiotensor.ranks.settings import KEEP_WARM_S, LONG_WAIT_S, PipeSettings
from aiotensor.ranks.writer import Writer
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.process_end import WatchProcess
from aiotensor.runtime.waiting import Waiters
from aiotensor.sending.gates import Gate
from aiotensor.sending.memory import Memory
from aiotensor.sending.message import put_of
from aiotensor.tensors.allocations import Block
from aiotensor.tensors.copying import CopyAbandonedError
from aiotensor.tensors.inline import MAX_INLINE_BYTES, bytes_of
from aiotensor.tensors.placement import Placed
from aiotensor.tensors.raw import flat_bytes
from aiotensor.tensors.source import Source, as_source, is_flat
from aiotensor.transports.base import MAX_DATA_BYTES, Mover
from aiotensor.types import Usage

__all__ = ["Outgoing"]

logger = logger_of("ranks")

# With at most this many messages in flight, the peer probably waits for the next one, so it is sent
# immediately.
_FEW_MESSAGES = 2

_OUT_OF_BAND = Placed(OUT_OF_BAND, b"")


class _Message(msgspec.Struct, eq=False):
    """A message that was begun, and has not been announced yet."""

    number: int
    frame: Put | PutNone | None = None  # set once its tensor is placed
    data: memoryview | None = None  # the bytes of the tensor, if they are sent with the frame
    ticket: Ticket[None] | None = None
    is_awaited: bool = True  # whether its call still runs, and rolls it back after an error


class Outgoing:
    """Send the messages of one end; belongs to the running loop.

    Args:
        writer: writes the frames.
        settings: the limits of the pipe.
        counts: the counters of the pipe.
        label: the name of the pipe in the log.

    Attributes:
        gate: the waits for `max_bytes`.
        memory: the shared memory of this end.
        mover: moves bytes to the peer; None if memory is shared with it.
    """

    def __init__(self, writer: Writer, settings: PipeSettings, counts: dict[str, int], label: str) -> None:
        self._writer = writer
        self._settings = settings
        self._counts = counts
        self._label = label
        self._next = 0
        self._begun: dict[int, _Message] = {}
        self._announced: dict[int, Ticket[None] | None] = {}  # not taken yet, with the bytes to release then
        self._in_blocks: dict[int, Ticket[None]] = {}  # the bytes to release with each block
        self._changes = Waiters()
        self._failure: Callable[[], AioTensorError] | None = None
        self._first_lost: float = math.inf  # the number of the first message that was lost with the peer
        self.gate: Gate[None] = Gate(
            settings.max_bytes,
            stuck_elsewhere=None,
            long_wait_s=LONG_WAIT_S,
            on_long_wait=self._log_wait,
            max_wait_s=settings.max_wait_s,
            overdue=lambda nbytes: self._would_block("not enough bytes were free", nbytes),
        )
        # `self.gate` has already granted the bytes, so a call waits here only if no place is long enough.
        self.memory = Memory(
            settings.max_bytes,
            lambda arena: Gate(settings.max_bytes, space=arena, stuck_elsewhere=None),
            KEEP_WARM_S,
            counts,
        )
        self.mover: Mover | None = writer.transport.mover
        if self.mover is not None:
            self.memory.movers.add(self.mover)

    @property
    def in_flight(self) -> int:
        """The number of messages that were begun, and neither taken nor failed."""
        return len(self._begun) + len(self._announced)

    # Calls

    async def send(self, value: torch.Tensor | None) -> None:
        """Send a message, as `RankPipe.send` does."""
        source, nbytes = self._prepare(value)
        del value
        message = self._begin()
        try:
            message.ticket = self.gate.budget.try_request(nbytes)
            if message.ticket is None:
                message.ticket = await self.gate.acquire(nbytes)
            if source is None:
                message.frame = PutNone(message.number)
            elif not self._place_inline(message, source):
                await self._place_copy(message, source)
        except BaseException:
            self._roll_back(message)
            raise
        self._sent(message, source)

    def send_nowait(self, value: torch.Tensor | None) -> None:
        """Send a message without waiting, as `RankPipe.send_nowait` does."""
        source, nbytes = self._prepare(value)
        message = self._begin()
        try:
            message.ticket = self.gate.budget.try_request(nbytes)
            if message.ticket is None:
                raise self._would_block("not enough bytes are free", nbytes)
            if source is None:
                message.frame = PutNone(message.number)
            elif not self._place_inline(message, source):
                self._place_copy_now(message, source)
        except BaseException:
            self._roll_back(message)
            raise
        message.is_awaited = False
        self._sent(message, source)

    async def drain(self) -> None:
        """Wait until the peer has taken all earlier messages, as `RankPipe.drain` does."""
        last = self._next
        while any(next(iter(some), last) < last for some in (self._begun, self._announced)):
            if self._failure is not None:
                raise self._failure()
            await self._changes.wait()
        if self._failure is not None and self._first_lost < last:
            raise self._failure()

    # Steps

    def _prepare(self, value: torch.Tensor | None) -> tuple[Source | None, int]:
        """Validate a value, and return its source and the bytes that count towards `max_bytes`."""
        if self._failure is not None:
            raise self._failure()
        if value is None:
            return None, counted(0)
        source = as_source(value)
        nbytes, limit = counted(source.nbytes), self._settings.max_bytes
        if nbytes > limit:
            raise TooLargeError(
                f"{nbytes} bytes can never fit into max_bytes={limit}: send smaller parts, or raise "
                "max_bytes",
                limit=limit,
                requested=nbytes,
            )
        return source, nbytes

    def _begin(self) -> _Message:
        message = self._begun[self._next] = _Message(self._next)
        self._next += 1
        return message

    def _place_inline(self, message: _Message, source: Source) -> bool:
        """Place the bytes of a tensor in or with its frame, and return whether that is possible."""
        number, nbytes = message.number, source.nbytes
        if nbytes <= MAX_INLINE_BYTES:
            message.frame = put_of(number, 0, source, Placed(INLINE, bytes_of(source)), None, last=True)
            return True
        if self.mover is None or nbytes > MAX_DATA_BYTES or not is_flat(source):
            return False
        message.frame = put_of(number, 0, source, _OUT_OF_BAND, None, last=True)
        data = flat_bytes(source).data
        is_next = next(iter(self._begun)) == number
        message.data = data if is_next else memoryview(bytes(data))  # copied, since the source may change
        return True

    async def _place_copy(self, message: _Message, source: Source) -> None:
        """Copy a tensor to a block, or move it to the memory of the peer."""
        memory, nbytes = self.memory, source.nbytes
        block = memory.try_acquire(nbytes, message) or await memory.acquire(nbytes, message)
        try:
            self._attach(block)
        except BaseException:
            memory.unpin_owner(block.number)
            raise
        try:
            if self.mover is None:
                await memory.copy(source, block, message)
            else:
                await memory.move(self.mover, source, block, message)
        except CopyAbandonedError:
            raise self._error() from None
        try:
            self._placed(message, source, block)
        finally:
            memory.unpin_owner(block.number)

    def _place_copy_now(self, message: _Message, source: Source) -> None:
        memory = self.memory
        block = memory.try_acquire(source.nbytes, message)
        if block is None:
            raise self._would_block("no range of shared memory of this size is free", source.nbytes)
        try:
            memory.copy_now(source, block)
            self._attach(block)
            if self.mover is None:
                self._placed(message, source, block)
                return
            put = self._put(message, source, block)

            def moved(is_complete: bool) -> None:
                if is_complete and message.number in self._begun:
                    memory.leases.pin(block.number)
                    message.frame = put
                    self._announce()

            data = block.place.view()[: source.nbytes]
            memory.moves.begin(self.mover, block, 0, data, message, moved)
        finally:
            memory.unpin_owner(block.number)

    def _placed(self, message: _Message, source: Source, block: Block) -> None:
        if self._failure is not None:
            raise self._failure()
        message.frame = self._put(message, source, block)
        self.memory.leases.pin(block.number)

    def _put(self, message: _Message, source: Source, block: Block) -> Put:
        return put_of(
            message.number, 0, source, Placed(ARENA, block.place.describe(0)), block.number, last=True
        )

    def _attach(self, block: Block) -> None:
        """Share the segment of a block with the peer, once."""
        if not block.place.segment.is_attached:
            self._writer.attach(block.place.segment)
        if self._failure is not None:
            raise self._failure()

    def _sent(self, message: _Message, source: Source | None) -> None:
        """Announce a message once all earlier ones are announced, and count it."""
        self._announce()
        if self._failure is not None:  # writing has failed
            raise self._failure()
        self._counts["messages_sent"] += 1
        if source is not None:
            self._counts["bytes_sent"] += source.nbytes

    def _announce(self) -> None:
        """Announce messages in order, up to the first message that is not placed yet."""
        while self._begun:
            message = next(iter(self._begun.values()))
            frame = message.frame
            if frame is None:
                return
            del self._begun[message.number]
            ticket = message.ticket
            if isinstance(frame, Put) and frame.block is not None and ticket is not None:
                self._in_blocks[frame.block] = ticket
                ticket = None
            self._announced[message.number] = ticket
            if message.data is None or not isinstance(frame, Put):
                self._writer.put(frame, flush=len(self._announced) <= _FEW_MESSAGES)
            else:
                self._writer.put_with_data(frame, message.data)

    def _roll_back(self, message: _Message) -> None:
        """Release the bytes of a message that failed, and skip it."""
        if self._begun.pop(message.number, None) is None:
            return  # the end of the pipe has released the bytes
        if message.ticket is not None:
            self.gate.release(message.ticket)
        self._announce()
        self._changes.wake()

    # Events

    def taken(self, taken: Taken) -> None:
        """End the messages that the peer has taken, and release those bytes that are not in blocks."""
        for number in taken.messages:
            ticket = self._announced.pop(number)
            if ticket is not None:
                self.gate.release(ticket)
        self._changes.wake()

    def released(self, release: Release) -> None:
        """Release blocks that the peer no longer uses, and their bytes.

        Raises:
            ProtocolError: the peer did not use such a block.
        """
        for number in release.blocks:
            ticket = self._in_blocks.pop(number, None)
            if ticket is None:
                raise ProtocolError(f"it released block {number}, which it did not use")
            self.gate.release(ticket)
        self.memory.unpin(release.blocks)

    def fail(self, make_error: Callable[[], AioTensorError]) -> None:
        """End all waiting and all further calls, each with a new error from `make_error`."""
        self._failure = make_error
        self.gate.fail(make_error)
        self.memory.gate.fail(make_error)
        self._changes.wake()

    def lost(self, make_error: Callable[[], AioTensorError], watch: WatchProcess) -> int:
        """End all messages, because the peer is gone, and return the number of messages that it did not take.

        Args:
            make_error: called for each waiting or later call; returns the error to raise.
            watch: watches the process of the peer, which may read the shared memory until it ends.
        """
        lost = self.in_flight
        self._first_lost = min(next(iter(some), self._next) for some in (self._begun, self._announced))
        self.fail(make_error)
        for message in self._begun.values():
            self.memory.abandon(message)
            if message.ticket is not None:
                self.gate.release(message.ticket)
        for ticket in (*self._announced.values(), *self._in_blocks.values()):
            if ticket is not None:
                self.gate.release(ticket)
        self._begun.clear()
        self._announced.clear()
        self._in_blocks.clear()
        self.memory.receiver_lost(watch)
        return lost

    async def finish(self, make_error: Callable[[], AioTensorError]) -> None:
        """End all waiting calls, and wait until the messages of earlier calls are announced."""
        self.fail(make_error)
        for message in [one for one in self._begun.values() if one.is_awaited and one.frame is None]:
            self.memory.abandon(message)
            self._roll_back(message)
        await self.memory.moves.settle()

    def _error(self) -> AioTensorError:
        if self._failure is None:
            raise AssertionError("a copy was abandoned although the pipe is open")
        return self._failure()

    def _would_block(self, reason: str, nbytes: int) -> WouldBlockError:
        budget = self.gate.budget
        return WouldBlockError(
            f"{reason}: {budget.in_use} of max_bytes={budget.limit} are in use by {self.in_flight} messages "
            "that the peer has not taken, and by tensors that the peer still uses",
            messages=Usage(in_use=self.in_flight, requested=1),
            bytes=Usage(budget.limit, budget.in_use, nbytes),
        )

    def _log_wait(self, nbytes: int) -> None:
        budget = self.gate.budget
        logger.warning(
            "%s: a message has waited for %g s for %s bytes; %s of max_bytes=%s are in use, and %s messages "
            "were not taken",
            self._label,
            LONG_WAIT_S,
            nbytes,
            budget.in_use,
            budget.limit,
            self.in_flight,
            extra={
                "event": "slow_peer",
                "pipe": self._label,
                "bytes": nbytes,
                "bytes_in_use": budget.in_use,
                "messages_in_flight": self.in_flight,
            },
        )
