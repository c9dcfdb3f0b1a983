"""The interface of transports: connections that carry records in both directions.

A transport preserves the order and the boundaries of records; it knows neither frames nor tensors. On one
machine it carries file descriptors, too, which share memory. Between machines it has a `Mover` instead, which
moves bytes into memory of the peer. Both ends of a connection have the same interface. `Connector` and
`Listener` make the connections; the roles of the two ends depend on the first frame alone. Everything here
belongs to the event loop's thread.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from aiotensor.errors import AioTensorError, ProtocolError
from aiotensor.protocol.moves import Move
from aiotensor.protocol.network import STEP_BYTES
from aiotensor.protocol.pages import Range
from aiotensor.runtime.process_end import ProcessEnd

__all__ = [
    "MAX_DATA_BYTES",
    "MAX_UNREAD_BYTES",
    "Acceptor",
    "Connector",
    "ConnectorEvents",
    "Handler",
    "Landing",
    "Listener",
    "Mover",
    "Transport",
    "engine_connections",
]

# The most bytes that the accepting side queues for a peer that does not read. A stopped sender has only its
# messages in flight to be answered. With the default limit on these messages, and the most tensors in each,
# the answers to all of them are shorter than this.
MAX_UNREAD_BYTES = 8 << 20

# The most bytes of a tensor that are sent with its record.
MAX_DATA_BYTES = STEP_BYTES


class Handler(Protocol):
    """The callbacks of a transport; compare `asyncio.Protocol`."""

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Handle a record, whose data is valid during the call; the handler owns the descriptors."""

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Handle the end of the connection, after all records of the peer; not after `Transport.close`.

        `Transport.watch_peer` can be called here for the last time.

        Args:
            reason: why it has ended; an error if the peer broke the rules of the transport.
        """

    def resume_writing(self) -> None:
        """Handle that `Transport.is_writable` is true again."""


class Landing(Protocol):
    """Memory of this process for the blocks that the peer moves into one segment."""

    def store(
        self, block: int, nbytes: int, start: int, data: memoryview, resume: Callable[[str], None]
    ) -> bool:
        """Store bytes of a block, and return True; or return False while the block has no memory.

        Args:
            block: the offset of the block in the segment.
            nbytes: the size of the block.
            start: the position of the first byte in the segment.
            data: the bytes.
            resume: called once, in the loop, after this has returned False: with "" if the bytes can be
                stored now, or else with the reason why there is no memory for them.

        Raises:
            ProtocolError: the block overlaps another one, or exceeds the memory that the peer may use.
        """

    def reserve(self, block: int, nbytes: int, reserved: Callable[[memoryview | None, str], None]) -> None:
        """Provide the memory of a block, to which the peer writes without this process.

        Args:
            block: the offset of the block in the segment.
            nbytes: the size of the block.
            reserved: called once, perhaps during this call, unless the connection ends before: with the
                memory, or with None and the reason why there is none; "" if the block was freed since.

        Raises:
            ProtocolError: as for `store`.
        """

    def watch(self, returned: Callable[[Sequence[Range]], None]) -> None:
        """Call a function before memory of the segment is returned to the system, with the ranges."""

    def free(self, block: int) -> None:
        """Free a block; its bytes are used no more.

        Raises:
            ProtocolError: there is no such block.
        """


class Mover(Protocol):
    """Move bytes between the memory of the two ends, in steps or with an engine."""

    @property
    def engine(self) -> str:
        """The name of the engine that moves large blocks; "" if there is none, or none yet."""

    def land(self, segment: int, landing: Landing | None) -> None:
        """Store the bytes that the peer moves to a segment in a landing; None for no longer."""

    def move(self, move: "Move[memoryview]") -> None:
        """Begin to move bytes; after the end of the connection, the move ends at once.

        Records that are written after the end of a move arrive after its bytes.
        """

    def write_with_data(self, record: bytes, data: memoryview) -> None:
        """Send a record with the bytes of a tensor, which may change afterwards; errors as for `write`.

        Args:
            record: the record.
            data: at least one byte, and at most `MAX_DATA_BYTES`.
        """

    def receive_data(self, received: Callable[[memoryview, memoryview], None]) -> None:
        """Pass records with the bytes of a tensor to a function, too; without it, they are a violation.

        Args:
            received: called with a record, which is valid during the call, and with the bytes, whose memory
                belongs to the caller.
        """

    def cancel(self, move: "Move[memoryview]") -> None:
        """Send no more bytes of a move. It ends once those under way have arrived, or are read no more."""

    def free(self, segment: int, block: int) -> None:
        """Notify the peer that a block is used no more; has no effect if no byte of it was moved."""


def engine_connections(movers: "Iterable[Mover | None]") -> int:
    """Count the connections that move large blocks with an engine."""
    return sum(mover is not None and bool(mover.engine) for mover in movers)


class Transport(Protocol):
    """One end of a connection."""

    @property
    def mover(self) -> Mover | None:
        """Moves bytes to the peer; None if descriptors reach it, which share memory."""

    @property
    def is_writable(self) -> bool:
        """Whether all written records were passed on, to the kernel or within the credit of the peer."""

    @property
    def is_closed(self) -> bool:
        """Whether this end was closed, or the connection was lost."""

    @property
    def peer_pid(self) -> int | None:
        """The process id of the peer according to the kernel; 0 if it has none here, None if unknown."""

    def watch_peer(self, stated_pid: int, ended: Callable[[], object]) -> ProcessEnd:
        """Call a function once the process of the peer has ended; not after `close`, but after a loss.

        Args:
            stated_pid: the process id as the peer states it, for transports whose kernel objects do not
                identify the peer.
            ended: called in the loop.
        """

    def start(self, handler: Handler) -> None:
        """Begin to read, or pass further records to another handler.

        Has no effect after the end of the connection.
        """

    def write(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a record without blocking, or queue it; has no effect after the end of the connection.

        The caller keeps the descriptors. A transport with a mover does not send them.

        Raises:
            OSError: the kernel rejected the record (no memory, no descriptors), or the queue is full; the
                record was not sent.
        """

    def limit_queue(self, max_bytes: int) -> None:
        """Set the most bytes in the queue of records; by default `MAX_UNREAD_BYTES` at the accepting side."""

    def read_now(self) -> None:
        """Read a record immediately, if there is one; not while another one is being read."""

    def peer_has_closed(self) -> bool:
        """Return whether the peer has closed its end; its last records may still be unread."""

    def finish(self) -> None:
        """Write no more records. `is_writable` is true again once closing loses none of them."""

    def close(self) -> None:
        """Close at once, and discard queued records; closing again has no effect."""


class ConnectorEvents(Protocol):
    """The callbacks of a connector."""

    def connected(self, transport: Transport) -> None:
        """Handle a new connection; this callback starts it.

        Raises:
            OSError: writing the first record failed; the connector closes the transport.
        """

    def connecting_failed(self, error: AioTensorError) -> None:
        """Handle a permanent failure to connect; `Connector.connect_again` tries again."""


class Connector(Protocol):
    """The connecting side: reaches the listener, and reaches it again after a loss."""

    @property
    def reconnects(self) -> bool:
        """Whether another connection is possible after a loss."""

    @property
    def connects_at_once(self) -> bool:
        """Whether `connect` has connected when it returns, if a process listens that has no full backlog."""

    @property
    def is_backlogged(self) -> bool:
        """Whether a process listens, but its backlog was full at the last attempt."""

    def connect(self) -> None:
        """Connect for the first time, or begin to wait until a process listens.

        Raises:
            AccessDeniedError: the process that listens belongs to another user.
            UsageError: the address does not lead to a socket of this library.
            OSError: this process has no descriptors or no memory left.
        """

    def reconnect(self) -> None:
        """Begin to connect again after a loss, with a delay that increases if connections end quickly."""

    def connect_now(self) -> None:
        """Connect now, if there is no connection and no attempt is scheduled."""

    def close(self) -> None:
        """Stop all attempts; the connections stay open."""


class Acceptor(Protocol):
    """The callbacks of a listener."""

    def connection_accepted(self, transport: Transport) -> None:
        """Handle a new connection; this callback starts it, or closes it."""

    def listening_failed(self, error: OSError) -> None:
        """Handle a failure of the kernel to read for the listener: no more records arrive."""


class Listener(Protocol):
    """The accepting side: the address that connectors reach."""

    def accept_now(self) -> None:
        """Accept the pending connections immediately."""

    def close(self) -> None:
        """Accept no more connections; existing ones stay open, but may not deliver further records."""
