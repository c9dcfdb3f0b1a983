"""Both ends of a connection over a stock queue, and the address where they meet."""

import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from aiotensor.errors import ProtocolError
from aiotensor.runtime.descriptors import close_after_fork, close_all
from aiotensor.runtime.process_end import ProcessEnd
from aiotensor.transports.base import Handler
from aiotensor.transports.records import SocketTransport
from aiotensor.transports.stock.pipe import NUMBERS, Chunk, ChunkWriter, Kind

__all__ = ["ReceiverEnd", "SenderEnd", "address_of", "new_socket"]

_DESCRIPTORS = b"D"  # the record on the socket that carries descriptors to the receiver
_KINDS = (Kind.PART, Kind.LAST, Kind.CARRIER)
_MAX_EARLY = 16  # descriptor records that may arrive before their records; a connection has very few


def new_socket() -> socket.socket:
    """Return a non-blocking record socket."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def address_of(connection: bytes) -> str:
    """Return the address where the sender of a connection waits for the receiver."""
    return f"\0aiotensor-{connection.hex()}"  # an abstract address: it leaves no file behind


class SenderEnd:
    """A sender's end: the queue for its records, and the socket for descriptors and the receiver's records.

    Args:
        writer: writes to the queue; belongs to this object.
        pipe: the socket to the receiver; belongs to this object.
    """

    mover: Final = None  # descriptors share memory

    def __init__(self, writer: ChunkWriter, pipe: SocketTransport) -> None:
        self.peer_pid = pipe.peer_pid
        self._writer = writer
        self._pipe = pipe
        self._pipe.limit_queue(0)  # descriptors must not arrive after their record
        self._handler: Handler | None = None
        writer.resumed = self.resume_writing
        writer.failed = self._writing_failed

    @property
    def is_writable(self) -> bool:
        """Whether all records are on the queue."""
        return self._writer.is_writable

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed, or the connection was lost."""
        return self._pipe.is_closed

    def start(self, handler: Handler) -> None:
        """Begin to read, as `Transport.start` does."""
        self._handler = handler
        self._pipe.start(self)

    def watch_peer(self, stated_pid: int, ended: Callable[[], object]) -> ProcessEnd:
        """Call a function once the process of the receiver has ended, as `Transport.watch_peer` does."""
        return self._pipe.watch_peer(stated_pid, ended)

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue a record, as `Transport.write` does."""
        if self._pipe.is_closed:
            return
        if not self._writer.is_writable:
            self._writer.check_limit(len(data))
        if descriptors:
            self._pipe.write(_DESCRIPTORS, descriptors)
        self._writer.write(data, has_descriptors=bool(descriptors))

    def limit_queue(self, max_bytes: int) -> None:
        """Limit the bytes of queued records, as `Transport.limit_queue` does."""
        self._writer.limit_queue(max_bytes)

    def read_now(self) -> None:
        """Read a record, if there is one, as `Transport.read_now` does."""
        self._pipe.read_now()

    def peer_has_closed(self) -> bool:
        """Return whether the receiver has closed, as `Transport.peer_has_closed` does."""
        return self._pipe.peer_has_closed()

    def finish(self) -> None:
        """Do nothing: records stay on the queue after `close`, and the kernel delivers descriptors."""

    def close(self) -> None:
        """Close at once, and discard the queued records."""
        self._handler = None
        self._writer.close()
        self._pipe.close()

    # Events of the socket and of the queue

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Pass a record of the receiver to the handler."""
        if self._handler is None:
            close_all(descriptors)
        else:
            self._handler.record_received(data, descriptors)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Report the end of the connection."""
        handler = self._handler
        try:
            if handler is not None:
                handler.connection_lost(reason)  # it may watch the peer, which needs the open socket
        finally:
            self.close()

    def resume_writing(self) -> None:
        """Report that all records are on the queue."""
        if self._handler is not None and self._writer.is_writable:
            self._handler.resume_writing()

    def _writing_failed(self, error: OSError) -> None:
        # If no process can read the queue, the socket shows the end of the receiver, after its last records.
        if not isinstance(error, BrokenPipeError):
            self.connection_lost(f"writing failed: {error}")


class _EarlyDescriptors:
    """Descriptors that arrived before their records, which a forked child must close."""

    def __init__(self) -> None:
        self.queue: deque[list[int]] = deque()
        close_after_fork(self)

    def close(self) -> None:
        """Close all of them."""
        descriptors = [descriptor for each in self.queue for descriptor in each]
        self.queue.clear()
        close_all(descriptors)


class ReceiverEnd:
    """A receiver's end: the records of one sender, which the listener reads, and the socket to that sender.

    Args:
        connection: identifies the connection on the queue.
        pipe: the socket to the sender; belongs to this object.
        max_record_bytes: the size in bytes of the longest valid record.
        ended: called when the sender has closed the socket; `lose` follows after its last records.
        closed: called when this end was closed.

    Attributes:
        handler: the handler of the connection; None before `start` and after the end.
    """

    mover: Final = None  # descriptors share memory

    def __init__(
        self,
        connection: bytes,
        pipe: SocketTransport,
        max_record_bytes: int,
        ended: Callable[["ReceiverEnd", str | ProtocolError], None],
        closed: Callable[["ReceiverEnd"], None],
    ) -> None:
        self.connection = connection
        self.peer_pid = pipe.peer_pid
        self.is_closed = False
        self.handler: Handler | None = None
        self._pipe = pipe
        self._max_record_bytes = max_record_bytes
        self._ended = ended
        self._closed = closed
        self._next_number = 0
        self._parts = bytearray()  # of a record that is not complete yet
        self._early = _EarlyDescriptors()

    @property
    def is_writable(self) -> bool:
        """Whether the socket has accepted all records, or is closed."""
        return self._pipe.is_writable or self._pipe.is_closed

    def start(self, handler: Handler) -> None:
        """Begin to read, or pass further records to another handler, as `Transport.start` does."""
        if not self.is_closed:
            self.handler = handler
            self._pipe.start(self)

    def watch_peer(self, stated_pid: int, ended: Callable[[], object]) -> ProcessEnd:
        """Call a function once the process of the sender has ended, as `Transport.watch_peer` does."""
        if self._pipe.is_closed and self.peer_pid is not None:
            return ProcessEnd(self.peer_pid, ended)
        return self._pipe.watch_peer(stated_pid, ended)

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue a record, as `Transport.write` does."""
        self._pipe.write(data, descriptors)

    def limit_queue(self, max_bytes: int) -> None:
        """Limit the bytes of queued records, as `Transport.limit_queue` does."""
        self._pipe.limit_queue(max_bytes)

    def read_now(self) -> None:
        """Do nothing: the records of one sender cannot be read without those of others."""

    def peer_has_closed(self) -> bool:
        """Return whether the sender has closed, as `Transport.peer_has_closed` does."""
        return self._pipe.peer_has_closed()

    def finish(self) -> None:
        """Do nothing: the kernel delivers the records that it has, even after `close`."""

    def close(self) -> None:
        """Close at once, and discard the queued records."""
        if self.is_closed:
            return
        self.is_closed = True
        self.handler = None
        self._pipe.close()
        self._early.close()
        self._closed(self)

    def lose(self, reason: str | ProtocolError) -> None:
        """Report the end of the connection, and close it."""
        handler = self.handler
        try:
            if handler is not None:
                handler.connection_lost(reason)
        finally:
            self.close()

    def chunk_received(self, chunk: Chunk) -> None:
        """Add a chunk of the sender, and pass on the record that it completes, if any."""
        if chunk.number != self._next_number:
            self.lose(ProtocolError("a part of a record is missing: another process also reads the queue"))
            return
        if chunk.kind not in _KINDS:
            self.lose(ProtocolError(f"a part of a record has the unknown kind {chunk.kind!r}"))
            return
        self._next_number = (chunk.number + 1) % NUMBERS
        record = chunk.data
        if self._parts or chunk.kind == Kind.PART:
            # One byte more than allowed shows the handler that the record is too long.
            self._parts += record[: self._max_record_bytes + 1 - len(self._parts)]
            if chunk.kind == Kind.PART:
                return
            record = memoryview(bytes(self._parts))
            self._parts.clear()
        descriptors: list[int] | None = self._take_descriptors() if chunk.kind == Kind.CARRIER else []
        if descriptors is None:
            self.lose(ProtocolError("the descriptors of a record are missing"))
        elif self.handler is None:
            close_all(descriptors)
        else:
            self.handler.record_received(record, descriptors)

    def _take_descriptors(self) -> list[int] | None:
        if not self._early.queue:
            self._pipe.read_now()  # they were sent before the record
        return self._early.queue.popleft() if self._early.queue else None

    # Events of the socket

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Keep descriptors for their record, which is still on the queue."""
        self._early.queue.append(descriptors)
        if len(self._early.queue) > _MAX_EARLY:
            self.lose(ProtocolError(f"descriptors arrived {_MAX_EARLY + 1} times without a record"))

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Report the end of the sender to the listener."""
        self._ended(self, reason)

    def resume_writing(self) -> None:
        """Report that the socket has accepted all records."""
        if self.handler is not None:
            self.handler.resume_writing()
