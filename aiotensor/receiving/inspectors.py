"""The connection of an inspector to a receiver or a publisher.

A receiver sends its own statistics at once, and requests those of each sender. While a sender has not
replied, it gets no second request, and its reply is sent to all inspectors that wait for it. The requests to
a stopped sender therefore do not accumulate. No method waits: an inspector limits its own waiting time.
"""

from collections.abc import Callable

from aiotensor.errors import ProtocolError
from aiotensor.protocol.inspector import InspectedConnection
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import Transport

__all__ = ["InspectorPeer"]


class InspectorPeer:
    """One inspector of a receiver or a publisher.

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
