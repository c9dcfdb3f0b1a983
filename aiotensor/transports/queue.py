"""The link over a multiprocessing queue: many senders put records on one queue, one receiver drains it.

Spawned children inherit the queue, as they do queues of multiprocessing, and any process that has it may put
records on it: it is for trusted parent and child processes only. It is a record socket rather than a pipe
with locks. With a pipe, a process killed while it holds the lock leaves it locked, half a record blocks the
reader forever, and a descriptor can only be requested from its sender, which fails after the sender exits.

Answers take a pipe (a pair of record sockets) per sender. The sender's first record carries the far end of
it, so the two sides need no address to connect, and each is notified at once when the other dies.
"""

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import BinaryIO

from aiotensor.errors import PeerLostError, UsageError
from aiotensor.runtime.descriptors import close_after_fork, close_all
from aiotensor.runtime.logs import RepeatedEvent
from aiotensor.transports.base import MAX_UNREAD_BYTES, ReceiverEvents, SenderEvents
from aiotensor.transports.records import (
    RECORDS_A_TURN,
    RecordReader,
    RecordSocket,
    pipe_of,
    record_pair,
)
from aiotensor.transports.refusals import log_broken, log_cut_off
from aiotensor.transports.tensor_queue import TensorQueue

__all__ = ["QueueListener", "QueueSenderLink"]

# A record: its kind, the id of its sender, then the frames.
_HELLO = b"H"
_FRAME = b"F"
_SENDER_CHARS = 32
_PREFIX_BYTES = len(_HELLO) + _SENDER_CHARS

# A dead sender is reported once the queue was empty, or after this many more records: the queue's buffer
# (208 KiB by default) holds fewer, so the sender's last records have been read by then.
_LAST_WORDS = 1024

_NO_PIPE = "it sent no pipe to answer it by"


class QueueSenderLink:
    """A sender's end: the queue for its records, and its own pipe for answers.

    Args:
        queue: the queue that the receiver drains.
        sender: the sender's id, 32 characters of ASCII.
    """

    def __init__(self, queue: TensorQueue, sender: str) -> None:
        self._tensor_queue = queue
        self._address = sender.encode("ascii")
        if len(self._address) != _SENDER_CHARS:
            raise ValueError(f"a sender's id has {_SENDER_CHARS} characters, got {sender!r}")
        self._queue: RecordSocket | None = None
        self._pipe: RecordSocket | None = None
        self._events: SenderEvents | None = None

    peer_pid = None  # for a socket pair, the kernel knows only the process that created it
    comes_back = False  # the next receiver of the queue does not have this sender's pipe
    is_kept_waiting = False  # a queue has no backlog

    async def open(self, events: SenderEvents) -> None:
        """Put the introduction on the queue, with the far end of the pipe."""
        self._events = events
        try:
            writer = self._tensor_queue._duplicate_writer()
            self._queue = RecordSocket(writer, on_record=None, on_closed=self._lost)
            near, far = record_pair()
            self._pipe = RecordSocket(near, on_record=self._record_arrived, on_closed=self._lost)
            self._queue.write(_HELLO + self._address + events.introduction(), [far.detach()])
            await self._queue.flush()
        except BaseException:
            self.close()
            raise

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Put a record on the queue."""
        if self._queue is None:
            raise UsageError("this link is not open")
        copies = [os.dup(descriptor) for descriptor in descriptors]
        self._queue.write(b"".join((_FRAME, self._address, data)), copies)

    @property
    def is_ready(self) -> bool:
        """Whether all written records are on the queue."""
        return self._queue is None or self._queue.is_flushed

    async def ready(self) -> None:
        """Wait until all written records may be on the queue."""
        if self._queue is not None:
            await self._queue.room()

    def wake(self) -> None:
        """Wake the tasks that wait for the queue."""
        if self._queue is not None:
            self._queue.wake()

    def drop(self, *, retry: bool) -> None:
        """Close the link permanently: a queue cannot reconnect."""
        self.close()

    def look_again(self) -> None:
        """Do nothing: a queue cannot reconnect."""

    async def flush(self) -> None:
        """Wait until all written records are on the queue."""
        if self._queue is not None:
            await self._queue.flush()

    def close(self) -> None:
        """Close this sender's ends of the queue and the pipe."""
        self._events = None
        for end in (self._queue, self._pipe):
            if end is not None:
                end.close()

    def _record_arrived(self, data: memoryview, descriptors: list[int]) -> None:
        close_all(descriptors)  # a receiver sends none
        if self._events is not None:
            self._events.record_arrived(data)

    def _lost(self, reason: str) -> None:
        events = self._events
        self.close()
        if events is not None:
            events.link_lost(PeerLostError(reason))


class _QueueReceiverLink:
    """A receiver's end of one sender's pipe.

    Args:
        listener: the listener that reads the queue.
        sender: the id of the sender.
        sock: the pipe; None if it did not arrive, in which case writing does nothing.
    """

    peer_pid = None  # for the same reason as in `QueueSenderLink`

    def __init__(self, listener: "QueueListener", sender: str, sock: socket.socket | None) -> None:
        self.sender = sender
        self._listener = listener
        self._pipe = (
            None
            if sock is None
            else RecordSocket(
                sock, on_record=self._unexpected, on_closed=self._closed, max_unsent_bytes=MAX_UNREAD_BYTES
            )
        )

    def write(self, data: bytes) -> None:
        """Send a frame to the sender; close the pipe if that fails."""
        if self._pipe is None:
            return
        try:
            self._pipe.write(data)
        except OSError as error:
            self._listener._cut_off.add(str(error))
            self._pipe.close()
            self._closed(f"writing failed: {error}")

    async def flush(self) -> None:
        """Wait until all written frames were passed to the pipe."""
        if self._pipe is not None:
            await self._pipe.flush()

    def close(self) -> None:
        """Close the pipe, and ignore further records of this sender."""
        if self._pipe is not None:
            self._pipe.close()
        self._listener._forget(self)

    def _closed(self, reason: str) -> None:
        self._listener._gone(self, reason)

    def _unexpected(self, data: memoryview, descriptors: list[int]) -> None:
        # Senders write to the queue, which keeps the order of their records; the pipe only shows their end.
        close_all(descriptors)


class QueueListener:
    """Drain a queue, and assign its records to their senders.

    Args:
        queue: the queue of the senders.
    """

    def __init__(self, queue: TensorQueue) -> None:
        self._tensor_queue = queue
        self._links: dict[str, _QueueReceiverLink] = {}
        self._gone_links: dict[_QueueReceiverLink, str] = {}
        self._records_since_gone = 0
        self._sock: socket.socket | None = None
        self._turn: BinaryIO | None = None
        self._reading: asyncio.Task[None] | None = None
        self._wake: asyncio.Future[None] | None = None
        self._events: ReceiverEvents | None = None
        # A process that has the queue can invent a sender with every record.
        self._broken = RepeatedEvent(log_broken)
        self._cut_off = RepeatedEvent(log_cut_off)

    async def open(self, events: ReceiverEvents, max_record_bytes: int) -> None:
        """Become the queue's only receiver, and begin to drain it."""
        sock = self._tensor_queue._duplicate_reader()
        try:
            self._turn = self._tensor_queue._lock()
        except BaseException:
            sock.close()
            raise
        close_after_fork(sock)
        close_after_fork(self._turn)
        self._events = events
        self._sock = sock
        loop = asyncio.get_running_loop()
        loop.add_reader(sock.fileno(), self._wake_up)
        reader = RecordReader(sock, max_record_bytes + _PREFIX_BYTES)
        self._reading = loop.create_task(self._drain(sock, reader), name="aiotensor-drain")

    def look(self) -> None:
        """Do nothing: senders cannot reconnect to a queue."""

    def stop(self) -> None:
        """Stop draining; the remaining records stay on the queue for the next receiver."""
        sock, self._sock = self._sock, None
        if sock is None or self._reading is None:
            return
        self._events = None
        asyncio.get_running_loop().remove_reader(sock.fileno())
        sock.close()
        self._reading.cancel()

    async def close(self) -> None:
        """Stop draining, and leave the queue to the next receiver."""
        self.stop()
        task, self._reading = self._reading, None
        for link in list(self._links.values()):
            link.close()
        self._broken.close()
        self._cut_off.close()
        if self._turn is not None:
            self._turn.close()
        if task is not None:
            await asyncio.wait([task])

    async def _drain(self, sock: socket.socket, reader: RecordReader) -> None:
        """Read the queue while the listener is open."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                is_empty = self._read_some(reader)
                if self._gone_links and (is_empty or self._records_since_gone >= _LAST_WORDS):
                    self._report_gone()
                if is_empty:
                    self._wake = loop.create_future()
                    await self._wake
                    self._wake = None
                else:
                    await asyncio.sleep(0)
        except EOFError:
            # All writers are closed, including this process's: the end of the stream would stay readable.
            loop.remove_reader(sock.fileno())
            self._report_gone()
        except asyncio.CancelledError:
            if self._sock is None:
                raise  # cancelled by `stop`
            # Other code cancels every task of the loop: waiting tasks must get an error rather than hang.
            loop.remove_reader(sock.fileno())
            if self._events is not None:
                self._events.listener_failed(
                    RuntimeError("the task that reads from the senders was cancelled")
                )
            raise
        except Exception as error:  # noqa: BLE001 - waiting tasks must get an error rather than hang
            loop.remove_reader(sock.fileno())
            if self._events is not None:
                self._events.listener_failed(error)

    def _read_some(self, reader: RecordReader) -> bool:
        """Read the records of one iteration of the loop, and return whether the queue was empty."""
        for _ in range(RECORDS_A_TURN):
            if self._sock is None:
                return True
            record = reader.read()
            if record is None:
                return True
            self._records_since_gone += bool(self._gone_links)
            self._dispatch(*record)
        return False

    def _dispatch(self, data: memoryview, descriptors: list[int]) -> None:
        kind, address = bytes(data[:1]), bytes(data[1:_PREFIX_BYTES])
        sender = address.decode("ascii", "replace")
        if kind == _HELLO and sender not in self._links:
            has_arrived = bool(descriptors)
            pipe = pipe_of(descriptors.pop(0)) if has_arrived else None
            if has_arrived and pipe is None:
                self._broken.add(sender, _NO_PIPE)
            else:
                opened = self._links[sender] = _QueueReceiverLink(self, sender, pipe)
                if self._events is not None:
                    self._events.link_opened(opened)
                if pipe is None:  # the kernel notifies the sender, and this fails the waits for its tensors
                    self._gone(opened, "its pipe did not arrive: no descriptors are left here (ulimit -n)")
        link = self._links.get(sender)
        if link is None or self._events is None:
            close_all(descriptors)  # of a sender whose link was closed
            return
        self._events.record_arrived(link, data[_PREFIX_BYTES:], descriptors)

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _gone(self, link: _QueueReceiverLink, reason: str) -> None:
        """Handle the end of a sender's pipe; its last records may still be on the queue."""
        self._gone_links[link] = reason
        self._records_since_gone = 0
        self._wake_up()

    def _report_gone(self) -> None:
        gone, self._gone_links = self._gone_links, {}
        for link, reason in gone.items():
            self._links.pop(link.sender, None)
            if self._events is not None:
                self._events.link_lost(link, reason)

    def _forget(self, link: _QueueReceiverLink) -> None:
        self._links.pop(link.sender, None)
        self._gone_links.pop(link, None)
