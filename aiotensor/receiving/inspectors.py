"""An inspector of a receiver.

An inspector has its own connection, and receives the knowledge of the receiver at once. Each sender is asked
for its statistics. It is not asked again before it has replied, and further inspectors wait for the same
reply: so the frames that a stopped sender has to read do not accumulate. Nothing here waits: inspectors have
their own limits on waiting times.
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
        transport: the connection.
        connection: its rules.
        ended: called at the end of the connection, with the violation that ends it, if any.
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
        """Write the pending frames now."""
        try:
            for record in self.connection.data_to_send():
                self.transport.write(record)
        except OSError:
            self._ended(self, None)

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Reject every further frame."""
        close_all(descriptors)
        try:
            self.connection.receive(data)
        except ProtocolError as error:
            self._ended(self, error)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Handle an inspector that is gone."""
        self._ended(self, reason if isinstance(reason, ProtocolError) else None)

    def resume_writing(self) -> None:
        """Do nothing: frames for inspectors are few and bounded."""
