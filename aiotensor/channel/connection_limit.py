"""The limit on the connections that a server accepts, from clients and from unidentified peers."""

from collections.abc import Callable

from aiotensor.channel.refusal_log import ClientRefusalLog

__all__ = ["ConnectionLimit"]

# Connections beside those of clients: their peers have not sent a hello yet, or the server has refused them.
_UNIDENTIFIED = 64


class ConnectionLimit:
    """Keep the connections of a server within their limit; belongs to the running loop.

    Any process that reaches the address can open a connection and keep it open. Such a connection never
    keeps a client out: beyond the limit, the oldest connection that is not a client's is closed. A client
    sends its hello as soon as it can, so it is not among the oldest.

    Args:
        max_clients: the most clients at once; None for no limit.
        is_client: returns whether an identity is that of a client.
        close: closes a connection, and returns whether that was possible.
        refusals: logs the connections that are closed.
    """

    def __init__(
        self,
        max_clients: int | None,
        is_client: Callable[[bytes], bool],
        close: Callable[[int], bool],
        refusals: ClientRefusalLog,
    ) -> None:
        self._max_clients = max_clients
        self._is_client = is_client
        self._close = close
        # By their descriptors, the oldest connection first. A descriptor may have several: ZeroMQ may deliver
        # a message of an ended connection after one of the next connection.
        self._identities: dict[int, list[bytes]] = {}
        self._refusals = refusals

    def opened(self, descriptor: int) -> None:
        """Add a connection."""
        self._identities.pop(descriptor, None)
        self._identities[descriptor] = []

    def closed(self, descriptor: int) -> list[bytes]:
        """Forget a connection, and return its identities: none if no message has arrived on it."""
        return self._identities.pop(descriptor, [])

    def identify(self, descriptor: int, identity: bytes) -> list[bytes] | None:
        """Record the identity of a connection.

        Returns None if the connection has ended, otherwise the earlier identities that it replaces. It keeps
        the identities of clients, because any of them may still be connected.
        """
        before = self._identities.get(descriptor)
        if before is None:
            return None
        self._identities[descriptor] = [*filter(self._is_client, before), identity]
        return [one for one in before if not self._is_client(one)]

    def enforce(self) -> list[bytes]:
        """Close the oldest connections that are not a client's, if there are too many of them.

        Returns the identities of closed connections whose peers the server had refused.
        """
        closed: list[bytes] = []
        others = [
            (descriptor, identities)
            for descriptor, identities in self._identities.items()
            if not any(map(self._is_client, identities))
        ]
        clients = len(self._identities) - len(others)
        most = _UNIDENTIFIED if self._max_clients is None else _UNIDENTIFIED + self._max_clients - clients
        for descriptor, identities in others[: max(0, len(others) - most)]:
            if not self._close(descriptor):
                break  # this process has no descriptors left
            del self._identities[descriptor]
            closed += identities
            self._refusals.connection_refused("it sent no hello, and other connections need its place")
        return closed
