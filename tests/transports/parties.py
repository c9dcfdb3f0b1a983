"""The owners of a listener and of a connector, over any transport."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiotensor.errors import AioTensorError
from aiotensor.transports.base import Connector, Events, Transport
from aiotensor.transports.endpoints import Endpoint, route_to
from tests.transports.ends import End


class Accepting:
    """The owner of a listener."""

    def __init__(self) -> None:
        self.ends: list[End] = []
        self.accepted: asyncio.Queue[End] = asyncio.Queue()  # the same, to wait for the next one

    def connection_accepted(self, transport: Transport) -> None:
        end = End(transport)
        self.ends.append(end)
        self.accepted.put_nowait(end)

    def close(self) -> None:
        """Close the accepted connections."""
        for end in self.ends:
            end.transport.close()


class Connecting:
    """The owner of a connector: connects again after each loss, and writes a first record."""

    def __init__(self, make_connector: Callable[[Events], Connector]) -> None:
        self.connections: list[End] = []
        self.next_connection: asyncio.Queue[End] = asyncio.Queue()  # the same, to wait for the next one
        self.failures: asyncio.Queue[AioTensorError] = asyncio.Queue()
        self.error: OSError | None = None  # raised instead of writing the introduction
        self.attempts = 0
        self.connector = make_connector(Events(self.connected, self.connecting_failed))

    def is_connected(self) -> bool:
        """Return whether the last connection is open."""
        return bool(self.connections) and not self.connections[-1].transport.is_closed

    def connected(self, transport: Transport) -> None:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        end = End(transport, when_lost=self.connector.reconnect)
        transport.write(f"introduction {self.attempts}".encode())
        self.connections.append(end)
        self.next_connection.put_nowait(end)

    def connecting_failed(self, error: AioTensorError) -> None:
        self.failures.put_nowait(error)

    def close(self) -> None:
        """Close the connector and the connections."""
        self.connector.close()
        for end in self.connections:
            end.transport.close()


@asynccontextmanager
async def connected_over(endpoint: Endpoint) -> AsyncIterator[tuple[End, End]]:
    """Return a connected end and the accepted one, after the introduction."""
    route = route_to(endpoint)
    accepting = Accepting()
    listener = await route.listen(accepting.connection_accepted)
    try:
        connecting = Connecting(lambda events: route.connector(events))
        try:
            connecting.connector.connect()
            accepted = await accepting.accepted.get()
            assert await accepted.read() == b"introduction 1"
            yield connecting.connections[0], accepted
        finally:
            connecting.close()
    finally:
        listener.close()
        accepting.close()
