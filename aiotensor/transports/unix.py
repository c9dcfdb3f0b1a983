"""The link over Unix sockets: processes of one user on one machine connect by the path of a socket.

Each sender has its own connection, a `SOCK_SEQPACKET` socket, so each side is notified at once when the other
dies. The receiver may start later than its senders, and may be restarted: they connect again.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Sequence
from functools import partial

from aiotensor.errors import AccessDeniedError, AioTensorError, PeerLostError, UsageError
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.logs import RepeatedEvent, logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.transports.base import MAX_UNREAD_BYTES, ReceiverEvents, SenderEvents
from aiotensor.transports.records import RecordSocket
from aiotensor.transports.refusals import log_cut_off, log_refused
from aiotensor.transports.socket_file import SocketFile
from aiotensor.transports.users import check_owner, check_user

__all__ = ["UnixListener", "UnixSenderLink"]

logger = logger_of("transports")

_ACCEPTS_A_TURN = 16  # a flood of connections must not block the loop

# There is no notification when a socket appears at a path, so a sender without a receiver polls for it. A
# connected pair does nothing while it is idle.
_FIRST_RETRY_S = 0.005
_LAST_RETRY_S = 0.25

# A full backlog has free entries only for moments, and other processes may compete for them.
_FULL_RETRY_S = 0.01

# With no descriptor left, a listening socket would stay readable and keep the loop busy.
_ACCEPT_PAUSE_S = 1.0


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


class UnixSenderLink:
    """A sender's end: connects to the receiver once it listens, and again after a loss.

    Args:
        path: the path of the receiver's socket.
    """

    comes_back = True

    def __init__(self, path: str) -> None:
        self._path = path
        self._sock: RecordSocket | None = None
        self._events: SenderEvents | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._delay = _FIRST_RETRY_S
        self._connected_at = 0.0
        self.peer_pid = 0
        self.is_kept_waiting = False
        self._is_starved = False  # this process has no descriptors or no memory, and that was logged
        self._waiters = Waiters()

    async def open(self, events: SenderEvents) -> None:
        """Connect if the receiver listens, or begin to poll for it."""
        self._loop = asyncio.get_running_loop()
        self._events = events
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def is_ready(self) -> bool:
        """Return whether a receiver is connected, and nothing waits to be written."""
        return self._sock is not None and self._sock.is_flushed

    async def ready(self) -> None:
        """Wait until `is_ready` may have become true, or the link has changed otherwise."""
        if self._sock is not None:
            await self._sock.room()
        elif self._events is not None:
            self.look_again()
            if self._sock is None:
                await self._waiters.wait()

    def wake(self) -> None:
        """Wake the tasks that wait in `ready`."""
        if self._sock is not None:
            self._sock.wake()
        self._waiters.wake()

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a record."""
        if self._sock is None:
            raise UsageError("no receiver is connected")
        self._sock.write(data, [os.dup(descriptor) for descriptor in descriptors])

    async def flush(self) -> None:
        """Wait until all written records were passed to the kernel."""
        if self._sock is not None:
            await self._sock.flush()

    def drop(self, *, retry: bool) -> None:
        """Close the connection, and poll for a new one if `retry` is true."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
            if self._loop.time() - self._connected_at >= _LAST_RETRY_S:
                # Otherwise the delay grows, even if the receiver accepts each connection and then closes it.
                self._delay = _FIRST_RETRY_S
        if retry:
            self._look_later()
        self._waiters.wake()

    def look_again(self) -> None:
        """Try to connect now, if no receiver is connected and no retry is scheduled."""
        if self._events is not None and self._sock is None and self._retry is None:
            self._look()

    def close(self) -> None:
        """Close the connection, and stop polling."""
        self._events = None
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self.drop(retry=False)

    def _connect(self) -> None:
        """Connect now, or schedule a retry.

        Raises:
            AccessDeniedError: the receiver belongs to another user.
            UsageError: the path does not lead to a receiver.
            OSError: this process has no descriptors or no memory left.
        """
        events = self._events
        if events is None:
            return
        sock = _new_socket()
        try:
            sock.connect(self._path)
            self.peer_pid = check_user(sock)
        except (FileNotFoundError, ConnectionRefusedError, BlockingIOError) as error:
            sock.close()  # it has not started, it is gone, or its backlog is full
            check_owner(self._path)
            self.is_kept_waiting = isinstance(error, BlockingIOError)
            self._is_starved = False
            self._look_later()
            return
        except PermissionError as error:
            sock.close()
            raise AccessDeniedError(
                f"this user may not connect to {self._path}: run both sides as the same user, in a folder "
                "that it may enter"
            ) from error
        except OSError as error:
            sock.close()
            if error.errno in (errno.ENOMEM, errno.ENOBUFS):
                raise  # a later attempt may succeed
            raise UsageError(f"nothing can be sent to {self._path}: {error.strerror}") from error
        except BaseException:
            sock.close()
            raise
        self._sock = RecordSocket(sock, on_record=self._record_arrived, on_closed=self._lost)
        self._connected_at = self._loop.time()
        try:
            self._sock.write(events.introduction())
        except OSError:
            self.drop(retry=False)  # the receiver accepts no other record first
            raise
        self.is_kept_waiting = self._is_starved = False
        self._waiters.wake()

    def _look(self) -> None:
        self._retry = None
        try:
            self._connect()
        except AioTensorError as error:
            if self._events is not None:
                self._events.link_lost(error)
            self._waiters.wake()
        except OSError as error:
            # There may be descriptors or memory again later; the tasks that wait for a receiver keep waiting.
            if not self._is_starved:
                logger.error(
                    "a receiver cannot be looked for: %s",
                    error,
                    extra={"event": "looking_failed", "address": self._path, "reason": str(error)},
                )
            self._is_starved = True
            self._look_later()

    def _look_later(self) -> None:
        if self._events is not None and self._retry is None:
            if self.is_kept_waiting:
                self._retry = self._loop.call_later(_FULL_RETRY_S, self._look)
                return
            self._retry = self._loop.call_later(self._delay, self._look)
            self._delay = min(2 * self._delay, _LAST_RETRY_S)

    def _record_arrived(self, data: memoryview, descriptors: list[int]) -> None:
        if descriptors:
            close_all(descriptors)  # a receiver sends none
        if self._events is not None:
            self._events.record_arrived(data)

    def _lost(self, reason: str) -> None:
        self.drop(retry=True)
        if self._events is not None:
            self._events.link_lost(PeerLostError(reason))


class _UnixReceiverLink:
    """A receiver's end of one connection."""

    def __init__(
        self,
        listener: "UnixListener",
        sock: socket.socket,
        peer_pid: int,
        events: ReceiverEvents,
        max_record_bytes: int,
    ) -> None:
        self.peer_pid = peer_pid
        self._listener = listener
        self._sock = RecordSocket(
            sock,
            on_record=partial(events.record_arrived, self),
            on_closed=self._lost,
            max_bytes=max_record_bytes,
            max_unsent_bytes=MAX_UNREAD_BYTES,
        )

    def write(self, data: bytes) -> None:
        """Send a record to the sender; close the connection if that fails."""
        try:
            self._sock.write(data)
        except OSError as error:
            self._listener._cut_off.add(str(error))
            self._sock.close()
            self._lost(f"writing failed: {error}")

    async def flush(self) -> None:
        """Wait until all written records were passed to the kernel."""
        await self._sock.flush()

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
        self._listener._links.discard(self)

    def look(self) -> None:
        """Read a record now, if there is one."""
        self._sock.look()

    def _lost(self, reason: str) -> None:
        self._listener._lost(self, reason)


class UnixListener:
    """Listen at a path, and replace the socket file of a dead receiver.

    Args:
        path: the path to which senders connect.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._sock: socket.socket | None = None
        self._file: SocketFile | None = None
        self._links: set[_UnixReceiverLink] = set()
        self._events: ReceiverEvents | None = None
        self._pause: asyncio.TimerHandle | None = None
        # A peer can connect again at any rate.
        self._refused = RepeatedEvent(log_refused)
        self._cut_off = RepeatedEvent(log_cut_off)

    async def open(self, events: ReceiverEvents, max_record_bytes: int) -> None:
        """Listen at the path, and accept connections; waiting and errors are those of `SocketFile.take`."""
        self._loop = asyncio.get_running_loop()
        self._max_record_bytes = max_record_bytes
        sock = _new_socket()
        file = SocketFile(self._path, sock)
        try:
            await file.take()
        except BaseException:
            file.leave()
            raise
        self._file = file
        self._sock = sock
        self._events = events
        self._loop.add_reader(sock.fileno(), self._accept)

    def look(self) -> None:
        """Accept pending connections, and read a record from each connection."""
        self._accept()
        for link in list(self._links):
            link.look()

    def stop(self) -> None:
        """Close the listening socket, and remove its file."""
        self._events = None
        sock, self._sock = self._sock, None
        if sock is None or self._file is None:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(sock.fileno())
        self._file.leave()

    async def close(self) -> None:
        """Stop listening, and close every connection."""
        self.stop()
        for link in list(self._links):
            link.close()
        self._refused.close()
        self._cut_off.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_A_TURN):
            if self._sock is None or self._events is None:
                return
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if self._pause is None:
                    logger.error(
                        "a sender cannot be accepted: %s",
                        error,
                        extra={"event": "accepting_failed", "address": self._path, "reason": str(error)},
                    )
                    self._loop.remove_reader(self._sock.fileno())
                    self._pause = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            try:
                pid = check_user(sock)
            except AccessDeniedError as error:
                self._refused.add(self._path, str(error))
                sock.close()
                continue
            link = _UnixReceiverLink(self, sock, pid, self._events, self._max_record_bytes)
            self._links.add(link)
            self._events.link_opened(link)

    def _resume(self) -> None:
        self._pause = None
        if self._sock is not None:
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def _lost(self, link: _UnixReceiverLink, reason: str) -> None:
        self._links.discard(link)
        if self._events is not None:
            self._events.link_lost(link, reason)
