"""The transport over Unix sockets: processes of one user on one machine connect by the address of a socket.

An address is a path, or an abstract name, which begins with a null character and needs no file. Each
connection is a `SOCK_SEQPACKET` socket, so each side is notified at once when the other dies. The process
that listens may start later than the others, and may be restarted: they connect again.
"""

import asyncio
import errno
import socket
from collections.abc import Callable

from aiotensor.errors import AccessDeniedError, UsageError, is_shortage
from aiotensor.runtime.descriptors import close_after_fork
from aiotensor.runtime.logs import RepeatedEvent, logger_of
from aiotensor.transports.address import is_abstract, missing_at
from aiotensor.transports.base import MAX_UNREAD_BYTES, Acceptor, Connector, ConnectorEvents, log_refused
from aiotensor.transports.records import SocketTransport
from aiotensor.transports.socket_file import BACKLOG, SocketFile
from aiotensor.transports.users import check_file, check_user, not_permitted

__all__ = ["UnixConnector", "UnixListener", "connect_to", "listen_at", "listen_by_name"]

logger = logger_of("transports")

_ACCEPTS_A_TURN = 16  # a flood of connections must not block the loop

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


class UnixConnector(Connector):
    """Connect to the process that listens at a path or an abstract name, and again after a loss."""

    connects_at_once = True

    def __init__(self, address: str, events: ConnectorEvents) -> None:
        super().__init__(_label_of(address), events)
        self._address = address

    def missing(self) -> str:
        """Return why no peer is connected, as `Connector.missing` does."""
        return missing_at(self._address)

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
                raise UsageError(f"the socket at {self._label} is not one of aiotensor") from error
            raise UsageError(f"connecting to {self._label} failed: {error.strerror}") from error
        self.begin(transport)


async def listen_at(address: str, acceptor: Acceptor) -> "UnixListener":
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
                        "a receiver, publisher or server already listens on this queue: close that one, or "
                        "create a queue for each of them"
                    ) from error
            await asyncio.sleep(_BIND_RETRY_S)
    file = SocketFile(address, _new_socket())
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
        self._refused = RepeatedEvent(log_refused)  # a peer can connect again at any rate
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


def _label_of(address: str) -> str:
    return "queue" if is_abstract(address) else address
