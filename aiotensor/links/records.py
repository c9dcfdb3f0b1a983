"""Sockets that keep records apart (`SOCK_SEQPACKET`), on the event loop.

One `send` is one record: it is written whole or not at all, also when its writer is killed, and it may
carry file descriptors, which the kernel keeps while they travel. So several processes can write to one
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

from aiotensor.descriptors import close_after_fork, close_all
from aiotensor.gates import Waiters
from aiotensor.protocol.frames import MAX_RECORD_BYTES

__all__ = [
    "RECORDS_A_TURN",
    "RecordReader",
    "RecordSocket",
    "pipe_of",
    "record_pair",
]

_MAX_DESCRIPTORS = 8
# Plain numbers: the kernel is asked for every record. Not to block is asked for each time too, since another
# process that has the same socket can make it one that blocks.
_WRITE_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_READ_FLAGS = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_INT = struct.Struct("i")
_UNHEARD = (BrokenPipeError, ConnectionResetError, ConnectionRefusedError)
_QUEUED_RECORD_BYTES = 128  # what one takes in the queue, beside its bytes
RECORDS_A_TURN = 4  # of many frames each; then other callbacks of the loop have their turn


def record_pair() -> tuple[socket.socket, socket.socket]:
    """Make two connected sockets that do not block and that no child inherits unasked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    return ours, theirs


def pipe_of(descriptor: int) -> socket.socket | None:
    """Return the end of a pair that a peer handed over; None, and closed, if it is something else."""
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
    """Read records and their descriptors from a socket that does not block.

    Args:
        sock: where to read.
        max_bytes: how long a record may be; of a longer one the first so many bytes come, and one more.
    """

    def __init__(self, sock: socket.socket, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(max_bytes + 1))
        self.was_reset = False  # the other side closed before it had read everything
        self._ancillary_bytes = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)

    def read(self) -> tuple[memoryview, list[int]] | None:
        """Return the next record and its descriptors, or None if there is none yet.

        A record may be empty: the reader of the frames refuses it, and whoever wrote it harms nobody else.
        The record is valid until the next call. One longer than any may be comes cut off, and descriptors
        for which this process has no room are missing (EMFILE): the reader of the frames finds out, and
        knows whose they are.

        Raises:
            EOFError: nobody can write to the socket any more.
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
                # The other side closed before it had read everything. The kernel says so once, ahead of
                # the other side's last words, which are still to be read.
                self.was_reset = True
                continue
        descriptors = _descriptors_of(ancillary) if ancillary else []
        if size == 0 and not descriptors and self._is_at_end():
            raise EOFError
        return self._buffer[:size], descriptors

    def _is_at_end(self) -> bool:
        """Tell the end from a record without bytes, which the kernel reads out in the same way."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        # In this order: once the other side has closed, nothing more comes to what is there.
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
    """The descriptors of records that wait to be sent: copies that a forked child would keep."""

    def __init__(self, outbox: deque[tuple[bytes, Sequence[int]]]) -> None:
        self._outbox = outbox
        close_after_fork(self)

    def close(self) -> None:
        """Close the child's copies."""
        ours = [descriptor for _, descriptors in self._outbox for descriptor in descriptors]
        self._outbox.clear()
        close_all(ours)


class RecordSocket:
    """Write records without ever blocking, and read them as they come.

    A record goes out at once if the socket takes it; else it queues, and the loop sends it when there is
    room.

    Args:
        sock: a connected `SOCK_SEQPACKET` socket that does not block; belongs to this object.
        on_record: called with each record, valid during the call, and its descriptors; None to never read.
        on_closed: called once when the other side is gone, with a reason; not after `close`.
        max_bytes: how long a record may be that is read.
        max_unsent_bytes: how much may queue, for a writer that waits for nobody; None for no limit.
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
        self._is_unheard = False  # nobody reads what is written, but there may be something to read
        self._queued = _Queued(self._outbox)
        if on_record is not None:
            self._reader = RecordReader(sock, max_bytes)
            self._loop.add_reader(sock.fileno(), self._readable)

    @property
    def is_flushed(self) -> bool:
        """Say whether the kernel has everything that was written."""
        return not self._outbox

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a record; takes the descriptors over. After the end of the socket it does nothing.

        Raises:
            OSError: the kernel refused the record (no memory, too many descriptors on their way), or more
                would queue than may; it is not sent.
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
        """Wait until the kernel has everything that was written, or the socket is at its end.

        Cancelling changes nothing: what was written is still sent.
        """
        while self._outbox and not self._is_closed:
            await self._flushers.wait()

    async def room(self) -> None:
        """Wait until the kernel may have everything that was written, or `wake` is called."""
        if self._outbox and not self._is_closed:
            await self._flushers.wait()

    def wake(self) -> None:
        """Wake those who wait in `room`."""
        self._flushers.wake()

    def look(self) -> None:
        """Read a record now, if there is one; not while another is being read."""
        self._readable()

    def close(self) -> None:
        """Close at once; what waits to be sent is dropped."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_writer(self._sock.fileno())
        if self._on_record is not None:
            self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        # Their owner owns this socket: without the cycle it is freed at once.
        self._on_record = self._on_closed = None
        self._drop_outbox()

    def _send(self, data: bytes, descriptors: Sequence[int]) -> bool:
        """Hand one record to the kernel; False if it has no room now."""
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
        """Note that the other side closed. Its last words may still be here: their end is read after them."""
        self._is_unheard = True
        self._loop.remove_writer(self._sock.fileno())
        self._drop_outbox()
        if self._on_record is None:
            # Not from here: the writer is in the middle of something.
            self._loop.call_soon(self._end, "nobody reads it any more")
        elif isinstance(error, ConnectionResetError):
            self._reader.was_reset = True

    def _readable(self) -> None:
        # One record a turn: asking for a second one that is not there costs more than the loop's next look.
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
            # uvloop watches a socket no more once it had an error. All that will ever come is here.
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
