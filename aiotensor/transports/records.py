"""Sockets that preserve record boundaries (`SOCK_SEQPACKET`), on the event loop.

One `send` is one record: it is written completely or not at all, even if its writer is killed, and it may
carry file descriptors, which the kernel holds until they are read. So several processes can write to one
such socket without a lock.
"""

import array
import asyncio
import errno
import fcntl
import os
import select
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence

from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.runtime.descriptors import close_after_fork, close_all
from aiotensor.runtime.waiting import Waiters

__all__ = [
    "RECORDS_A_TURN",
    "RecordReader",
    "RecordSocket",
    "pipe_of",
    "record_pair",
]

_MAX_DESCRIPTORS = 8
# Plain numbers, because enums are slow and these are used for every record. MSG_DONTWAIT is set in each call,
# since another process with the same socket can switch it to blocking mode.
_WRITE_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_READ_FLAGS = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_INT = struct.Struct("i")
_UNHEARD = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)
_QUEUED_RECORD_BYTES = 128  # the overhead of a queued record
RECORDS_A_TURN = 4  # each of many frames; then the other callbacks of the loop run


def record_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected non-blocking sockets that children do not inherit by default."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


def pipe_of(descriptor: int) -> socket.socket | None:
    """Return the end of a pair that a peer has sent; if it is something else, close it and return None."""
    try:
        sock = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
    else:
        if (sock.family, sock.type) == (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            sock.setblocking(False)
            return sock
        sock.close()
    return None


class RecordReader:
    """Read records and their descriptors from a non-blocking socket.

    Args:
        sock: the socket.
        max_bytes: the longest valid record; a longer one is truncated to `max_bytes + 1` bytes.
    """

    def __init__(self, sock: socket.socket, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(max_bytes + 1))
        self.was_reset = False  # the other side closed before it had read everything
        self._ancillary_bytes = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)

    def read(self) -> tuple[memoryview, list[int]] | None:
        """Return the next record and its descriptors, or None if there is none yet.

        The record is valid until the next call. It may be empty, truncated because it is too long, or lack
        descriptors because this process may open no more (EMFILE). The decoder of the frames detects that,
        and knows the sender, so that other senders on this socket are not affected.

        Raises:
            EOFError: no process can write to the socket any more.
        """
        while True:
            try:
                size, ancillary, _, _ = self._sock.recvmsg_into(
                    [self._buffer], self._ancillary_bytes, _READ_FLAGS
                )
                break
            except BlockingIOError:
                return None
            except ConnectionResetError:
                # The other side closed before it had read everything. The kernel reports that once, before
                # the last records of the other side, which can still be read.
                self.was_reset = True
                continue
        descriptors = _descriptors_of(ancillary) if ancillary else []
        if size == 0 and not descriptors and self._is_at_end():
            raise EOFError
        return self._buffer[:size], descriptors

    def _is_at_end(self) -> bool:
        """Return whether an empty read was the end of the stream and not an empty record."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        # In this order: after the other side has closed, no more records arrive.
        return bool(poll.poll(0)) and _bytes_to_read(self._sock) == 0


def _bytes_to_read(sock: socket.socket) -> int:
    count = fcntl.ioctl(sock, termios.FIONREAD, bytes(_INT.size))
    return int(_INT.unpack(count)[0])


def _descriptors_of(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return found.tolist()


class _Queued:
    """The descriptors of queued records, which a forked child must close."""

    def __init__(self, outbox: deque[tuple[bytes, Sequence[int]]]) -> None:
        self._outbox = outbox
        close_after_fork(self)

    def close(self) -> None:
        """Close the child's copies."""
        ours = [descriptor for _, descriptors in self._outbox for descriptor in descriptors]
        self._outbox.clear()
        close_all(ours)


class RecordSocket:
    """Write records without blocking, and read them as they arrive.

    A record is sent at once if the socket accepts it. Otherwise it is queued until the socket is writable.

    Args:
        sock: a connected, non-blocking `SOCK_SEQPACKET` socket; belongs to this object.
        on_record: called with each record, valid during the call, and its descriptors; None to never read.
        on_closed: called once when the other side is gone, with a reason; not after `close`.
        max_bytes: the longest valid record that is read.
        max_unsent_bytes: the most bytes in the queue, for a writer that never waits; None for no limit.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_record: Callable[[memoryview, list[int]], None] | None,
        on_closed: Callable[[str], None],
        max_bytes: int = MAX_RECORD_BYTES,
        max_unsent_bytes: int | None = None,
    ) -> None:
        close_after_fork(sock)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._on_record = on_record
        self._on_closed: Callable[[str], None] | None = on_closed
        self._outbox: deque[tuple[bytes, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self._max_unsent_bytes = max_unsent_bytes
        self._flushers = Waiters()
        self._is_closed = False
        self._is_unheard = False  # the other side has closed, but records of it may still be unread
        self._queued = _Queued(self._outbox)
        if on_record is not None:
            self._reader = RecordReader(sock, max_bytes)
            self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def is_flushed(self) -> bool:
        """Whether all written records were passed to the kernel."""
        return not self._outbox

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send or queue a record, and own its descriptors. Does nothing after the end of the socket.

        Raises:
            OSError: the kernel rejected the record (no memory, too many descriptors in transit), or the queue
                is full; the record is not sent.
        """
        if self._is_closed or self._is_unheard:
            close_all(descriptors)
            return
        if not self._outbox:
            try:
                if self._send(data, descriptors):
                    return
            except _UNHEARD as error:
                close_all(descriptors)
                self._stop_writing(error)
                return
            except BaseException:
                close_all(descriptors)
                raise
            self._loop.add_writer(self._sock.fileno(), self._writable)
        unsent = self._unsent_bytes + len(data) + _QUEUED_RECORD_BYTES
        if self._max_unsent_bytes is not None and unsent > self._max_unsent_bytes:
            close_all(descriptors)
            raise OSError(errno.ENOBUFS, "the other side does not read what it is told")
        self._unsent_bytes = unsent
        self._outbox.append((data, descriptors))

    async def flush(self) -> None:
        """Wait until all written records were passed to the kernel, or the socket is closed.

        Cancelling does not discard any record.
        """
        while self._outbox and not self._is_closed:
            await self._flushers.wait()

    async def room(self) -> None:
        """Wait until the queue may be empty, the socket is closed, or `wake` is called."""
        if self._outbox and not self._is_closed:
            await self._flushers.wait()

    def wake(self) -> None:
        """Wake the tasks that wait in `room` and `flush`."""
        self._flushers.wake()

    def look(self) -> None:
        """Read a record now, if there is one; not while another is being read."""
        self._readable()

    def close(self) -> None:
        """Close at once, and discard the queued records."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_writer(self._sock.fileno())
        if self._on_record is not None:
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        # The callbacks refer to the owner of this socket: without that cycle it is freed at once.
        self._on_record = self._on_closed = None
        self._drop_outbox()

    def _send(self, data: bytes, descriptors: Sequence[int]) -> bool:
        """Pass one record to the kernel; return False if the socket is not writable."""
        try:
            if descriptors:
                socket.send_fds(self._sock, [data], list(descriptors), _WRITE_FLAGS)
                close_all(descriptors)
            else:
                self._sock.send(data, _WRITE_FLAGS)
        except (BlockingIOError, InterruptedError):
            return False
        return True

    def _writable(self) -> None:
        try:
            while self._outbox:
                if not self._send(*self._outbox[0]):
                    return
                data, _ = self._outbox.popleft()
                self._unsent_bytes -= len(data) + _QUEUED_RECORD_BYTES
            self._loop.remove_writer(self._sock.fileno())
        except _UNHEARD as error:
            self._stop_writing(error)
            return
        except OSError as error:
            self._end(f"writing failed: {error}")
            return
        self._flushers.wake()

    def _stop_writing(self, error: OSError) -> None:
        """Stop writing, because the other side has closed; its last records are still read, up to the end."""
        self._is_unheard = True
        self._loop.remove_writer(self._sock.fileno())
        self._drop_outbox()
        if self._on_record is None:
            # Not from here: `on_closed` must not be called inside `write`.
            self._loop.call_soon(self._end, "nobody reads it any more")
        elif isinstance(error, ConnectionResetError):
            self._reader.was_reset = True

    def _readable(self) -> None:
        # One record per callback: an extra read without a result costs more than another poll of the loop.
        if self._is_closed or self._on_record is None:
            return
        try:
            record = self._reader.read()
        except EOFError:
            self._end("the other side closed the connection")
        except OSError as error:
            self._end(f"reading failed: {error}")
        else:
            if record is not None:
                self._on_record(*record)
        if self._reader.was_reset and self._is_open():
            # uvloop stops watching a socket after an error. No more records arrive; read the rest from here.
            self._loop.remove_reader(self._sock.fileno())
            self._loop.call_soon(self._readable)

    def _is_open(self) -> bool:
        return not self._is_closed

    def _end(self, reason: str) -> None:
        if not self._is_closed:
            on_closed = self._on_closed
            self.close()
            if on_closed is not None:
                on_closed(reason)

    def _drop_outbox(self) -> None:
        ours = [descriptor for _, descriptors in self._outbox for descriptor in descriptors]
        self._outbox.clear()
        close_all(ours)
        self._flushers.wake()
