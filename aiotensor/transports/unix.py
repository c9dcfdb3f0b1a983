"""The transport over Unix sockets: processes of one user on one machine connect by the path of a socket.

Each connection is a `SOCK_SEQPACKET` socket, so each side is notified at once when the other dies. The
process that listens may start later than the others, and may be restarted: they connect again.
"""

import asyncio
import errno
import math
import socket
from contextlib import ExitStack
from functools import partial

from aiotensor.errors import AccessDeniedError, AioTensorError, UsageError
from aiotensor.runtime.logs import RepeatedEvent, logger_of, others
from aiotensor.runtime.outage import Absence
from aiotensor.transports.address import missing_at
from aiotensor.transports.base import MAX_UNREAD_BYTES, Acceptor, ConnectorEvents, unexpected
from aiotensor.transports.records import SocketTransport
from aiotensor.transports.socket_file import SocketFile
from aiotensor.transports.users import check_file, check_user, not_permitted

__all__ = ["UnixConnector", "UnixListener", "listen_at"]

logger = logger_of("transports")

_ACCEPTS_A_TURN = 16  # a flood of connections must not block the loop

# There is no notification when a socket appears at a path, so a connector polls for it, but only while it is
# not connected.
_FIRST_RETRY_S = 0.005
_LAST_RETRY_S = 0.25

# A full backlog has free entries only briefly, and other processes may compete for them. During a flood of
# connections, no sender connected within 3 s with delays that grow to `_LAST_RETRY_S`.
_FULL_RETRY_S = 0.01

# With no descriptor left, a listening socket would stay readable and keep the loop busy.
_ACCEPT_PAUSE_S = 1.0


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


class UnixConnector:
    """Connect to the process that listens at a path, and again after a loss."""

    reconnects = True
    connects_at_once = True

    def __init__(self, path: str, events: ConnectorEvents) -> None:
        self.is_backlogged = False
        self._path = path
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._transport: SocketTransport | None = None
        self._connected_at = math.inf  # when the last connection began, until another attempt is scheduled
        self._attempt: asyncio.TimerHandle | None = None
        self._delay = _FIRST_RETRY_S
        self._is_exhausted = False  # this process has no descriptors or no memory, and that was logged
        self._is_closed = False
        self._absence = Absence(path, partial(missing_at, path))

    def connect(self) -> None:
        """Connect if a process listens, or begin to poll for it, as `Connector.connect` does."""
        with ExitStack() as stack:
            sock = stack.enter_context(_new_socket())
            try:
                sock.connect(self._path)
                pid = check_user(sock)
            except (
                FileNotFoundError,
                NotADirectoryError,
                ConnectionRefusedError,
                BlockingIOError,
            ) as error:
                check_file(self._path)  # the process has not started, has ended, or its backlog is full
                self.is_backlogged = isinstance(error, BlockingIOError)
                self._is_exhausted = False
                self.reconnect()
                return
            except PermissionError as error:
                raise not_permitted(self._path) from error
            except OSError as error:
                if error.errno in (errno.ENOMEM, errno.ENOBUFS):
                    raise  # a later attempt may succeed
                if error.errno == errno.EPROTOTYPE:
                    raise UsageError(
                        f"the socket at {self._path} is not that of a receiver or publisher: a "
                        "MessageServer, for example, has an address of its own"
                    ) from error
                raise UsageError(f"connecting to {self._path} failed: {error.strerror}") from error
            self._transport = transport = SocketTransport(sock, pid)
            stack.pop_all()
        self._connected_at = self._loop.time()
        self.is_backlogged = False
        try:
            self._events.connected(transport)
        except BaseException:
            transport.close()  # the peer would reject any other first record
            raise
        self._absence.end()
        self._is_exhausted = False

    def reconnect(self) -> None:
        """Begin to poll for the next process that listens."""
        if self._is_closed or self._attempt is not None:
            return
        self._absence.begin()
        if self.is_backlogged:
            self._attempt = self._loop.call_later(_FULL_RETRY_S, self._connect_again)
            return
        if self._loop.time() - self._connected_at >= _LAST_RETRY_S:
            # Otherwise the delay grows, even if the peer accepts each connection and then closes it.
            self._delay = _FIRST_RETRY_S
        self._connected_at = math.inf
        self._attempt = self._loop.call_later(self._delay, self._connect_again)
        self._delay = min(2 * self._delay, _LAST_RETRY_S)

    def connect_now(self) -> None:
        """Connect now, if there is no connection and no attempt is scheduled."""
        if self._attempt is None and (self._transport is None or self._transport.is_closed):
            self._connect_again()

    def close(self) -> None:
        """Stop polling."""
        self._is_closed = True
        self._absence.end()
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None

    def _connect_again(self) -> None:
        self._attempt = None
        if self._is_closed:
            return
        try:
            self.connect()
        except AioTensorError as error:
            self._absence.end()  # the calls that waited get this error
            self._events.connecting_failed(error)
        except OSError as error:
            # There may be descriptors or memory again later; calls that wait for the peer keep waiting.
            if not self._is_exhausted:
                logger.error(
                    "connecting to %s failed and will be retried: %s",
                    self._path,
                    error,
                    extra={"event": "connecting_failed", "address": self._path, "reason": str(error)},
                )
            self._is_exhausted = True
            self.reconnect()
        except Exception as error:  # noqa: BLE001 - otherwise, the calls that wait for the peer would hang
            self._absence.end()
            self._events.connecting_failed(unexpected(self._path, error))


async def listen_at(
    path: str, acceptor: Acceptor, max_record_bytes: int, *, makes_folder: bool = False
) -> "UnixListener":
    """Listen at a path, and replace the socket file of a dead receiver, as `Route.listen` does.

    It waits and raises errors as `SocketFile.take` does.
    """
    file = SocketFile(path, _new_socket(), makes_folder=makes_folder)
    try:
        await file.take()
    except BaseException:
        file.leave()
        raise
    return UnixListener(file, acceptor, max_record_bytes)


class UnixListener:
    """Accept connections at a path; created by `listen_at`."""

    def __init__(self, file: SocketFile, acceptor: Acceptor, max_record_bytes: int) -> None:
        self._file = file
        self._acceptor = acceptor
        self._max_record_bytes = max_record_bytes
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._refused = RepeatedEvent(_log_refused)  # a peer can connect again at any rate
        self._is_closed = False
        self._loop.add_reader(file.sock.fileno(), self.accept_now)

    def close(self) -> None:
        """Close the listening socket, and remove its file."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._file.sock.fileno())
        self._file.leave()
        self._refused.close()

    def accept_now(self) -> None:
        """Accept pending connections, but only some of them in one iteration of the event loop."""
        for _ in range(_ACCEPTS_A_TURN):
            if self._is_closed:
                return
            try:
                sock, _ = self._file.sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._pause_accepting(error)
                return
            sock.setblocking(False)
            try:
                pid = check_user(sock)
            except AccessDeniedError as error:
                self._refused.add(self._file.path, str(error))
                sock.close()
                continue
            transport = SocketTransport(
                sock, pid, max_record_bytes=self._max_record_bytes, max_unsent_bytes=MAX_UNREAD_BYTES
            )
            self._acceptor.connection_accepted(transport)

    def _pause_accepting(self, error: OSError) -> None:
        if self._pause is not None:
            return
        logger.error(
            "accepting a connection failed: %s",
            error,
            extra={"event": "accepting_failed", "address": self._file.path, "reason": str(error)},
        )
        self._loop.remove_reader(self._file.sock.fileno())
        self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._pause = None
        self._loop.add_reader(self._file.sock.fileno(), self.accept_now)


def _log_refused(count: int, path: str, reason: str) -> None:
    logger.error(
        "a sender was refused: %s%s",
        reason,
        others(count),
        extra={"event": "sender_refused", "address": path, "reason": reason, "count": count},
    )
