"""Messages with a body, on the way over a session and after their arrival."""

import asyncio
import time
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import torch

from aiotensor.codec import TensorDecoder
from aiotensor.codec.cost import QUICK_CODED_TENSORS
from aiotensor.codec.payload import QUICK_BODY_BYTES, TENSOR_MARK, TENSOR_TAGS, unpack
from aiotensor.errors import ProtocolError, RefusedError, is_shortage
from aiotensor.link.events import PeerLog
from aiotensor.link.outgoing import Outgoing
from aiotensor.link.session import Session, all_accepted
from aiotensor.memory.mappings import ForwardedBlock, Mappings, PeerMemory
from aiotensor.memory.memory import Memory, PendingMove
from aiotensor.protocol.connection import Connection
from aiotensor.protocol.frames import (
    ARENA,
    DECODE_ERRORS,
    Attach,
    Close,
    Content,
    Detach,
    Frame,
    Message,
    PlacedTensor,
    Release,
    decode_content,
    read_content,
    unreadable,
)
from aiotensor.runtime import tracing
from aiotensor.runtime.worker import in_thread
from aiotensor.transports.base import Mover, Transport

# Longer content has many tensors or a long body, so decoding it may take a millisecond.
_QUICK_CONTENT_BYTES = 64 << 10

# The maximum number of tensors opened in one iteration of the event loop, each in a few microseconds, and of
# moves begun, each in tens of microseconds.
_QUICK_TENSORS, _QUICK_MOVES = 64, 32

_NOTHING = memoryview(b"")


class _Transfer(msgspec.Struct, eq=False):
    """A message whose blocks are moved to another machine before it is announced."""

    announce: Callable[[], object]
    left: int  # the number of moves that have not ended
    moves: list[PendingMove] = []


class MessageSession(Session):
    """A session that carries messages with a body, in one direction or in both; each role derives its own.

    Messages that have arrived outlive the session, with the memory of the peer.

    Args:
        transport: the connection, which has not been started yet.
        connection: the rules.
        log: the log of the owner.
        arena: the memory of this end; None if it sends no messages.
        mappings: the mappings of this end; None if it receives no messages.
        max_mapped_bytes: the maximum size of the memory of the peer and that it forwards, in bytes; None for
            no limit.

    Attributes:
        memory: the memory of the peer.
        untaken: the number of messages that the application has not taken completely.
        accepted_at: when the transport last accepted records again or completed a move.
        transfers: the messages that are still to be announced, by their keys, the oldest first.
    """

    def __init__(
        self,
        transport: Transport,
        connection: Connection,
        log: PeerLog,
        arena: Memory | None = None,
        mappings: Mappings | None = None,
        max_mapped_bytes: int | None = None,
    ) -> None:
        super().__init__(transport, connection, log, None if mappings is None else mappings.freed)
        # Without mappings, nothing would end the cycle, which would keep descriptors until a collection.
        self.memory = PeerMemory(0, None if mappings is None else self.release)
        self.untaken = 0
        self.accepted_at = 0.0
        self._arena = arena
        self._mappings = mappings
        self.max_mapped_bytes = max_mapped_bytes
        self.transfers: dict[Hashable, _Transfer] = {}

    @property
    def mappings(self) -> Mappings:
        """The mappings of this end, which receives messages."""
        if self._mappings is None:
            raise AssertionError("an end that receives messages has mappings")
        return self._mappings

    @property
    def arena(self) -> Memory:
        """The memory of this end, which sends messages."""
        if self._arena is None:
            raise AssertionError("an end that sends messages has memory")
        return self._arena

    # Messages to the peer

    def carry(self, key: Hashable, blocks: Iterable[int], announce: Callable[[], object]) -> None:
        """Between machines, move the blocks of a message; then announce it.

        Messages are announced in the order of the calls.

        Args:
            key: identifies the message.
            blocks: the numbers of its blocks, which are pinned, in attached segments.
            announce: announces the message; not called if the message was withdrawn or the session has ended.
        """
        mover = self.transport.mover
        if mover is None:
            announce()
            return
        blocks = list(dict.fromkeys(blocks))
        self.transfers[key] = transfer = _Transfer(announce, len(blocks))
        self._begin_moves(mover, key, transfer, blocks)

    def post(self, outgoing: Outgoing, announce: Callable[[], object]) -> None:
        """Pin the blocks of a message for the peer, and carry it as `carry` does.

        Raises:
            OSError: this process has no descriptors left to share a segment; the message was not posted.
        """
        if not self.attached.keys() >= outgoing.segments.keys():
            try:
                self.attach_all(outgoing.segments)
            except OSError as error:
                if is_shortage(error):
                    raise
                self.unwritable(error)
            if self.is_over:
                return  # a segment could not be shared
        blocks = [block for block, _ in outgoing.blocks]
        self.arena.pin(blocks)
        for block in blocks:
            self.pins[block] = self.pins.get(block, 0) + 1
        self.carry(outgoing, blocks, announce)

    def unpost(self, outgoing: Outgoing) -> None:
        """Unpin the blocks of a message that the peer does not take; stop carrying it."""
        self.arena.unpin([block for block, _ in outgoing.blocks], self.pins)
        self.stop_carrying(outgoing)  # which may announce the next message, and end the session

    def stop_carrying(self, key: Hashable) -> bool:
        """Withdraw a message that was not announced yet; return False if it was."""
        transfer = self.transfers.pop(key, None)
        if transfer is None:
            return False
        for move in transfer.moves:
            move.stop()
        self._announce_moved()
        return True

    def attach_all(self, segments: Container[int]) -> None:
        """Share the segments with these numbers that the peer does not have; errors are those of `attach`."""
        for segment in list(self.arena.segments()):
            if segment.number in segments:
                self.attach(segment)

    def _begin_moves(self, mover: Mover, key: Hashable, transfer: _Transfer, blocks: Sequence[int]) -> None:
        """Begin to move blocks, in several iterations of the event loop if they are many."""
        if self.transport.is_closed or self.transfers.get(key) is not transfer:
            return  # the message was withdrawn, or the peer is gone
        arena = self.arena
        for number in blocks[:_QUICK_MOVES]:
            block = arena.blocks[number]
            if isinstance(block, ForwardedBlock):
                raise AssertionError("a block is not forwarded to another machine")
            moved, view = partial(self._moved, transfer), block.place.view()
            transfer.moves.append(arena.begin_move(mover, block, 0, view, self, moved))
        if rest := blocks[_QUICK_MOVES:]:
            self._loop.call_soon(self._begin_moves, mover, key, transfer, rest)
        self._announce_moved()

    def _moved(self, transfer: _Transfer, is_complete: bool) -> None:
        if is_complete:
            transfer.left -= 1
            self.accepted_at = time.monotonic()
            if not transfer.left:
                self._announce_moved()

    def _announce_moved(self) -> None:
        """Announce the messages whose blocks were moved completely, in order."""
        transport, has_announced = self.transport, False
        while self.transfers and transport.is_writable and not transport.is_closed:
            key, transfer = next(iter(self.transfers.items()))
            if transfer.left:
                break
            del self.transfers[key]
            transfer.announce()
            has_announced = True
        if has_announced:
            self._writing.wake()

    def resume_writing(self) -> None:
        """Announce the messages that were moved, because the transport accepts records again."""
        super().resume_writing()
        self.accepted_at = time.monotonic()
        if not self.connection.is_closed:
            self._announce_moved()

    # Messages of the peer

    def taken(self, number: int) -> None:
        """Answer that the application takes a message; freeing its tensors releases its blocks."""
        self.connection.taken(number)
        self.schedule_flush()

    def control(self, frame: Frame, descriptors: list[int]) -> None:
        """Process a frame about memory, or the last frame; see `Session.received` for the arguments.

        Raises:
            ProtocolError: it is another frame, which no peer of this role sends.
        """
        match frame:
            case Release() if self._arena is not None:
                self._arena.unpin(frame.blocks, self.pins)
            case Attach():
                limit = self.max_mapped_bytes
                left = None if limit is None else limit - self.memory.arena_bytes
                self.map(self.mappings, self.memory, frame, descriptors, left)
            case Detach():
                if self.transport.mover is not None:
                    self.transport.mover.land(frame.segment, None)
                self.mappings.detach(self.memory, frame.segment)
            case Close():
                self.closed(frame)
            case _:
                raise ProtocolError(f"it sent a frame that no {self.hello.role} sends")

    def release_memory(self) -> None:
        """Release the memory of the peer after the end of the session, once all messages are taken."""
        self.memory.release = None
        if not self.untaken:
            self.mappings.peer_gone(self.memory)

    def leave(self) -> None:
        """End what this end sends, and release the memory of both ends, after the end of the session."""
        self.arena.abandon(self)
        self.transfers.clear()
        if self.transport.mover is not None:
            self.arena.movers.discard(self.transport.mover)
        self.keep_pins(self.arena)
        self.release_memory()

    def abort(self) -> None:
        """Close the connection without waiting, and release the memory that no tensor uses."""
        self.transport.close()
        if not self.is_over:
            self.is_over = True
            self.mappings.peer_gone(self.memory)


async def close_sessions(sessions: Sequence[MessageSession], memory: Memory, mappings: Mappings) -> None:
    """End the sessions of an object that have written their last frames, and close its memory.

    Waits until copies in worker threads have stopped, and at most `LAST_RECORDS_S` until the connections have
    accepted all records. Cancellation skips these waits.
    """
    try:
        await all_accepted(sessions)
        for session in sessions:
            session.keep_pins(memory)
        await memory.aclose()
        await mappings.settle()
    finally:
        for session in sessions:
            session.abort()
        memory.close()
        mappings.close()


S = TypeVar("S", bound=MessageSession)


class Arrived(msgspec.Struct, Generic[S], eq=False, weakref=True):
    """A message, from its arrival until the application has taken it; counted by `MessageSession.untaken`.

    Attributes:
        session: the session in which the message arrived.
        message: its announcement.
        is_taken: whether the message was answered as taken.
        is_broken: whether the message broke the protocol, which has ended the session.
        tensors: the tensors that were opened so far.
        trace_context: the trace context of the peer; None without tracing.
    """

    # A Struct, whose creation calls no Python function.

    session: S
    message: Message
    is_taken: bool = False
    is_broken: bool = False
    tensors: list[torch.Tensor] = []
    trace_context: Mapping[str, str] | None = None
    data: memoryview | None = None  # the encoded content, if it is in a block
    content: Content | None = None

    @property
    def number(self) -> int:
        """The number of the message."""
        return self.message.message

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.message.message}>"

    async def decode(self, decoder: TensorDecoder[Any], max_body_bytes: int | None = None) -> Any:
        """Decode the message, in a thread if that may take long, and finish it.

        Decoding answers the message, and leases its memory. After an error, the caller finishes it. After a
        cancellation, it may also call again; nothing is lost.

        Args:
            decoder: the decoder for the type of the message.
            max_body_bytes: the limit on its body that this end has stated; None for no limit.

        Raises:
            ProtocolError: the message cannot be decoded, has the wrong type, or does not use each tensor
                once; or it breaks the protocol, as `is_broken` states.
            OSError: no memory is left, or no thread can be started.
        """
        try:
            content = self.content
            if content is None:
                message = self.message
                if message.block is None and len(message.payload) == message.nbytes and not self.is_taken:
                    self.is_taken = True  # most messages, as `_take`, without a call
                    if message.answers is None:
                        self.session.taken(message.message)
                    data: bytes | memoryview = message.payload
                else:
                    data = self._take()
                if len(data) > _QUICK_CONTENT_BYTES:
                    content = await in_thread(read_content, data)
                else:
                    content = decode_content(data)
                self.content = content
            tensors = self.tensors
            while len(tensors) < len(content.tensors):
                self._open_next(content)
                if len(tensors) % _QUICK_TENSORS == 0:
                    await asyncio.sleep(0)
            body = content.body
            if max_body_bytes is not None and len(body) > max_body_bytes:
                raise _too_large(body, max_body_bytes)
        except ProtocolError as error:
            data = b""  # otherwise the traceback would keep its block
            self._violated(error)
            raise
        except DECODE_ERRORS as error:
            data = b""
            # A local variable would form a cycle with the traceback, and keep the tensors of callers.
            raise self._violated(unreadable(error)) from error
        try:
            is_long = len(body) > QUICK_BODY_BYTES
            if not is_long and len(tensors) + bytes(body).count(TENSOR_MARK) > QUICK_CODED_TENSORS:
                # Counting a byte is faster, and this is rare.
                is_long = len(tensors) + sum(map(bytes(body).count, TENSOR_TAGS)) > QUICK_CODED_TENSORS
            if is_long:
                found = await in_thread(unpack, decoder, body, tensors)
            elif tensors:
                found = unpack(decoder, body, tensors)
            else:
                found = decoder.decode((body,))
        except BaseException:
            data, content, body = b"", None, _NOTHING  # as above
            raise
        # As `_forget`, without a call.
        session = self.session
        tensors.clear()
        self.data = self.content = None
        session.untaken -= 1
        if session.is_over and not session.untaken:
            session.mappings.peer_gone(session.memory)
        return found

    def decode_now(self, decoder: TensorDecoder[Any], max_body_bytes: int | None = None) -> Any:
        """Decode the message on this thread, and finish it; errors are those of `decode`."""
        try:
            content = self._open_all()
            if max_body_bytes is not None and len(content.body) > max_body_bytes:
                raise _too_large(content.body, max_body_bytes)
        except ProtocolError as error:
            self._violated(error)
            raise
        try:
            found = unpack(decoder, content.body, self.tensors)
        except BaseException:
            del content  # otherwise the traceback would keep its block
            raise
        self._forget()
        return found

    def finish(self) -> None:
        """Forget the message in any state; drop it if it was not taken."""
        if self.is_broken:
            return  # it is finished already
        session, content = self.session, self.content
        if not self.is_taken and self.message.answers is None:
            session.connection.discarded(self.message.message, confirms=True)
            session.schedule_flush()
        elif content is None or len(self.tensors) < len(content.tensors):
            self._open_rest()
        self._forget()

    def _forget(self) -> None:
        session = self.session
        # Tracebacks of errors refer to this object and to the list, which must not keep the tensors alive.
        self.tensors.clear()
        self.data = self.content = None
        session.untaken -= 1
        if session.is_over and not session.untaken:
            session.mappings.peer_gone(session.memory)

    def _violated(self, error: ProtocolError) -> ProtocolError:
        self.finish()
        self.is_broken = True
        self.session.violated(error)
        return error

    def _take(self) -> bytes | memoryview:
        """Answer the message, and return its encoded content."""
        message, session = self.message, self.session
        if not self.is_taken:
            self.is_taken = True
            if message.answers is None:
                session.taken(message.message)
        if message.block is None:
            if len(message.payload) != message.nbytes:
                raise ProtocolError(f"it sent {len(message.payload)} bytes, but announced {message.nbytes}")
            return message.payload
        if self.data is None:
            placed = PlacedTensor("uint8", (message.nbytes,), ARENA, message.payload, message.block)
            self.data = session.mappings.open(session.memory, placed).numpy().data
        return self.data

    def _open_all(self) -> Content:
        content = self.content
        if content is None:
            content = self.content = read_content(self._take())
        while len(self.tensors) < len(content.tensors):
            self._open_next(content)
        return content

    def _open_rest(self) -> None:
        """Open the other tensors of a taken message, since only freeing them releases their blocks."""
        if self.session.is_over:
            return
        try:
            self._open_all()
        except ProtocolError as error:
            self.session.violated(error)
        except (RefusedError, OSError) as error:
            self.session.refuse(error)

    def _open_next(self, content: Content) -> None:
        placed = content.tensors[len(self.tensors)]
        if placed.placement != ARENA:
            raise ProtocolError(f"it used the unknown placement {placed.placement!r} for a tensor")
        self.tensors.append(self.session.mappings.open(self.session.memory, placed))


def _too_large(body: memoryview, limit: int) -> ProtocolError:
    return ProtocolError(f"it sent a body of {len(body)} bytes, more than max_body_bytes={limit}")


def trace_context_of(message: Message) -> Mapping[str, str] | None:
    """Return the trace context of a message that has just arrived; None without tracing."""
    tracer = tracing.tracer
    return None if message.trace is None or tracer is None else tracer.arrived(message.trace)
