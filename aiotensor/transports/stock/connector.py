"""The connecting side over a stock queue: a sender sends a request on it, and the receiver connects."""

import asyncio
import secrets
import socket
from contextlib import ExitStack

from aiotensor.errors import AccessDeniedError, AioTensorError, PeerLostError
from aiotensor.runtime.descriptors import close_after_fork
from aiotensor.runtime.logs import RepeatedEvent, logger_of, others
from aiotensor.transports.base import ConnectorEvents
from aiotensor.transports.records import SocketTransport
from aiotensor.transports.stock.ends import SenderEnd, address_of, new_socket
from aiotensor.transports.stock.pipe import CONNECTION_BYTES, ChunkWriter, StockQueue, open_writer
from aiotensor.transports.users import check_user

__all__ = ["StockConnector"]

logger = logger_of("transports")

# How often an unconnected sender checks whether its request was lost with a receiver that ended after reading
# it. A connected sender does not poll.
_ASK_AGAIN_S = 0.25


class StockConnector:
    """Connect to the receiver of a stock queue, once.

    Args:
        queue: the queue that the receiver reads.
        events: the object that is notified.
    """

    reconnects = False
    connects_at_once = False
    is_backlogged = False  # a queue has no backlog

    def __init__(self, queue: StockQueue, events: ConnectorEvents) -> None:
        self._queue = queue
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._writer: ChunkWriter | None = None  # these two exist until the receiver has connected
        self._door: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_exhausted = False  # this process has no descriptors, and that was logged
        self._refused = RepeatedEvent(_log_refused)  # another user can find the address, and connect again

    def connect(self) -> None:
        """Send the receiver a request to connect; errors are those of `open_writer`."""
        connection = secrets.token_bytes(CONNECTION_BYTES)
        with ExitStack() as stack:
            writer = ChunkWriter(open_writer(self._queue), connection)
            stack.callback(writer.close)
            door = stack.enter_context(new_socket())
            close_after_fork(door)
            door.bind(address_of(connection))
            door.listen()
            writer.failed = self._asking_failed
            writer.connect()
            stack.pop_all()
        self._writer, self._door = writer, door
        self._loop.add_reader(door.fileno(), self._accept)
        self._timer = self._loop.call_later(_ASK_AGAIN_S, self._ask_again)

    def reconnect(self) -> None:
        """Do nothing: a sender on a queue ends with its receiver."""

    def connect_now(self) -> None:
        """Do nothing: a sender on a queue ends with its receiver."""

    def close(self) -> None:
        """Stop waiting for the receiver to connect."""
        writer = self._stop_waiting()
        if writer is not None:
            writer.close()
        self._refused.close()

    def _stop_waiting(self) -> ChunkWriter | None:
        """Close the address, and return the writer; None if the receiver has connected already."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._door is not None:
            self._loop.remove_reader(self._door.fileno())
            self._door.close()
            self._door = None
        writer, self._writer = self._writer, None
        return writer

    def _accept(self) -> None:
        if self._door is None:
            return
        try:
            sock, _ = self._door.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._log_failed(error)
            self._loop.remove_reader(self._door.fileno())  # it would stay readable, and keep the loop busy
            return
        sock.setblocking(False)
        try:
            pid = check_user(sock)
        except AccessDeniedError as error:
            self._refused.add(str(error))
            sock.close()
            return
        writer = self._stop_waiting()
        if writer is None:
            sock.close()
            return
        transport = SenderEnd(writer, SocketTransport(sock, pid))
        try:
            self._events.connected(transport)
        except OSError as error:
            transport.close()
            self._log_failed(error)
            self._timer = self._loop.call_later(_ASK_AGAIN_S, self._connect_again)
        except BaseException:
            transport.close()
            raise

    def _ask_again(self) -> None:
        """Repeat the request if it was read by a receiver that then ended or could not connect."""
        if self._writer is None or self._door is None:
            return
        if not self._writer.has_reader:
            self._asking_failed(BrokenPipeError())
            return
        self._loop.add_reader(self._door.fileno(), self._accept)
        self._timer = self._loop.call_later(_ASK_AGAIN_S, self._ask_again)
        if not self._writer.unread_bytes:
            self._writer.connect()

    def _connect_again(self) -> None:
        try:
            self.connect()
        except AioTensorError as error:
            self._events.connecting_failed(error)
        except OSError as error:
            self._log_failed(error)
            self._timer = self._loop.call_later(_ASK_AGAIN_S, self._connect_again)

    def _asking_failed(self, error: OSError) -> None:
        self.close()
        reason = "no process can read it" if isinstance(error, BrokenPipeError) else str(error)
        self._events.connecting_failed(PeerLostError(f"the queue no longer has a receiver: {reason}"))

    def _log_failed(self, error: OSError) -> None:
        if not self._is_exhausted:
            logger.error(
                "connecting over the queue failed and will be retried: %s",
                error,
                extra={"event": "connecting_failed", "address": "queue", "reason": str(error)},
            )
        self._is_exhausted = True


def _log_refused(count: int, reason: str) -> None:
    logger.error(
        "a connection was refused: %s%s",
        reason,
        others(count),
        extra={"event": "sender_refused", "address": "queue", "reason": reason, "count": count},
    )
