"""The connections of a receiver before their roles are known, and its inspectors.

accepted --first frame--> sender or inspector
   |
   '-- replaced by a newer connection
"""

import os
from contextlib import suppress

from aiotensor.errors import ProtocolError
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    MAX_HELLO_BYTES,
    OPENING,
    VERSION,
    Hello,
    Inspect,
    Welcome,
    decode,
    encode,
)
from aiotensor.protocol.inspector import InspectedConnection
from aiotensor.receiving.inspectors import InspectorPeer
from aiotensor.receiving.senders import Senders
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.logs import logger_of
from aiotensor.transports.base import Transport

__all__ = ["MAX_UNIDENTIFIED", "Intake"]

logger = logger_of("receiver")

# Connections that are not admitted as senders: unidentified ones, and inspectors. A sender of this library
# sends its hello right after it has connected, so the oldest unidentified connection is the least likely to
# be one. Inspectors are closed first: they can ask again.
MAX_UNIDENTIFIED = 64


class Unidentified:
    """A connection before its first frame."""

    def __init__(self, transport: Transport, intake: "Intake") -> None:
        self.transport = transport
        self._intake = intake

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Identify the connection by its first frame."""
        close_all(descriptors)
        self._intake.first_record_received(self, data)

    def connection_lost(self, reason: str) -> None:
        """Forget the connection."""
        self._intake.drop(self)

    def resume_writing(self) -> None:
        """Do nothing: only one frame is ever written."""


class Intake:
    """The connections of one receiver; belongs to the running loop.

    Args:
        receiver: the id of the receiver.
        max_frame_bytes: the longest record that it accepts.
        senders: the senders of the receiver.
    """

    def __init__(self, receiver: str, max_frame_bytes: int, senders: Senders) -> None:
        self.senders = senders
        self._receiver = receiver
        self._max_frame_bytes = max_frame_bytes
        self._inspectors: dict[InspectorPeer, None] = {}  # the oldest first
        self._unidentified: dict[Unidentified, None] = {}  # the oldest first

    def read_now(self) -> None:
        """Read a record of each connection immediately, if there is one."""
        peers = self.senders.connected.values()
        for transport in [one.transport for one in self._unidentified] + [peer.transport for peer in peers]:
            transport.read_now()

    async def close(self) -> None:
        """Close all connections, as `Senders.close` does."""
        # These see only the end of their connections: they might not read, and would delay the others.
        for inspector in list(self._inspectors):
            self._inspector_ended(inspector)
        for connection in list(self._unidentified):
            self.drop(connection)
        await self.senders.close()

    # Unidentified connections

    def connection_accepted(self, transport: Transport) -> None:
        """Add a connection, and close another one if too many are not admitted as senders."""
        connection = Unidentified(transport, self)
        self._unidentified[connection] = None
        transport.start(connection)
        if len(self._unidentified) + len(self._inspectors) > MAX_UNIDENTIFIED:
            self._replace_oldest()

    def listening_failed(self, error: OSError) -> None:
        """Fail all waits, since no more records arrive."""
        self.senders.arrivals.fail(error)

    def first_record_received(self, connection: Unidentified, data: memoryview) -> None:
        """Identify a connection."""
        try:
            if len(data) > MAX_HELLO_BYTES:
                raise ProtocolError(f"it sent a record of more than {MAX_HELLO_BYTES} bytes")
            [opening] = decode(OPENING, data)
        except ProtocolError as error:
            self.senders.refusals.broken.add(None, None, str(error))
            self.drop(connection)
            return
        del self._unidentified[connection]
        welcome = Welcome(
            VERSION, os.getpid(), self._max_frame_bytes, self._receiver, isinstance(opening, Hello)
        )
        if isinstance(opening, Hello):
            self.senders.connect(connection.transport, opening, welcome)
        else:
            self._connect_inspector(connection.transport, opening, welcome)

    def drop(self, connection: Unidentified) -> None:
        """Close a connection whose role is unknown."""
        self._unidentified.pop(connection, None)
        connection.transport.close()

    def _replace_oldest(self) -> None:
        reason = f"a newer connection replaced it: at most {MAX_UNIDENTIFIED} may be unidentified or inspect"
        inspector = next(iter(self._inspectors), None)
        if inspector is not None:
            inspector.connection.close(Close(reason, retry=True))
            inspector.flush()
            self._inspector_ended(inspector)
            return
        oldest = next(iter(self._unidentified))
        self.senders.counts["senders_refused"] += 1
        self.senders.refusals.replaced.add(oldest.transport.peer_pid, MAX_UNIDENTIFIED)
        with suppress(OSError):
            oldest.transport.write(encode(Close(reason, retry=True)))
        self.drop(oldest)

    # Inspectors

    def _connect_inspector(self, transport: Transport, inspect: Inspect, welcome: Welcome) -> None:
        """Send the statistics of the receiver to an inspector, and request those of the senders."""
        logger.debug(
            "process %s inspects this receiver",
            inspect.pid,
            extra={"event": "receiver_inspected", "peer_pid": inspect.pid},
        )
        connection = InspectedConnection(inspect, welcome)
        inspector = InspectorPeer(transport, connection, self._inspector_ended)
        self._inspectors[inspector] = None
        transport.start(inspector)
        if connection.mismatch is not None:
            connection.close(Close(connection.mismatch, is_refusal=True))
            inspector.flush()
            self._inspector_ended(inspector, ProtocolError(connection.mismatch))
            return
        senders = list(self.senders.connected.values())
        connection.report(self.senders.statistics(), [sender.summary() for sender in senders])
        inspector.flush()
        for sender in senders:
            if inspector in self._inspectors:  # not if writing to it failed
                sender.request_statistics(inspector)

    def _inspector_ended(self, inspector: InspectorPeer, error: ProtocolError | None = None) -> None:
        """Close the connection of an inspector, and forget it."""
        if error is not None:
            self.senders.refusals.broken.add(None, inspector.connection.peer_pid, str(error))
        self._inspectors.pop(inspector, None)
        for sender in self.senders.connected.values():
            sender.inspectors.discard(inspector)
        inspector.transport.close()
