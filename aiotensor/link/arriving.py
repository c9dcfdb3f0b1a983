"""Messages with a body that have arrived, until the application has taken them."""

import asyncio
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

from aiotensor.errors import ProtocolError
from aiotensor.link.events import PeerLog
from aiotensor.link.session import Session
from aiotensor.memory.leased import PeerMemory
from aiotensor.memory.mappings import Mappings
from aiotensor.protocol.connection import Connection
from aiotensor.protocol.frames import ARENA, Content, Message, PlacedTensor, read_content
from aiotensor.runtime import tracing
from aiotensor.runtime.worker import in_thread
from aiotensor.transports.base import Transport

__all__ = ["Arrived", "TakingSession"]

# Longer content has many tensors or a long body, so decoding it may take a millisecond.
_QUICK_CONTENT_BYTES = 64 << 10

# The maximum number of tensors opened in one iteration of the event loop. Each takes a few microseconds.
_QUICK_TENSORS = 64


class TakingSession(Session):
    """A session whose peer sends messages with a body. They outlive the session, with the memory of the peer.

    Attributes:
        memory: the memory of the peer.
        mappings: the mappings of this end.
        untaken: the number of messages that the application has not taken completely.
    """

    def __init__(
        self, transport: Transport, connection: Connection, log: PeerLog, mappings: Mappings
    ) -> None:
        super().__init__(transport, connection, log, mappings.freed)
        self.memory = PeerMemory(0, self.release)
        self.mappings = mappings
        self.untaken = 0

    def taken(self, number: int) -> None:
        """Answer that the application takes a message; freeing its tensors releases its blocks."""
        self.connection.taken(number)
        self.schedule_flush()

    def dropped(self, number: int) -> None:
        """Answer that the application will not take a message."""
        self.connection.discarded(number, confirms=True)
        self.finished()
        self.schedule_flush()

    def finished(self) -> None:
        """Forget a message; after the last one of an ended session, release the memory of the peer."""
        self.untaken -= 1
        if self.is_over and not self.untaken:
            self.mappings.peer_gone(self.memory)

    def release_memory(self) -> None:
        """Release the memory of the peer after the end of the session, once all messages are taken."""
        self.memory.release = None
        if not self.untaken:
            self.mappings.peer_gone(self.memory)

    def abort(self) -> None:
        """Close the connection without waiting, and release the memory that no tensor uses."""
        self.transport.close()
        if not self.is_over:
            self.is_over = True
            self.mappings.peer_gone(self.memory)


S = TypeVar("S", bound=TakingSession)


class Arrived(Generic[S]):
    """A message, from its arrival until the application has taken it.

    Opening a message answers it and leases its memory. After a cancellation, the next call continues.

    Args:
        session: the session in which the message arrived, which counts it as untaken.
        message: its announcement.

    Attributes:
        session: the argument.
        number: the number of the message.
        is_taken: whether the message was answered as taken.
        tensors: the tensors that were opened so far.
        trace_context: the trace context of the peer; None without tracing.
    """

    def __init__(self, session: S, message: Message) -> None:
        self.session = session
        self.number = message.message
        self.is_taken = False
        self.tensors: list[torch.Tensor] = []
        self.trace_context: Mapping[str, str] | None = None
        if message.trace is not None and (tracer := tracing.tracer) is not None:
            self.trace_context = tracer.arrived(message.trace)
        session.untaken += 1
        self._message = message
        self._data: memoryview | None = None
        self._content: Content | None = None

    @property
    def body(self) -> memoryview:
        """The encoded message; empty until the message was opened."""
        return memoryview(b"") if self._content is None else self._content.body

    async def open(self) -> None:
        """Open the content and all tensors; a cancelled call loses nothing.

        Raises:
            ProtocolError: the peer broke the protocol.
            OSError: no thread can be started.
        """
        content = self._content
        if content is None:
            data = self._take()
            if len(data) > _QUICK_CONTENT_BYTES:
                content = await in_thread(read_content, data)
            else:
                content = read_content(data)
            self._content = content
        while len(self.tensors) < len(content.tensors):
            self._open_next(content)
            if len(self.tensors) % _QUICK_TENSORS == 0:
                await asyncio.sleep(0)

    def open_now(self) -> None:
        """Open the content and all tensors on this thread; errors are those of `open`."""
        if self._content is None:
            self._content = read_content(self._take())
        while len(self.tensors) < len(self._content.tensors):
            self._open_next(self._content)

    def finish(self) -> None:
        """Forget the message after it was received; drop it if it was not taken."""
        # Tracebacks of errors refer to this object, so it must not keep its tensors alive.
        self.tensors, self._data, self._content = [], None, None
        if self.is_taken:
            self.session.finished()
        else:
            self.session.dropped(self.number)

    def violated(self, error: ProtocolError) -> None:
        """End the session, because this message breaks the protocol."""
        self.finish()
        self.session.violated(error)

    def _take(self) -> memoryview:
        """Answer the message, and return its encoded content."""
        if self._data is not None:
            return self._data
        message = self._message
        self.session.taken(self.number)
        self.is_taken = True
        if message.block is None:
            if len(message.payload) != message.nbytes:
                raise ProtocolError(f"it sent {len(message.payload)} bytes, but announced {message.nbytes}")
            data = memoryview(message.payload)
        else:
            placed = PlacedTensor("uint8", (message.nbytes,), ARENA, message.payload, message.block)
            data = self.session.mappings.open(self.session.memory, placed).numpy().data
        self._data = data
        return data

    def _open_next(self, content: Content) -> None:
        placed = content.tensors[len(self.tensors)]
        if placed.placement != ARENA:
            raise ProtocolError(f"it used the unknown placement {placed.placement!r} for a tensor")
        self.tensors.append(self.session.mappings.open(self.session.memory, placed))
