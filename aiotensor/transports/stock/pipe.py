"""The pipe of a stock queue, which carries chunks that are written and read in one piece.

A stock queue of multiprocessing is a pipe with two locks, which a killed process leaves locked, and a thread
in each process, which pickles and writes its objects. Only the pipe is used here. The kernel writes up to
`PIPE_BUF` bytes completely or not at all, so records travel in chunks of at most this size: no lock is
needed, and a process that is killed neither leaves half a chunk nor blocks another process.

A chunk has the length prefix of multiprocessing, followed by bytes with which no pickle begins. A process
that calls `get` on the queue takes one chunk and fails to unpickle it; the numbers of the chunks show that it
is missing. An object that the application puts on the queue is recognized, and never unpickled.
"""

import asyncio
import errno
import fcntl
import os
import select
import struct
import sys
import termios
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

from aiotensor.errors import ProtocolError, UsageError
from aiotensor.runtime.descriptors import Descriptor

__all__ = [
    "CONNECTION_BYTES",
    "MAX_DATA_BYTES",
    "NUMBERS",
    "Chunk",
    "ChunkReader",
    "ChunkWriter",
    "Kind",
    "StockQueue",
    "encode_chunk",
    "open_reader",
    "open_writer",
]

if TYPE_CHECKING:
    StockQueue: TypeAlias = Queue[Any]
else:
    StockQueue = Queue  # generic at runtime only since Python 3.12

CONNECTION_BYTES = 16
_MAGIC = b"\0aiotensor"  # the opcode 0 does not exist in pickles
_LENGTH = struct.Struct("!i")  # of the bytes that follow, as in `multiprocessing.connection.Connection`
_HEAD = struct.Struct(f"!i{len(_MAGIC)}sc{CONNECTION_BYTES}sI")  # the length and the fields of a chunk
MAX_DATA_BYTES = select.PIPE_BUF - _HEAD.size
NUMBERS = 1 << 32  # the numbers of the chunks of a connection, which then begin again at 0
_QUEUED_CHUNK_BYTES = 128  # the overhead that is counted for a queued chunk


class Kind:
    """The kinds of chunks."""

    CONNECT = b"C"  # asks the receiver to connect
    PART = b"P"  # of a record, which continues with the next chunk of the connection
    LAST = b"L"  # of a record
    CARRIER = b"D"  # the last chunk of a record with descriptors
    OBJECT = b"O"  # of the application; never written


class Chunk(NamedTuple):
    """One chunk, or one object of the application, which has no other fields than its kind.

    Attributes:
        kind: one of `Kind`.
        connection: the connection that it belongs to.
        number: its place among the chunks of the connection.
        data: the part of a record, valid until the next chunk is read.
    """

    kind: bytes
    connection: bytes = b""
    number: int = 0
    data: memoryview = memoryview(b"")


_OBJECT = Chunk(Kind.OBJECT)


def encode_chunk(kind: bytes, connection: bytes, number: int, data: bytes) -> bytes:
    """Return the bytes of a chunk, which must be written by one call."""
    head = _HEAD.pack(_HEAD.size - _LENGTH.size + len(data), _MAGIC, kind, connection, number)
    return head + data


class _Parts(Protocol):
    """The parts of a queue, for which multiprocessing has no public names."""

    _closed: bool
    _reader: "Connection[Any, Any]"
    _writer: "Connection[Any, Any]"
    _rlock: Any


def _opened_again(connection: "Connection[Any, Any]", flags: int) -> Descriptor:
    """Open an end of a pipe again, so that it is non-blocking here and still blocks elsewhere."""
    return Descriptor(os.open(f"/proc/self/fd/{connection.fileno()}", flags | os.O_NONBLOCK | os.O_CLOEXEC))


def _parts_of(queue: StockQueue) -> _Parts:
    parts = cast(_Parts, queue)
    if parts._closed or parts._reader.closed or parts._writer.closed:
        raise UsageError("this queue was closed: create a new one before starting the processes")
    return parts


def open_writer(queue: StockQueue) -> Descriptor:
    """Open the writing end of a queue's pipe.

    Raises:
        UsageError: the queue was closed.
        OSError: this process has no descriptors left.
    """
    return _opened_again(_parts_of(queue)._writer, os.O_WRONLY)


def open_reader(queue: StockQueue) -> Descriptor:
    """Open the reading end of a queue's pipe as its only receiver, until the descriptor is closed.

    Raises:
        UsageError: the queue has a receiver, a process waits in its method `get`, or it was closed.
        OSError: this process has no descriptors left.
    """
    parts = _parts_of(queue)
    reader = _opened_again(parts._reader, os.O_RDONLY)
    try:
        # The lock belongs to the file that was opened here, so it ends with this process at the latest.
        fcntl.flock(reader.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        reader.close()
        raise UsageError(
            "this queue already has a receiver: close that one, or create a queue for each receiver"
        ) from None
    if parts._rlock._semlock._is_zero():
        reader.close()
        raise UsageError(
            "a process waits in the method `get` of this queue, or was killed in it: let a TensorReceiver be "
            "the only reader of a queue"
        )
    return reader


def _unread_bytes(descriptor: int) -> int:
    """Return the bytes in a pipe, given one of its ends."""
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


class ChunkWriter:
    """Write the records of one connection without blocking; belongs to the running loop.

    Chunks that the pipe does not accept are queued until it does.

    Args:
        end: the writing end, which does not block; belongs to this object.
        connection: `CONNECTION_BYTES` bytes that identify the connection.

    Attributes:
        is_writable: whether all chunks are in the pipe.
        resumed: called when `is_writable` is true again.
        failed: called in the loop when nothing can be written any more, with the reason; `BrokenPipeError`
            if no process can read the pipe. Further records are dropped.
    """

    def __init__(self, end: Descriptor, connection: bytes) -> None:
        self.is_writable = True
        self.resumed: Callable[[], None] = _nothing
        self.failed: Callable[[OSError], None] = _nothing
        self._end = end
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._chunks: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._max_unsent_bytes: int | None = None
        self._is_stopped = False

    @property
    def unread_bytes(self) -> int:
        """The number of unread bytes in the pipe, from all processes that write to it."""
        return _unread_bytes(self._end.number)

    @property
    def has_reader(self) -> bool:
        """Whether any process can read the pipe."""
        poll = select.poll()
        poll.register(self._end.number, 0)
        return not poll.poll(0)  # without a reader, it reports POLLERR

    def limit_queue(self, max_bytes: int) -> None:
        """Limit the bytes in the queue of chunks."""
        self._max_unsent_bytes = max_bytes

    def connect(self) -> None:
        """Request the receiver to connect."""
        self._write(encode_chunk(Kind.CONNECT, self._connection, 0, b""))

    def check_limit(self, nbytes: int) -> None:
        """Check that a record with this number of bytes may be queued.

        Raises:
            OSError: the queue is full.
        """
        unsent = self._unsent_bytes + nbytes + _QUEUED_CHUNK_BYTES
        if self._max_unsent_bytes is not None and unsent > self._max_unsent_bytes:
            raise OSError(errno.ENOBUFS, "the peer does not read its records")

    def write(self, record: bytes, *, has_descriptors: bool = False) -> None:
        """Write or queue a record; unless `is_writable`, call `check_limit` first."""
        while len(record) > MAX_DATA_BYTES:
            self._write_next(Kind.PART, record[:MAX_DATA_BYTES])
            record = record[MAX_DATA_BYTES:]
        self._write_next(Kind.CARRIER if has_descriptors else Kind.LAST, record)

    def close(self) -> None:
        """Close the end, and drop the queued chunks; may be called again."""
        if self._end.number >= 0:
            self._stop()
            self._end.close()
            self.resumed = self.failed = _nothing

    def _write_next(self, kind: bytes, data: bytes) -> None:
        self._write(encode_chunk(kind, self._connection, self._number, data))
        self._number = (self._number + 1) % NUMBERS

    def _write(self, chunk: bytes) -> None:
        if self._is_stopped:
            return
        if self.is_writable:
            try:
                os.write(self._end.number, chunk)
            except BlockingIOError:
                self._loop.add_writer(self._end.number, self._writable)
                self.is_writable = False
            except OSError as error:
                self._fail(error)
                return
            else:
                return
        self._chunks.append(chunk)
        self._unsent_bytes += len(chunk) + _QUEUED_CHUNK_BYTES

    def _writable(self) -> None:
        try:
            while self._chunks:
                os.write(self._end.number, self._chunks[0])
                self._unsent_bytes -= len(self._chunks.popleft()) + _QUEUED_CHUNK_BYTES
        except BlockingIOError:
            return
        except OSError as error:
            self._fail(error)
        else:
            self._loop.remove_writer(self._end.number)
        self.is_writable = True
        self.resumed()

    def _fail(self, error: OSError) -> None:
        self._stop()
        self._loop.call_soon(self._failed, error)

    def _failed(self, error: OSError) -> None:
        if self._end.number >= 0:
            self.failed(error)

    def _stop(self) -> None:
        self._is_stopped = True
        self._chunks.clear()
        if not self.is_writable:
            self._loop.remove_writer(self._end.number)


def _nothing(*_: object) -> None:
    pass


class ChunkReader:
    """Read the chunks of all connections from a pipe.

    Args:
        end: the reading end, which does not block; belongs to this object.

    Attributes:
        descriptor: the number of the reading end.
        has_more: whether the next chunk was read from the pipe already.
        read_bytes: the bytes of all chunks that `read` has returned.
    """

    def __init__(self, end: Descriptor) -> None:
        self.descriptor = end.number
        self.has_more = False
        self.read_bytes = 0
        self._end = end
        # As large as the pipe, so that the kernel returns whole chunks: a receiver that is killed leaves no
        # part of a chunk for the next one.
        self._buffer = memoryview(bytearray(fcntl.fcntl(end.number, fcntl.F_GETPIPE_SZ)))
        self._rest = self._buffer[:0]

    @property
    def unread_bytes(self) -> int:
        """The number of bytes that were written to the pipe and that `read` has not returned."""
        return len(self._rest) + _unread_bytes(self.descriptor)

    def read(self) -> Chunk | None:
        """Return the next chunk; None if there is none yet.

        Raises:
            EOFError: no process can write to the pipe any more.
            ProtocolError: the next bytes in the pipe were not written in one piece, so the beginning of the
                next chunk is unknown.
            OSError: reading failed.
        """
        rest = self._rest
        if not self.has_more:
            try:
                count = os.readv(self.descriptor, [self._buffer])
            except BlockingIOError:
                return None
            if not count:
                raise EOFError
            rest = self._buffer[:count]
        end = _LENGTH.size + _LENGTH.unpack_from(rest)[0] if len(rest) >= _LENGTH.size else 0
        if not _LENGTH.size <= end <= min(len(rest), select.PIPE_BUF):
            raise ProtocolError(
                "the queue contains data that was not written in one piece: an object of more than "
                f"{select.PIPE_BUF} bytes, or the rest of an object that another process has begun to read"
            )
        self._rest = rest[end:]
        self.has_more = end < len(rest)
        self.read_bytes += end
        if end >= _HEAD.size:
            _, magic, kind, connection, number = _HEAD.unpack_from(rest)
            if magic == _MAGIC:
                return Chunk(kind, connection, number, rest[_HEAD.size : end])
        return _OBJECT

    def close(self) -> None:
        """Close the end; the chunks in the pipe stay there."""
        self.has_more = False
        self._end.close()
