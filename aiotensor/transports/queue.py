"""The transport over a `TensorQueue`: many senders put records on it, and one receiver reads them.

Spawned children inherit the queue, like a queue of multiprocessing. Any process that has it may put records
on it, so it is for trusted parent and child processes only. It is a record socket rather than a pipe with
locks. With a pipe, a process killed while it holds the lock leaves it locked, half a record blocks the reader
forever, and a descriptor can only be requested from its sender, which fails after the sender exits.

Records to a sender use a separate pair of record sockets, the pipe. The sender's first record carries the
far end of the pipe, so the two sides need no address to connect, and each is notified at once when the other
dies.
"""

import asyncio
import socket
from collections.abc import Callable, Collection, Sequence
from typing import BinaryIO

from aiotensor.errors import ProtocolError
from aiotensor.runtime.descriptors import close_after_fork, close_all, file_of
from aiotensor.runtime.logs import RepeatedEvent, logger_of, others
from aiotensor.runtime.process_end import ProcessEnd
from aiotensor.transports.base import MAX_UNREAD_BYTES, Acceptor, ConnectorEvents, Handler
from aiotensor.transports.records import RecordReader, SocketTransport, pipe_of, record_pair
from aiotensor.transports.tensor_queue import TensorQueue

__all__ = ["QueueConnector", "QueueListener", "listen_on"]

logger = logger_of("transports")

# A record consists of its kind, the id of its sender, and the frames.
_HELLO = b"H"
_FRAME = b"F"
_SENDER_CHARS = 32
_PREFIX_BYTES = len(_HELLO) + _SENDER_CHARS

# A dead sender is reported once the queue is empty, or after this many more records. The queue's buffer
# (208 KiB by default) holds fewer, so the sender's last records have been read by then.
_LAST_RECORDS = 1024
_LAST_RECORDS_A_TURN = 4  # then the other callbacks of the loop run


class QueueConnector:
    """Connect to the receiver of a queue, once: a later receiver would not get the pipe.

    Args:
        queue: the queue that the receiver reads.
        sender: the id of the sender, 32 characters of ASCII.
        events: the object that is notified.

    Raises:
        ValueError: the id has another length.
    """

    reconnects = False
    connects_at_once = True
    is_backlogged = False  # a queue has no backlog

    def __init__(self, queue: TensorQueue, sender: str, events: ConnectorEvents) -> None:
        self._tensor_queue = queue
        self._address = sender.encode("ascii")
        if len(self._address) != _SENDER_CHARS:
            raise ValueError(f"a sender's id must have {_SENDER_CHARS} characters, got {sender!r}")
        self._events = events

    def connect(self) -> None:
        """Connect to the queue; errors are those of `TensorQueue.open_writer`."""
        transport = _SenderEnd(self._tensor_queue.open_writer(), self._address)
        try:
            self._events.connected(transport)
        except BaseException:
            transport.close()
            raise

    def reconnect(self) -> None:
        """Do nothing: a queue cannot reconnect."""

    def connect_now(self) -> None:
        """Do nothing: a queue cannot reconnect."""

    def close(self) -> None:
        """Do nothing: no attempt is ever scheduled."""


class _SenderEnd:
    """A sender's end: the shared queue for its records, and its own pipe for those of the receiver."""

    mover = None
    peer_pid = None  # for a socket pair, the kernel only reports the process that created it

    def __init__(self, queue: socket.socket, address: bytes) -> None:
        self._queue = SocketTransport(queue, reads=False)
        self._prefix = _FRAME + address
        try:
            near, far = record_pair()
        except BaseException:
            self._queue.close()
            raise
        self._pipe = SocketTransport(near)
        self._far_end: socket.socket | None = far  # accompanies the first record
        self._handler: Handler | None = None
        close_after_fork(far)

    @property
    def is_writable(self) -> bool:
        return self._queue.is_writable

    @property
    def is_closed(self) -> bool:
        return self._pipe.is_closed

    def start(self, handler: Handler) -> None:
        self._handler = handler
        self._queue.start(self)
        self._pipe.start(self)

    def watch_peer(self, stated_pid: int, ended: Callable[[], object]) -> ProcessEnd:
        return ProcessEnd(stated_pid, ended)

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        if self._far_end is None:
            self._queue.write(self._prefix + data, descriptors)
            return
        self._queue.write(_HELLO + self._prefix[1:] + data, [self._far_end.fileno(), *descriptors])
        self._far_end.close()
        self._far_end = None

    def limit_queue(self, max_bytes: int) -> None:
        self._queue.limit_queue(max_bytes)

    def read_now(self) -> None:
        self._pipe.read_now()

    def peer_has_closed(self) -> bool:
        return self._pipe.peer_has_closed()

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._handler = None
        self._queue.close()
        self._pipe.close()
        if self._far_end is not None:
            self._far_end.close()

    # Events of the queue and the pipe. Only the pipe reports that the receiver has closed, after its last
    # records.

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        if self._handler is None:
            close_all(descriptors)
        else:
            self._handler.record_received(data, descriptors)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        handler = self._handler
        self.close()
        if handler is not None:
            handler.connection_lost(reason)

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()


class _ReceiverEnd:
    """A receiver's end: records of one sender, which the listener reads, and the pipe to that sender.

    If the pipe did not arrive, it is None, and writing has no effect.
    """

    mover = None
    peer_pid = None  # for the same reason as in `_SenderEnd`

    def __init__(self, sender: str, pipe: socket.socket | None, listener: "QueueListener") -> None:
        self.sender = sender
        self.is_closed = False
        self.handler: Handler | None = None
        self._listener = listener
        self._pipe = None if pipe is None else SocketTransport(pipe, max_unsent_bytes=MAX_UNREAD_BYTES)

    @property
    def is_writable(self) -> bool:
        return self._pipe is None or self._pipe.is_writable or self._pipe.is_closed

    def start(self, handler: Handler) -> None:
        self.handler = handler
        if self._pipe is not None:
            self._pipe.start(self)

    def watch_peer(self, stated_pid: int, ended: Callable[[], object]) -> ProcessEnd:
        return ProcessEnd(stated_pid, ended)

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        if self._pipe is not None:
            self._pipe.write(data, descriptors)

    def limit_queue(self, max_bytes: int) -> None:
        if self._pipe is not None:
            self._pipe.limit_queue(max_bytes)

    def read_now(self) -> None:
        pass  # the records of one sender cannot be read without those of others

    def peer_has_closed(self) -> bool:
        return self._pipe is not None and self._pipe.peer_has_closed()

    def finish(self) -> None:
        pass

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.handler = None
        if self._pipe is not None:
            self._pipe.close()
        self._listener.forget(self)

    # Events of the pipe

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        # Senders write to the queue, which keeps their records in order; the pipe only reports their end.
        close_all(descriptors)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        self._listener.sender_ended(self, reason)

    def resume_writing(self) -> None:
        if self.handler is not None:
            self.handler.resume_writing()


async def listen_on(queue: TensorQueue, acceptor: Acceptor, max_record_bytes: int) -> "QueueListener":
    """Become the only receiver of a queue, and begin to read it, as `Route.listen` does; does not wait.

    Raises:
        UsageError: the queue has a receiver, was closed, or was inherited by a fork.
        OSError: this process has no descriptors left.
    """
    sock = queue.open_reader()
    try:
        with queue.open_writer() as writer:
            own_ends = {file_of(sock.fileno()), file_of(writer.fileno())}
        lock = queue.lock_for_receiver()
    except BaseException:
        sock.close()
        raise
    return QueueListener(sock, lock, own_ends, acceptor, max_record_bytes)


class QueueListener:
    """Read a queue, and pass each record to the connection of its sender; created by `listen_on`.

    It owns the reading end, and the lock of the queue's only receiver. Closing the lock file unlocks it.
    """

    def __init__(
        self,
        sock: socket.socket,
        lock: BinaryIO,
        own_ends: Collection[object],
        acceptor: Acceptor,
        max_record_bytes: int,
    ) -> None:
        close_after_fork(sock)
        close_after_fork(lock)
        self._sock = sock
        self._lock = lock
        self._own_ends = own_ends  # the files of both ends of the queue
        self._acceptor = acceptor
        self._reader = RecordReader(sock, max_record_bytes + _PREFIX_BYTES)
        self._transports: dict[str, _ReceiverEnd] = {}
        self._ended: dict[
            _ReceiverEnd, str | ProtocolError
        ] = {}  # whose last records may still be on the queue
        self._last_records = 0  # how many more records are read before these are reported
        self._broken = RepeatedEvent(_log_broken)  # a process that has the queue can invent senders
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), self._read)
        self._is_reading = True

    def accept_now(self) -> None:
        """Do nothing: senders cannot reconnect to a queue."""

    def close(self) -> None:
        """Stop reading; the remaining records stay on the queue for the next receiver."""
        self._stop_reading()
        self._sock.close()
        self._lock.close()
        self._broken.close()

    def sender_ended(self, transport: _ReceiverEnd, reason: str | ProtocolError) -> None:
        """Report the end of a sender's pipe, once its last records have been read."""
        self._ended[transport] = reason
        self._last_records = _LAST_RECORDS
        self._loop.call_soon(self._read_last)

    def forget(self, transport: _ReceiverEnd) -> None:
        """Ignore further records of a sender whose connection was closed here."""
        self._transports.pop(transport.sender, None)
        self._ended.pop(transport, None)

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._sock.fileno())

    def _read(self) -> bool:
        """Read a record, and return whether there was one."""
        if not self._is_reading:
            return False
        try:
            record = self._reader.read()
        except EOFError:
            # All writers are closed, including this process's: the end of the stream would stay readable.
            self._stop_reading()
            return False
        except OSError as error:
            self._stop_reading()
            self._acceptor.listening_failed(error)
            return False
        if record is not None:
            self._dispatch(*record)
        return record is not None

    def _dispatch(self, data: memoryview, descriptors: list[int]) -> None:
        kind, sender = bytes(data[:1]), bytes(data[1:_PREFIX_BYTES]).decode("ascii", "replace")
        if kind == _HELLO and sender not in self._transports:
            self._accept(sender, descriptors)
        transport = self._transports.get(sender)
        if transport is None or transport.handler is None:
            close_all(descriptors)  # of a sender whose connection was closed
        else:
            transport.handler.record_received(data[_PREFIX_BYTES:], descriptors)

    def _accept(self, sender: str, descriptors: list[int]) -> None:
        has_arrived = bool(descriptors)
        pipe = pipe_of(descriptors.pop(0)) if has_arrived else None
        if pipe is not None and file_of(pipe.fileno()) in self._own_ends:
            pipe.close()  # an end of the queue would not show the end of the sender
            pipe = None
        if has_arrived and pipe is None:
            self._broken.add(sender, "its first record has no pipe")
            return
        transport = self._transports[sender] = _ReceiverEnd(sender, pipe, self)
        self._acceptor.connection_accepted(transport)
        if pipe is None:  # the kernel notifies the sender; here, waits for its tensors fail
            self.sender_ended(
                transport, "its pipe did not arrive: no descriptors are left in this process (ulimit -n)"
            )

    def _read_last(self) -> None:
        """Read until the queue is empty, or at most `_LAST_RECORDS`; then report the ended senders."""
        for _ in range(_LAST_RECORDS_A_TURN):
            if not (self._last_records and self._read()):
                break
            self._last_records -= 1
        else:
            self._loop.call_soon(self._read_last)
            return
        ended, self._ended = self._ended, {}
        for transport, reason in ended.items():
            handler = transport.handler
            transport.close()
            if handler is not None:
                handler.connection_lost(reason)


def _log_broken(count: int, sender: str, reason: str) -> None:
    logger.error(
        "sender %s broke the protocol, so its records are ignored: %s%s",
        sender,
        reason,
        others(count),
        extra={"event": "protocol_broken", "sender_id": sender, "reason": reason, "count": count},
    )
