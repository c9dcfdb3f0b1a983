"""Sockets that preserve record boundaries (`SOCK_SEQPACKET`), on the event loop.

One `send` is one record: it is written completely or not at all, even if its writer is killed, and it may
carry file descriptors, which the kernel holds until they are read.
"""

import array
import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final

from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.runtime.descriptors import Descriptor, close_after_fork
from aiotensor.transports.base import MAX_UNREAD_BYTES, Handler

_MAX_DESCRIPTORS = 8
# Plain numbers, because enums are slow and these are used for every record. MSG_DONTWAIT is set in each call,
# since another process with the same socket can switch it to blocking mode.
_WRITE_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_READ_FLAGS = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_INT_BYTES = array.array("i").itemsize
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INT_BYTES)
_NOT_WRITABLE = (BlockingIOError, InterruptedError)
_PEER_CLOSED = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)
_QUEUED_RECORD_BYTES = 128  # the overhead that is counted for a queued record


class SocketTransport:
    """One end of a connection over a socket: writes records without blocking, and reads arriving records.

    A record is sent at once if the socket accepts it. Otherwise it is queued until the socket is writable.

    Args:
        sock: a connected, non-blocking `SOCK_SEQPACKET` socket; belongs to this object.
        peer_pid: the process id of the peer, as for `Transport.peer_pid`.
    """

    mover: Final = None  # descriptors share memory

    def __init__(self, sock: socket.socket, peer_pid: int = 0) -> None:
        close_after_fork(sock)
        self.peer_pid = peer_pid
        self.is_writable = True
        self.is_closed = False
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._handler: Handler | None = None
        self._buffer = memoryview(bytearray(MAX_RECORD_BYTES + 1))  # a longer record is truncated to its size
        self._buffers = [self._buffer]
        self._was_reset = False  # the peer closed before it had read everything
        self._queue: deque[tuple[bytes, list[Descriptor]]] = deque()  # records, and their descriptors
        self._queued_bytes = 0
        self._max_queued_bytes = MAX_UNREAD_BYTES
        self._has_stopped_writing = False  # because the peer has closed; its records may still be unread

    def start(self, handler: Handler) -> None:
        """Begin to read, or pass further records to another handler, as `Transport.start` does."""
        if self.is_closed:
            return
        if self._handler is None:
            self._loop.add_reader(self._sock.fileno(), self.read_now)
        self._handler = handler

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue a record, as `Transport.write` does."""
        if self.is_closed or self._has_stopped_writing:
            return
        if self.is_writable:
            try:
                if descriptors:
                    socket.send_fds(self._sock, [data], list(descriptors), _WRITE_FLAGS)
                else:
                    self._sock.send(data, _WRITE_FLAGS)
                return
            except _NOT_WRITABLE:
                pass
            except _PEER_CLOSED as error:
                self._stop_writing(error)
                return
            self._loop.add_writer(self._sock.fileno(), self._writable)
            self.is_writable = False
        queued = self._queued_bytes + len(data) + _QUEUED_RECORD_BYTES
        if queued > self._max_queued_bytes:
            raise OSError(errno.ENOBUFS, "the peer does not read its records")
        self._queue.append((data, [Descriptor(os.dup(one)) for one in descriptors]))
        self._queued_bytes = queued

    def limit_queue(self, max_bytes: int) -> None:
        """Limit the bytes in the queue, as `Transport.limit_queue` does."""
        self._max_queued_bytes = max_bytes

    def finish(self) -> None:
        """Do nothing: the kernel delivers the records that it has, even after `close`."""

    def close(self) -> None:
        """Close at once, and discard the queued records."""
        if not self.is_closed:
            self._stop()
            self._sock.close()

    def _stop(self) -> None:
        self.is_closed = True
        self._loop.remove_writer(self._sock.fileno())
        if self._handler is not None:
            self._loop.remove_reader(self._sock.fileno())
        self._handler = None  # breaks a reference cycle, so that both objects are freed at once
        self._clear_queue()

    def _clear_queue(self) -> None:
        for _, copies in self._queue:
            for copy in copies:
                copy.close()
        self._queue.clear()

    def _writable(self) -> None:
        queue = self._queue
        try:
            while queue:
                data, copies = queue[0]
                socket.send_fds(self._sock, [data], [copy.number for copy in copies], _WRITE_FLAGS)
                queue.popleft()
                for copy in copies:
                    copy.close()
                self._queued_bytes -= len(data) + _QUEUED_RECORD_BYTES
        except _NOT_WRITABLE:
            return
        except _PEER_CLOSED as error:
            self._stop_writing(error)
        except OSError as error:
            self._fail(f"writing failed: {error}")
            return
        else:
            self._loop.remove_writer(self._sock.fileno())
        self.is_writable = True
        if self._handler is not None:
            self._handler.resume_writing()

    def _stop_writing(self, error: OSError) -> None:
        """Stop writing, because the peer has closed; its last records are still read."""
        self._has_stopped_writing = True
        self._loop.remove_writer(self._sock.fileno())
        self._clear_queue()
        if isinstance(error, ConnectionResetError):
            self._was_reset = True

    def read_now(self) -> None:
        """Read a record, if there is one, as `Transport.read_now` does; also called for a readable socket.

        The record is valid until the next call. It may be truncated because it is too long, or lack
        descriptors because this process may open no more (EMFILE). The decoder of the frames detects these
        cases. An empty record, which no honest peer sends, looks like the end of the connection.
        """
        # One record per callback: an extra read without a result costs more than another poll of the loop.
        if self._handler is None:
            return
        try:
            size, ancillary, _, _ = self._sock.recvmsg_into(self._buffers, _ANCILLARY_BYTES, _READ_FLAGS)
        except BlockingIOError:
            pass
        except ConnectionResetError:
            # The peer closed before it had read everything. The kernel reports that once, before the last
            # records of the peer, which can still be read.
            self._was_reset = True
        except OSError as error:
            self._fail(f"reading failed: {error}")
        else:
            descriptors = _descriptors_of(ancillary) if ancillary else []
            if size or descriptors:
                self._handler.record_received(self._buffer[:size], descriptors)
            else:
                self._end("the peer closed the connection")
        if self._was_reset and self._handler is not None:
            # uvloop stops watching a socket after an error. No more records arrive; read the rest from here.
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_soon(self.read_now)

    def _fail(self, reason: str) -> None:
        """Report an error of this end; unlike after `_end`, records of the peer may be unread."""
        try:
            if self._handler is not None:
                self._handler.connection_lost(reason)
        finally:
            self.close()

    def _end(self, reason: str) -> None:
        if not self.is_closed:
            handler = self._handler
            self._stop()
            try:
                if handler is not None:
                    handler.connection_lost(reason)
            finally:
                self._sock.close()


def _descriptors_of(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()
