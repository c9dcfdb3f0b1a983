"""The interface of transports: connections that carry records in both directions.

A transport preserves the order and the boundaries of records, and does not interpret them. On one machine,
it also carries file descriptors, which share memory. Between machines, it has a `Mover` instead, which moves
bytes into memory of the peer. Both ends of a connection have the same interface. A `Connector` creates one
end and a `Listener` the other; the first frame alone determines their roles. All of these objects are used
only on the thread of the event loop.
"""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from aiotensor.errors import AioTensorError, PeerLostError, ProtocolError
from aiotensor.protocol.network import Move
from aiotensor.runtime.logs import logger_of, others
from aiotensor.runtime.outage import Absence

logger = logger_of("transports")

# The maximum bytes of the records queued for a peer that does not read. A stopped sender can only be owed the
# answers to its messages in flight. With the default limit on these messages, and as many tensors in each as
# possible, all answers together are shorter than this.
MAX_UNREAD_BYTES = 8 << 20

# There is no notification when a process begins to listen at an address, so a connector polls, but only while
# it is not connected.
_FIRST_RETRY_S = 0.005
_LAST_RETRY_S = 0.25

# A full backlog has free entries only briefly, and other processes may compete for them. During a flood of
# connections, no sender connected within 3 s with delays that grow to `_LAST_RETRY_S`.
_FULL_RETRY_S = 0.01


class Handler(Protocol):
    """The callbacks of a transport; compare `asyncio.Protocol`."""

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Called when a record has arrived.

        Args:
            data: the record, which is valid only during the call.
            descriptors: the descriptors that were sent with the record; they belong to the handler.
        """

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Called when the connection has ended, after all records of the peer; never after `Transport.close`.

        Args:
            reason: why the connection has ended; an error if the peer broke the rules of the transport.
        """

    def resume_writing(self) -> None:
        """Called when `Transport.is_writable` has become true again."""


class Landing(Protocol):
    """Memory of this process for the blocks that the peer moves into one segment."""

    def store(
        self, block: int, nbytes: int, start: int, data: memoryview, resume: Callable[[str], None]
    ) -> bool:
        """Store bytes of a block, and return True; return False if the block has no memory yet.

        Args:
            block: the offset of the block in the segment.
            nbytes: the size of the block.
            start: the position of the first byte in the segment.
            data: the bytes.
            resume: called once, in the event loop, after this method has returned False: with "" when the
                bytes can be stored, or with the reason why there is no memory for them.

        Raises:
            ProtocolError: the block overlaps another one, or exceeds the memory that the peer may use.
        """

    def free(self, block: int) -> None:
        """Free a block, whose bytes are no longer used.

        Raises:
            ProtocolError: there is no such block.
        """


class Mover(Protocol):
    """Move bytes between the memory of the two ends."""

    def land(self, segment: int, landing: Landing | None) -> None:
        """Store the bytes that the peer moves to a segment in a landing; None to stop storing them."""

    def move(self, move: "Move[memoryview]") -> None:
        """Begin to move bytes; if the connection has ended, the move ends at once.

        Records that are written after the end of a move arrive after its bytes.
        """

    def cancel(self, move: "Move[memoryview]") -> None:
        """Send no more bytes of a move.

        The move ends once the bytes under way have arrived.
        """

    def free(self, segment: int, block: int) -> None:
        """Notify the peer that a block is no longer used; has no effect if no byte of it was moved."""


class Transport(Protocol):
    """One end of a connection."""

    @property
    def mover(self) -> Mover | None:
        """The object that moves bytes to the peer; None if descriptors share memory with it instead."""

    @property
    def is_writable(self) -> bool:
        """Whether no written record is queued, waiting for the kernel or for credit of the peer."""

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed, or the connection was lost."""

    @property
    def peer_pid(self) -> int | None:
        """The process id of the peer from the kernel; 0 if not in this PID namespace, None if unknown."""

    def start(self, handler: Handler) -> None:
        """Begin to read, or pass further records to another handler.

        Has no effect after the end of the connection.
        """

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a record without blocking, or queue it; has no effect after the end of the connection.

        The descriptors still belong to the caller. A transport with a mover does not send them.

        Raises:
            OSError: the kernel rejected the record (no memory, no descriptors), or the queue is full; the
                record was not sent.
        """

    def limit_queue(self, max_bytes: int) -> None:
        """Limit the bytes of queued records; the limit is `MAX_UNREAD_BYTES` by default."""

    def read_now(self) -> None:
        """Read a record immediately, if one has arrived; must not be called while another is being read."""

    def finish(self) -> None:
        """Write no more records; `is_writable` becomes true once closing can no longer lose any of them."""

    def close(self) -> None:
        """Close at once, and discard queued records; closing again has no effect.

        Between machines, this may also discard the last records that were not queued: ZeroMQ sends records in
        a thread, and may abort the process if a peer dies while a socket that was closed still sends some.
        """


class Events(NamedTuple):
    """The callbacks of a connector.

    Attributes:
        connected: called with the transport of a new connection, which this callback starts. Raises `OSError`
            if writing the first record failed; the connector then closes the transport.
        connecting_failed: called when connecting has failed permanently; `Connector.connect_now` tries again.
    """

    connected: Callable[[Transport], None]
    connecting_failed: Callable[[AioTensorError], None]


class Connector(ABC):
    """The connecting side: connects to the listener, and connects again after a failure or a loss.

    Args:
        label: the address in logs.
        events: the callbacks.
    """

    def __init__(self, label: str, events: Events) -> None:
        self.is_backlogged = False  # whether the last attempt failed because the listener's backlog was full
        self._label = label
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._transport: Transport | None = None
        self._connected_at = math.inf  # when the last connection began, until another attempt is scheduled
        self._attempt: asyncio.Handle | None = None
        self._delay = _FIRST_RETRY_S
        self._is_closed = False
        self.obstacle = ""  # why the last attempt failed, if that is more specific than `missing`
        self._absence = Absence(label, lambda: self.obstacle or self.missing())

    @abstractmethod
    def connect(self) -> None:
        """Connect for the first time with `begin`, or call `reconnect` to try again later.

        Raises:
            AccessDeniedError: the process that listens belongs to another user.
            UsageError: the address does not lead to a socket of this library.
            OSError: this process has no descriptors or no memory left.
        """

    @abstractmethod
    def missing(self) -> str:
        """Return why no peer is connected, for the log."""

    @property
    def is_trying(self) -> bool:
        """Whether an attempt is scheduled or under way."""
        return self._attempt is not None

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
        self.obstacle = ""

    def reconnect(self) -> None:
        """Begin to connect again, with a delay that increases if connections end quickly."""
        if self._is_closed or self.is_trying:
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
        """Connect now, if there is no connection and no attempt is scheduled or under way."""
        if not self.is_trying and (self._transport is None or self._transport.is_closed):
            self._connect_again()

    def close(self) -> None:
        """Stop all attempts; the connections stay open."""
        self._is_closed = True
        self._absence.end()
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None

    def fail(self, error: AioTensorError) -> None:
        """Report that connecting has failed permanently; the calls that wait for the peer get this error."""
        self._absence.end()
        self._events.connecting_failed(error)

    def _connect_again(self) -> None:
        self._attempt = None
        if not self._is_closed:
            self.try_to(self.connect)

    def try_to(self, connect: Callable[[], object]) -> None:
        """Call a function that connects, and handle its errors."""
        try:
            connect()
        except AioTensorError as error:
            self.fail(error)
        except OSError as error:  # it may pass
            self.obstacle = str(error)
            self.reconnect()
        except Exception as error:  # the event loop logs it; without `fail`, waiting calls would hang
            self.fail(PeerLostError(f"connecting to {self._label} failed: {error!r}"))
            raise


# Called with the transport of a new connection, which it starts or closes.
Acceptor: TypeAlias = Callable[[Transport], object]


class Listener(Protocol):
    """The accepting side: listens at the address to which connectors connect."""

    @property
    def address(self) -> str:
        """The address, with the actual port; "" unless it is a ``tcp://`` address."""

    def accept_now(self) -> None:
        """Accept the pending connections immediately."""

    def close(self) -> None:
        """Accept no more connections; existing ones stay open."""


def log_refused(count: int, address: str, reason: str) -> None:
    """Log connections that were refused, as a `RepeatedEvent` does."""
    logger.warning(
        "a connection to %s was refused: %s%s",
        address,
        reason,
        others(count),
        extra={"event": "connection_refused", "address": address, "reason": reason, "count": count},
    )
