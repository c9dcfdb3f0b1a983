"""The accepting side over a stock queue: the receiver reads the records of all senders."""

import asyncio
import errno
from contextlib import ExitStack

from aiotensor.errors import AccessDeniedError, ProtocolError
from aiotensor.runtime.logs import RepeatedEvent, logger_of, others
from aiotensor.transports.base import MAX_UNREAD_BYTES, Acceptor
from aiotensor.transports.records import SocketTransport
from aiotensor.transports.stock.ends import ReceiverEnd, address_of, new_socket
from aiotensor.transports.stock.pipe import MAX_DATA_BYTES, Chunk, ChunkReader, Kind, StockQueue, open_reader
from aiotensor.transports.users import check_user

__all__ = ["StockListener", "listen_on"]

logger = logger_of("transports")


async def listen_on(queue: StockQueue, acceptor: Acceptor, max_record_bytes: int) -> "StockListener":
    """Become the only receiver of a queue, and begin to read it, as `Route.listen` does; does not wait.

    Errors are those of `open_reader`.
    """
    return StockListener(ChunkReader(open_reader(queue)), acceptor, max_record_bytes)


class StockListener:
    """Read a queue, and pass each chunk to the connection of its sender; created by `listen_on`."""

    def __init__(self, reader: ChunkReader, acceptor: Acceptor, max_record_bytes: int) -> None:
        self._reader = reader
        self._acceptor = acceptor
        self._max_record_bytes = max_record_bytes
        self._max_chunks = max_record_bytes // MAX_DATA_BYTES + 1  # of a record
        self._connections: dict[bytes, ReceiverEnd] = {}
        # The senders that have ended, with the reason, and the position in the queue after their last chunks.
        self._ended: dict[ReceiverEnd, tuple[str | ProtocolError, int]] = {}
        self._refused = RepeatedEvent(_log_refused)  # any process with the queue can cause these at any rate
        self._failed = RepeatedEvent(_log_failed)
        self._objects = RepeatedEvent(_log_object)
        self._loop = asyncio.get_running_loop()
        self._reading_on: asyncio.Handle | None = None
        self._is_reading = True
        self._loop.add_reader(reader.descriptor, self._read)

    def accept_now(self) -> None:
        """Do nothing: senders cannot reconnect to a queue."""

    def close(self) -> None:
        """Stop reading; the remaining chunks stay on the queue."""
        self._stop_reading()
        self._reader.close()
        for event in self._refused, self._failed, self._objects:
            event.close()

    def _sender_ended(self, transport: ReceiverEnd, reason: str | ProtocolError) -> None:
        """Report the end of a sender, once all chunks that are on the queue now have been read."""
        unread = self._reader.unread_bytes if self._is_reading else 0
        self._ended[transport] = reason, self._reader.read_bytes + unread
        self._loop.call_soon(self._report_ended)

    def _forget(self, transport: ReceiverEnd) -> None:
        """Ignore further chunks of a sender whose connection was closed here."""
        self._connections.pop(transport.connection, None)
        self._ended.pop(transport, None)

    def _stop_reading(self) -> None:
        if not self._is_reading:
            return
        self._is_reading = False
        self._loop.remove_reader(self._reader.descriptor)
        if self._reading_on is not None:
            self._reading_on.cancel()
        if self._ended:
            self._loop.call_soon(self._report_ended)

    def _read(self) -> None:
        """Read one record, so that the other callbacks of the loop run in between."""
        for _ in range(self._max_chunks):
            chunk = self._next_chunk()
            if chunk is None:
                break
            self._dispatch(chunk)
            if chunk.kind != Kind.PART:
                break
        if self._ended:
            self._report_ended()
        if self._reader.has_more and self._reading_on is None:
            self._reading_on = self._loop.call_soon(self._read_on)

    def _next_chunk(self) -> Chunk | None:
        if not self._is_reading:
            return None
        try:
            return self._reader.read()
        except EOFError:
            self._stop_reading()  # all writers are closed, including this process's
        except ProtocolError as error:
            self._fail(OSError(errno.EBADMSG, str(error)))
        except OSError as error:
            self._fail(error)
        return None

    def _read_on(self) -> None:
        self._reading_on = None
        self._read()

    def _dispatch(self, chunk: Chunk) -> None:
        if chunk.kind == Kind.CONNECT:
            self._connect(chunk.connection)
        elif chunk.kind == Kind.OBJECT:
            self._objects.add()
        else:
            # There is no connection if it was closed here, or belonged to an earlier receiver.
            transport = self._connections.get(chunk.connection)
            if transport is not None:
                transport.chunk_received(chunk)

    def _connect(self, connection: bytes) -> None:
        """Connect to a sender at its request, unless this is a repeated request."""
        if connection in self._connections:
            return
        try:
            with ExitStack() as stack:
                sock = stack.enter_context(new_socket())
                sock.connect(address_of(connection))
                pid = check_user(sock)
                stack.pop_all()
        except AccessDeniedError as error:
            self._refused.add(str(error))
        except ConnectionRefusedError:
            logger.info(
                "a sender that requested a connection has ended, or runs in another network namespace",
                extra={"event": "sender_unreachable", "address": "queue"},
            )
        except OSError as error:
            self._failed.add(str(error))  # the sender asks again
        else:
            pipe = SocketTransport(sock, pid, max_unsent_bytes=MAX_UNREAD_BYTES)
            transport = ReceiverEnd(
                connection, pipe, self._max_record_bytes, self._sender_ended, self._forget
            )
            self._connections[connection] = transport
            self._acceptor.connection_accepted(transport)

    def _fail(self, error: OSError) -> None:
        """End all connections, since no further chunk can be read."""
        self._stop_reading()
        for transport in list(self._connections.values()):
            transport.lose(f"reading the queue failed: {error}")
        self._acceptor.listening_failed(error)

    def _report_ended(self) -> None:
        for transport, (reason, end) in list(self._ended.items()):
            if end <= self._reader.read_bytes or not self._is_reading:
                transport.lose(reason)


def _log_refused(count: int, reason: str) -> None:
    logger.error(
        "a connection was refused: %s%s",
        reason,
        others(count),
        extra={"event": "sender_refused", "address": "queue", "reason": reason, "count": count},
    )


def _log_failed(count: int, reason: str) -> None:
    logger.error(
        "connecting to a sender failed, and the sender will retry: %s%s",
        reason,
        others(count),
        extra={"event": "answering_failed", "address": "queue", "reason": reason, "count": count},
    )


def _log_object(count: int) -> None:
    logger.error(
        "an object that the application put on the queue was ignored: use another queue for it%s",
        others(count),
        extra={"event": "object_ignored", "address": "queue", "count": count},
    )
