"""Inspectors of a receiver, and the statistics of senders that they wait for.

An inspector has its own connection, and receives the knowledge of the receiver at once. Each sender is asked
for its statistics. It is not asked again before it has replied, and further inspectors wait for the same
reply: so the frames that a stopped sender has to read do not accumulate. Nothing here waits: inspectors have
their own limits on waiting times.
"""

from collections.abc import Iterable
from typing import Protocol

from msgspec.structs import replace

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import StatisticsReply
from aiotensor.protocol.inspector import InspectedConnection
from aiotensor.receiving.sender_peer import SenderPeer
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import Transport

__all__ = ["InspectorEvents", "InspectorPeer", "Inspectors"]


class InspectorEvents(Protocol):
    """The callbacks of an inspector's connection."""

    def inspector_broke_protocol(self, peer: "InspectorPeer", error: ProtocolError) -> None:
        """Handle an inspector that sent another frame."""

    def inspector_lost(self, peer: "InspectorPeer") -> None:
        """Handle an inspector that is gone, or cannot be written to."""


class InspectorPeer:
    """One inspector of a receiver.

    Args:
        transport: the connection.
        connection: the rules of the protocol on it.
        events: the object that is notified.
    """

    def __init__(
        self, transport: Transport, connection: InspectedConnection, events: InspectorEvents
    ) -> None:
        self.transport = transport
        self.connection = connection
        self._events = events

    def flush(self) -> None:
        """Write the pending frames now."""
        try:
            for record in self.connection.data_to_send():
                self.transport.write(record)
        except OSError:
            self._events.inspector_lost(self)

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Reject every further frame."""
        close_all(descriptors)
        try:
            self.connection.receive(data)
        except ProtocolError as error:
            self._events.inspector_broke_protocol(self, error)

    def connection_lost(self, reason: str) -> None:
        """Handle an inspector that is gone."""
        self._events.inspector_lost(self)

    def resume_writing(self) -> None:
        """Do nothing: frames for inspectors are few and bounded."""


class Inspectors:
    """The inspectors of a receiver, and the senders that have to reply to them."""

    def __init__(self) -> None:
        self._inspectors: dict[InspectorPeer, None] = {}  # the oldest first
        self._waiting: dict[SenderPeer, set[InspectorPeer]] = {}  # for the reply of each sender

    def __len__(self) -> int:
        return len(self._inspectors)

    def __contains__(self, inspector: InspectorPeer) -> bool:
        return inspector in self._inspectors

    @property
    def oldest(self) -> InspectorPeer | None:
        """The inspector that connected first; None if there is none."""
        return next(iter(self._inspectors), None)

    def add(self, inspector: InspectorPeer) -> None:
        """Add an inspector."""
        self._inspectors[inspector] = None

    def request(self, inspector: InspectorPeer, senders: Iterable[SenderPeer]) -> None:
        """Forward the statistics of each sender to an inspector, as soon as they arrive."""
        for sender in senders:
            self._waiting.setdefault(sender, set()).add(inspector)
            sender.request_statistics()  # if that fails, the sender is forgotten right here

    def forward(self, sender: SenderPeer, reply: StatisticsReply) -> None:
        """Forward the statistics of a sender to the inspectors that wait for them."""
        named = replace(reply, sender=sender.sender)
        for inspector in self._waiting.pop(sender, ()):
            inspector.connection.forward(named)
            inspector.flush()

    def forget_sender(self, sender: SenderPeer) -> None:
        """Forget a sender that is gone."""
        self._waiting.pop(sender, None)

    def forget(self, inspector: InspectorPeer) -> None:
        """Forget an inspector that is gone."""
        self._inspectors.pop(inspector, None)
        for waiting in self._waiting.values():
            waiting.discard(inspector)

    def close(self) -> None:
        """Close the connections of all inspectors, which see only their end."""
        for inspector in list(self._inspectors):
            inspector.transport.close()
            self.forget(inspector)
