"""The transport over Unix sockets: processes of one user on one machine connect by the address of a socket.

An address is a path, or an abstract name, which begins with a null character and needs no file. Each
connection is a `SOCK_SEQPACKET` socket, so each side is notified at once when the other dies. The process
that listens may start later than the others, and may be restarted: they connect again.
"""

import asyncio
import errno
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from aiotensor.errors import AccessDeniedError, AioTensorError, UsageError, is_shortage
from aiotensor.runtime.descriptors import close_after_fork
from aiotensor.runtime.logs import RepeatedEvent, logger_of, others
from aiotensor.runtime.outage import Absence
from aiotensor.transports.address import is_abstract, missing_at
from aiotensor.transports.base import MAX_UNREAD_BYTES, Acceptor, ConnectorEvents, Transport, unexpected
from aiotensor.transports.records import SocketTransport
from aiotensor.transports.socket_file import BACKLOG, SocketFile
from aiotensor.transports.users import check_file, check_user, not_permitted

__all__ = ["RetryingConnector", "UnixConnector", "UnixListener", "connect_to", "listen_at", "listen_by_name"]

logger = logger_of("transports")

_ACCEPTS_A_TURN = 16  # a flood of connections must not block the loop

# There is no notification when a socket appears at an address, so a connector polls for it, but only while it
# is not connected.
_FIRST_RETRY_S = 0.005
_LAST_RETRY_S = 0.25

# A full backlog has free entries only briefly, and other processes may compete for them. During a flood of
# connections, no sender connected within 3 s with delays that grow to `_LAST_RETRY_S`.
_FULL_RETRY_S = 0.01

# With no descriptor left, a listening socket would stay readable and keep the loop busy.
_ACCEPT_PAUSE_S = 1.0

# An abstract name stays in use while a child that another thread is starting has a copy of the closed socket,
# and until the kernel has closed the sockets of a killed process.
_BIND_RETRIES, _BIND_RETRY_S = 20, 0.01


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def connect_to(address: str, max_unsent_bytes: int | None = None) -> SocketTransport:
    """Connect to a listening process, and check its user; the limits are those of `SocketTransport`.

    Raises:
        AccessDeniedError: the process runs as another user.
        OSError: no process listens, its backlog is full, or connecting is not permitted.
    """
    sock = _new_socket()
    try:
        sock.connect(address)
        pid = check_user(sock)
    except BaseException:
        sock.close()
        raise
    return SocketTransport(sock, pid, max_unsent_bytes=max_unsent_bytes)


class RetryingConnector(ABC):
    """The retries of a connector: after a failure, and after a loss.

    Args:
        label: the address in logs.
        reason: returns why no peer is connected, for the log.
        events: the object that is notified.
    """

    is_backlogged = False

    def __init__(self, label: str, reason: Callable[[], str], events: ConnectorEvents) -> None:
        self._label = label
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._transport: Transport | None = None
        self._connected_at = math.inf  # when the last connection began, until another attempt is scheduled
        self._attempt: asyncio.TimerHandle | None = None
        self._delay = _FIRST_RETRY_S
        self._is_exhausted = False  # this process has no descriptors or no memory, and that was logged
        self._is_closed = False
        self._absence = Absence(label, reason)

    @abstractmethod
    def connect(self) -> None:
        """Connect with `begin`, or call `reconnect` to try again later, as `Connector.connect` does."""

    def begin(self, transport: Transport) -> None:
        """Begin a new connection.

        Raises:
            OSError: writing the first record failed.
        """
        self._transport = transport
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
        """Connect again after a delay."""
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
        """Stop all attempts."""
        self._is_closed = True
        self._absence.end()
        self.cancel_attempt()

    def cancel_attempt(self) -> None:
        """Cancel the scheduled attempt, if there is one."""
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None

    def _connect_again(self) -> None:
        self._attempt = None
        if not self._is_closed:
            self.try_to(self.connect)

    def try_to(self, connect: Callable[[], object]) -> None:
        """Call a function that connects, and handle its errors."""
        try:
            connect()
        except AioTensorError as error:
            self._absence.end()  # the calls that waited get this error
            self._events.connecting_failed(error)
        except OSError as error:
            # There may be descriptors or memory again later; calls that wait for the peer keep waiting.
            if not self._is_exhausted:
                logger.error(
                    "connecting to %s failed and will be retried: %s",
                    self._label,
                    error,
                    extra={"event": "connecting_failed", "address": self._label, "reason": str(error)},
                )
            self._is_exhausted = True
            self.reconnect()
        except Exception as error:  # noqa: BLE001 - otherwise, the calls that wait for the peer would hang
            self._absence.end()
            self._events.connecting_failed(unexpected(self._label, error))


class UnixConnector(RetryingConnector):
    """Connect to the process that listens at a path or an abstract name, and again after a loss."""

    connects_at_once = True

    def __init__(self, address: str, events: ConnectorEvents) -> None:
        self._address = address
        super().__init__(_label_of(address), partial(missing_at, address), events)

    def connect(self) -> None:
        """Connect if a process listens, or begin to poll for it, as `Connector.connect` does."""
        try:
            transport = connect_to(self._address)
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError, BlockingIOError) as error:
            if not is_abstract(self._address):
                check_file(self._address)  # the process has not started, has ended, or its backlog is full
            self.is_backlogged = isinstance(error, BlockingIOError)
            self._is_exhausted = False
            self.reconnect()
            return
        except PermissionError as error:
            raise not_permitted(self._label) from error
        except OSError as error:
            if is_shortage(error):
                raise  # a later attempt may succeed
            if error.errno == errno.EPROTOTYPE:
                raise UsageError(
                    f"the socket at {self._label} is not that of a receiver or publisher: a "
                    "MessageServer, for example, has an address of its own"
                ) from error
            raise UsageError(f"connecting to {self._label} failed: {error.strerror}") from error
        self.begin(transport)


async def listen_at(address: str, acceptor: Acceptor, *, makes_folder: bool = False) -> "UnixListener":
    """Listen at a path or an abstract name, as `Route.listen` does.

    At a path, it replaces the socket file of a dead receiver; it waits and raises errors as `SocketFile.take`
    does.
    """
    if is_abstract(address):
        for retries in range(_BIND_RETRIES, -1, -1):
            try:
                return listen_by_name(address, acceptor, MAX_UNREAD_BYTES)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                if not retries:
                    raise UsageError(
                        "a receiver or publisher already listens on this queue: close that one, or create a "
                        "queue for each receiver"
                    ) from error
            await asyncio.sleep(_BIND_RETRY_S)
    file = SocketFile(address, _new_socket(), makes_folder=makes_folder)
    try:
        await file.take()
    except BaseException:
        file.leave()
        raise
    return UnixListener(file.sock, address, file.leave, acceptor, MAX_UNREAD_BYTES)


def listen_by_name(name: str, acceptor: Acceptor, max_unsent_bytes: int | None) -> "UnixListener":
    """Listen at an abstract name.

    Raises:
        OSError: the name is in use (EADDRINUSE), or no descriptors are left.
    """
    sock = _new_socket()
    close_after_fork(sock)
    try:
        sock.bind(name)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return UnixListener(sock, _label_of(name), sock.close, acceptor, max_unsent_bytes)


class UnixListener:
    """Accept connections; created by `listen_at` and `listen_by_name`.

    Args:
        sock: the listening socket.
        label: its address in logs.
        leave: closes the socket, and removes its file.
        acceptor: the object that is notified.
        max_unsent_bytes: as for `SocketTransport`.
    """

    address = ""

    def __init__(
        self,
        sock: socket.socket,
        label: str,
        leave: Callable[[], object],
        acceptor: Acceptor,
        max_unsent_bytes: int | None,
    ) -> None:
        self._sock = sock
        self._label = label
        self._leave = leave
        self._acceptor = acceptor
        self._max_unsent_bytes = max_unsent_bytes
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._refused = RepeatedEvent(_log_refused)  # a peer can connect again at any rate
        self._is_closed = False
        self._loop.add_reader(sock.fileno(), self.accept_now)

    def close(self) -> None:
        """Close the listening socket, and remove its file."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._leave()
        self._refused.close()

    def accept_now(self) -> None:
        """Accept pending connections, but only some of them in one iteration of the event loop."""
        for _ in range(_ACCEPTS_A_TURN):
            if self._is_closed:
                return
            try:
                sock, _ = self._sock.accept()
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
                self._refused.add(self._label, str(error))
                sock.close()
                continue
            transport = SocketTransport(sock, pid, max_unsent_bytes=self._max_unsent_bytes)
            self._acceptor.connection_accepted(transport)

    def _pause_accepting(self, error: OSError) -> None:
        if self._pause is not None:
            return
        logger.error(
            "accepting a connection failed: %s",
            error,
            extra={"event": "accepting_failed", "address": self._label, "reason": str(error)},
        )
        self._loop.remove_reader(self._sock.fileno())
        self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self.accept_now)


def _log_refused(count: int, path: str, reason: str) -> None:
    logger.error(
        "a sender was refused: %s%s",
        reason,
        others(count),
        extra={"event": "connection_refused", "address": path, "reason": reason, "count": count},
    )


def _label_of(address: str) -> str:
    return "queue" if is_abstract(address) else address
