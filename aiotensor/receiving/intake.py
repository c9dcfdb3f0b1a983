"""The connections of a receiver or a publisher before their roles are known, and those of inspectors.

accepted --first frame--> sender or subscriber, or inspector
   |
   '-- replaced by a newer connection
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    MAX_HELLO_BYTES,
    OPENING,
    VERSION,
    Hello,
    Inspect,
    Subscribe,
    Welcome,
    decode,
    encode,
)
from aiotensor.protocol.inspector import InspectedConnection
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import Transport

__all__ = ["MAX_UNIDENTIFIED", "InspectorPeer", "Intake"]

Opened = TypeVar("Opened", bound=Hello | Subscribe)  # the first frame of a peer

# The maximum number of connections that are not admitted: unidentified ones and those of inspectors. A peer
# of this library sends its first frame right after connecting, so the oldest unidentified connection is the
# least likely to belong to one. Inspectors are disconnected first, because they can connect again. A time
# limit for the first frame would close the connections of suspended processes, and would not help against a
# flood, which takes all places within milliseconds.
MAX_UNIDENTIFIED = 64


class Host(Protocol[Opened]):
    """The owner of an intake: the senders of a receiver, or the subscribers of a publisher.

    Attributes:
        opening: the type of the first frame of a peer that the host may admit.
        wrong_role: the reason to refuse a subscriber at a receiver, or a sender at a publisher.
    """

    opening: type[Opened]
    wrong_role: str

    def connect(self, transport: Transport, opening: Opened, welcome: Welcome) -> None:
        """Admit or refuse a sender or subscriber, and send it the result."""

    def report(self, inspector: "InspectorPeer") -> None:
        """Send the statistics to an inspector."""

    def broken(self, pid: int | None, reason: str) -> None:
        """Log that a connection without a role, or an inspector, broke the protocol."""

    def replaced(self, pid: int | None, connections: int) -> None:
        """Log that an unidentified connection is closed, because the number of newer ones is at the limit."""

    def refused(self, opening: Hello | Subscribe, reason: str) -> None:
        """Log that a peer is refused."""

    def transports(self) -> Iterable[Transport]:
        """Return the connections of the senders or subscribers."""

    def listening_failed(self, error: OSError) -> None:
        """Handle a listener that can no longer read, so that no more records arrive."""

    async def close(self) -> None:
        """Close the connections of the senders or subscribers."""


class Unidentified:
    """A connection before its first frame."""

    def __init__(self, transport: Transport, intake: "Intake[Any]") -> None:
        self.transport = transport
        self._intake = intake

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Identify the connection by its first frame."""
        close_all(descriptors)
        self._intake.first_record_received(self, data)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Forget the connection."""
        self._intake.drop(self, reason if isinstance(reason, ProtocolError) else None)

    def resume_writing(self) -> None:
        """Do nothing: only one frame is ever written."""


class InspectorPeer:
    """One inspector of a receiver or a publisher; an inspector limits its own waiting time.

    Args:
        transport: the transport of the connection.
        connection: the connection object.
        ended: called when the connection must be closed, with this object and the error; the error is None
            unless the inspector violated the protocol.
    """

    def __init__(
        self,
        transport: Transport,
        connection: InspectedConnection,
        ended: Callable[["InspectorPeer", ProtocolError | None], None],
    ) -> None:
        self.transport = transport
        self.connection = connection
        self._ended = ended

    def flush(self) -> None:
        """Write the pending frames now; the connection ends if that fails."""
        try:
            for record in self.connection.data_to_send():
                self.transport.write(record)
        except OSError:
            self._ended(self, None)

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """End the connection: an inspector must not send a second record."""
        close_all(descriptors)
        try:
            self.connection.receive(data)
        except ProtocolError as error:
            self._ended(self, error)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Handle the end of the connection."""
        self._ended(self, reason if isinstance(reason, ProtocolError) else None)

    def resume_writing(self) -> None:
        """Do nothing: frames for inspectors are few and bounded."""


class Intake(Generic[Opened]):
    """The connections of one receiver or publisher; belongs to the running loop.

    Args:
        host_id: the id of the receiver or publisher.
        max_frame_bytes: the maximum size of a record that the receiver or publisher accepts, in bytes.
        host: the senders of the receiver, or the subscribers of the publisher.
    """

    def __init__(self, host_id: str, max_frame_bytes: int, host: Host[Opened]) -> None:
        self._host = host
        self._host_id = host_id
        self._max_frame_bytes = max_frame_bytes
        self._inspectors: dict[InspectorPeer, None] = {}  # the oldest first
        self._unidentified: dict[Unidentified, None] = {}  # the oldest first

    def read_now(self) -> None:
        """Read a record of each connection immediately, if one has arrived; inspectors are skipped."""
        for transport in [*(one.transport for one in self._unidentified), *self._host.transports()]:
            transport.read_now()

    async def close(self) -> None:
        """Close all connections; waits as `Host.close` does."""
        # These peers get no last frame: they might not read it, and would delay the other connections.
        for inspector in list(self._inspectors):
            self._inspector_ended(inspector)
        for connection in list(self._unidentified):
            self.drop(connection)
        await self._host.close()

    # Unidentified connections

    def connection_accepted(self, transport: Transport) -> None:
        """Add a connection, and close the oldest inspector or unidentified one if there are too many."""
        connection = Unidentified(transport, self)
        self._unidentified[connection] = None
        transport.start(connection)
        if len(self._unidentified) + len(self._inspectors) > MAX_UNIDENTIFIED:
            self._replace_oldest()

    def listening_failed(self, error: OSError) -> None:
        """Pass the error to the host, since no more records arrive."""
        self._host.listening_failed(error)

    def first_record_received(self, connection: Unidentified, data: memoryview) -> None:
        """Identify a connection by its first frame; drop it if the frame is invalid or of the wrong role."""
        try:
            if len(data) > MAX_HELLO_BYTES:
                raise ProtocolError(f"it sent a record of more than {MAX_HELLO_BYTES} bytes")
            [opening] = decode(OPENING, data)
        except ProtocolError as error:
            self.drop(connection, error)
            return
        is_admitted = isinstance(opening, self._host.opening)
        welcome = Welcome(VERSION, os.getpid(), self._max_frame_bytes, self._host_id, is_admitted)
        if isinstance(opening, self._host.opening):
            del self._unidentified[connection]
            self._host.connect(connection.transport, opening, welcome)
        elif isinstance(opening, Inspect):
            del self._unidentified[connection]
            self._connect_inspector(connection.transport, opening, welcome)
        else:
            reason = self._host.wrong_role
            self._host.refused(opening, reason)
            with suppress(OSError):
                connection.transport.write(encode(welcome, Close(reason, is_refusal=True)))
            self.drop(connection)

    def drop(self, connection: Unidentified, error: ProtocolError | None = None) -> None:
        """Close a connection that was not admitted; log the error if it broke the protocol."""
        if error is not None:
            self._host.broken(None, str(error))
        self._unidentified.pop(connection, None)
        connection.transport.close()

    def _replace_oldest(self) -> None:
        reason = (
            f"a newer connection replaced it: at most {MAX_UNIDENTIFIED} connections may be unidentified or "
            "belong to inspectors"
        )
        inspector = next(iter(self._inspectors), None)
        if inspector is not None:
            inspector.connection.close(Close(reason, retry=True))
            inspector.flush()
            self._inspector_ended(inspector)
            return
        oldest = next(iter(self._unidentified))
        self._host.replaced(oldest.transport.peer_pid, MAX_UNIDENTIFIED)
        with suppress(OSError):
            oldest.transport.write(encode(Close(reason, retry=True)))
        self.drop(oldest)

    # Inspectors

    def _connect_inspector(self, transport: Transport, inspect: Inspect, welcome: Welcome) -> None:
        """Accept an inspector, and send it the statistics; refuse it if its version differs."""
        connection = InspectedConnection(inspect, welcome)
        inspector = InspectorPeer(transport, connection, self._inspector_ended)
        self._inspectors[inspector] = None
        transport.start(inspector)
        if connection.mismatch is not None:
            connection.close(Close(connection.mismatch, is_refusal=True))
            inspector.flush()
            self._inspector_ended(inspector, ProtocolError(connection.mismatch))
            return
        self._host.report(inspector)

    def _inspector_ended(self, inspector: InspectorPeer, error: ProtocolError | None = None) -> None:
        """Close the connection of an inspector, and forget it."""
        if error is not None:
            self._host.broken(inspector.connection.peer_pid, str(error))
        self._inspectors.pop(inspector, None)
        inspector.transport.close()
