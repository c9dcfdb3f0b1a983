"""The transport over Unix sockets: processes of one user on one machine connect by the address of a socket.

An address is a path, or an abstract name, which begins with a null character and needs no file. Each
connection is a `SOCK_SEQPACKET` socket, so each side is notified at once when the other dies. The process
that listens may start later than the others, and may be restarted: they connect again.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator

from aiotensor.errors import AccessDeniedError, UsageError, is_shortage
from aiotensor.runtime.descriptors import Descriptor, close_after_fork
from aiotensor.runtime.logs import RepeatedEvent, logger_of
from aiotensor.transports.base import Acceptor, Connector, Events, log_refused
from aiotensor.transports.records import SocketTransport

logger = logger_of("transports")

_BACKLOG = 128
_ACCEPTS_A_TURN = 16  # a flood of connections must not block the loop

# With no descriptor left, a listening socket would stay readable and keep the loop busy.
_ACCEPT_PAUSE_S = 1.0

# An abstract name stays in use while a child that another thread is starting has a copy of the closed socket,
# and until the kernel has closed the sockets of a killed process.
_BIND_RETRIES, _BIND_RETRY_S = 20, 0.01

# The delay between attempts while another process holds the lock of the folder, usually for a few system
# calls. A wait of `_LONG_WAIT_S` is logged.
_LOCK_RETRY_S = 0.02
_LONG_WAIT_S = 1.0

_CREDENTIALS = struct.Struct("3i")  # of the peer: pid, uid, gid


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def _is_abstract(address: str) -> bool:
    return address.startswith("\0")


def _label_of(address: str) -> str:
    return "queue" if _is_abstract(address) else address


def _check_user(sock: socket.socket) -> int:
    """Check that the peer runs as this user, and return its process id; 0 if not in this PID namespace.

    Raises:
        AccessDeniedError: the peer runs as another user.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise AccessDeniedError(
            f"the peer (pid {pid}) runs as user {uid}, but this process runs as user {os.geteuid()}: run "
            "both as the same user"
        )
    return int(pid)


class UnixConnector(Connector):
    """Connect to the process that listens at a path or an abstract name, and again after a loss."""

    def __init__(self, address: str, events: Events) -> None:
        super().__init__(_label_of(address), events)
        self._address = address

    def missing(self) -> str:
        """Return why no peer is connected, as `Connector.missing` does."""
        if not _is_abstract(self._address):
            folder = os.path.dirname(self._address)
            if not os.path.isdir(folder):
                return f"the folder {folder} does not exist"
            if os.path.exists(self._address):
                return "the process that listened there has ended, or accepts no connections"
        return "no process listens there"

    def connect(self) -> None:
        """Connect if a process listens, or begin to poll for it, as `Connector.connect` does."""
        try:
            transport = _connect_to(self._address)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            if not _is_abstract(self._address) and os.path.isdir(self._address):
                raise UsageError(f"{self._label} is a folder: use the path of a socket in it") from None
            self.is_backlogged = isinstance(error, BlockingIOError)
            self.obstacle = ""
            self.reconnect()
            return
        except PermissionError as error:
            raise AccessDeniedError(
                f"this user may not connect to {self._label}: run both sides as the same user, in a folder "
                "that it may enter"
            ) from error
        except OSError as error:
            if is_shortage(error):
                raise  # a later attempt may succeed
            if error.errno == errno.EPROTOTYPE:
                raise UsageError(f"the socket at {self._label} is not one of aiotensor") from error
            raise UsageError(f"connecting to {self._label} failed: {error.strerror}") from error
        self.begin(transport)


def _connect_to(address: str) -> SocketTransport:
    sock = _new_socket()
    try:
        sock.connect(address)
        return SocketTransport(sock, _check_user(sock))
    except BaseException:
        sock.close()
        raise


async def listen_at(address: str, acceptor: Acceptor) -> "UnixListener":
    """Listen at a path or an abstract name, as `Route.listen` does.

    A file at a path gets the mode 0600, and replaces the socket file of a dead receiver. This waits while
    another process holds the lock of the folder, as a receiver does briefly while it opens there. It never
    blocks the event loop, and uses no thread. Cancellation leaves nothing at the path.

    Raises:
        UsageError: another object listens at the address, or the file there is not a socket of this user.
        FileNotFoundError: the folder does not exist; `filename` names it.
        NotADirectoryError: the folder is not a directory.
        PermissionError: this user may not read the folder, or not create a socket in it.
        OSError: the file system is read-only or does not support sockets, or no descriptor is left.
    """
    sock = _new_socket()
    close_after_fork(sock)
    file = None
    try:
        if _is_abstract(address):
            await _bind_name(sock, address)
            sock.listen(_BACKLOG)
        else:
            async with _locked(os.path.dirname(address), address):
                file = _bind_path(sock, address)
                sock.listen(_BACKLOG)  # while the folder is locked: a socket that does not listen looks stale
    except BaseException:
        sock.close()
        raise
    return UnixListener(sock, address, file, acceptor)


async def _bind_name(sock: socket.socket, name: str) -> None:
    for retries in range(_BIND_RETRIES, -1, -1):
        try:
            sock.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            if not retries:
                raise UsageError(
                    "a receiver, publisher or server already listens on this queue: close that one, or "
                    "create a queue for each of them"
                ) from error
        else:
            return
        await asyncio.sleep(_BIND_RETRY_S)


@contextlib.asynccontextmanager
async def _locked(folder: str, path: str) -> AsyncIterator[None]:
    """Lock the folder of a socket: two receivers that find one stale socket must not both replace it.

    The folder itself is locked, because a separate lock file would be left behind.
    """
    # This polls, because a thread that waits in the kernel cannot be cancelled, and would keep the
    # interpreter from exiting.
    loop = asyncio.get_running_loop()
    began, was_logged = loop.time(), False
    try:
        descriptor = Descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        raise _refused(error, path) from error
    with contextlib.closing(descriptor):
        while True:
            try:
                fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited_s = loop.time() - began
            except OSError as error:  # not every file system supports locks
                raise _refused(error, path) from error
            if waited_s >= _LONG_WAIT_S and not was_logged:
                was_logged = True
                logger.warning(
                    "waiting for the lock of the folder %s, which another process holds: %s cannot be opened "
                    "before it is released",
                    folder,
                    path,
                    extra={"event": "folder_locked", "address": path, "folder": folder, "waited_s": waited_s},
                )
            await asyncio.sleep(_LOCK_RETRY_S)
        try:
            yield
        finally:
            # A child that another thread is starting has a copy of the descriptor until it runs its program.
            # Closing the descriptor here would leave the folder locked until then.
            fcntl.flock(descriptor.number, fcntl.LOCK_UN)


def _bind_path(sock: socket.socket, path: str) -> os.stat_result:
    """Bind a socket to a path, with a file that only this user may use, and return the status of the file."""
    # The file gets the mode that the socket has when it is bound, so other users can never connect.
    os.fchmod(sock.fileno(), 0o600)
    remove_stale(path)
    try:
        sock.bind(path)
        return os.stat(path)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"a file that is not a socket of this user already exists at {path}: choose another path"
            ) from error
        raise _refused(error, path) from error


def remove_stale(path: str) -> None:
    """Remove the socket file of a dead receiver.

    Raises:
        UsageError: the receiver is alive.
    """
    # A datagram socket cannot connect to a socket of another type. If the receiver is alive, the kernel
    # reports the wrong type (EPROTOTYPE), and the receiver does not notice the attempt.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            try:
                status = os.lstat(path)
                if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid():
                    os.unlink(path)
            except OSError as error:
                raise _refused(error, path) from error
            return  # binding raises the error if the path names another file
        except (FileNotFoundError, PermissionError):
            return  # binding raises the error if this user may not use the file or the folder
        except OSError as error:
            if error.errno != errno.EPROTOTYPE:
                raise _refused(error, path) from error
    raise UsageError(
        f"a running receiver, publisher or server already listens at {path}: stop it, or choose another path"
    )


def _refused(error: OSError, path: str) -> OSError:
    """Return an error that names the folder; `OSError` chooses the subclass by the errno."""
    return OSError(error.errno, f"cannot listen at {path}: {error.strerror}", os.path.dirname(path))


class UnixListener:
    """Accept connections; created by `listen_at`.

    Args:
        sock: the listening socket, which belongs to this object.
        address: its path or abstract name.
        file: the status of the file at the path.
        acceptor: called with each new connection.
    """

    address = ""

    def __init__(
        self, sock: socket.socket, address: str, file: os.stat_result | None, acceptor: Acceptor
    ) -> None:
        self._sock = sock
        self._socket_address = address
        self._file = file
        self._acceptor = acceptor
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._refused = RepeatedEvent(log_refused)  # a peer can connect again at any rate
        self._is_closed = False
        self._loop.add_reader(sock.fileno(), self.accept_now)

    def close(self) -> None:
        """Close the listening socket, and remove its file unless that belongs to another socket by now."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        if self._file is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(self._socket_address), self._file):
                    os.unlink(self._socket_address)
        self._sock.close()
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
                pid = _check_user(sock)
            except AccessDeniedError as error:
                self._refused.add(_label_of(self._socket_address), str(error))
                sock.close()
                continue
            self._acceptor(SocketTransport(sock, pid))

    def _pause_accepting(self, error: OSError) -> None:
        if self._pause is not None:
            return
        logger.error(
            "accepting a connection failed: %s",
            error,
            extra={
                "event": "accepting_failed",
                "address": _label_of(self._socket_address),
                "reason": str(error),
            },
        )
        self._loop.remove_reader(self._sock.fileno())
        self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._pause = None
        self._loop.add_reader(self._sock.fileno(), self.accept_now)
