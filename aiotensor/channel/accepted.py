"""The connections that a server has accepted, from clients and from unidentified peers."""

from collections.abc import Callable

from aiotensor.channel.refusals import Refusals

__all__ = ["Accepted"]

# Connections beside those of clients: their peers have not sent a hello yet, or the server has refused them.
_UNIDENTIFIED = 64


class Accepted:
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
        refusals: Refusals,
    ) -> None:
        self._max_clients = max_clients
        self._is_client = is_client
        self._close = close
        self._identities: dict[int, bytes | None] = {}  # by their descriptors; the oldest connection first
        self._refusals = refusals

    def opened(self, descriptor: int) -> None:
        """Add a connection."""
        self._identities.pop(descriptor, None)
        self._identities[descriptor] = None

    def closed(self, descriptor: int) -> bytes | None:
        """Forget a connection, and return its identity if a message has arrived on it."""
        return self._identities.pop(descriptor, None)

    def identify(self, descriptor: int, identity: bytes) -> bool:
        """Record the identity of a connection, and return whether the connection is still open."""
        if descriptor not in self._identities:
            return False
        self._identities[descriptor] = identity
        return True

    def make_room(self) -> list[bytes]:
        """Close the oldest connections that are no clients' if there are too many of them.

        Returns the identities of closed connections whose peers the server had refused.
        """
        gone: list[bytes] = []
        others = [
            (descriptor, identity)
            for descriptor, identity in self._identities.items()
            if identity is None or not self._is_client(identity)
        ]
        clients = len(self._identities) - len(others)
        room = _UNIDENTIFIED if self._max_clients is None else _UNIDENTIFIED + self._max_clients - clients
        for descriptor, identity in others[: max(0, len(others) - room)]:
            if not self._close(descriptor):
                break  # this process has no descriptors left
            del self._identities[descriptor]
            if identity is not None:
                gone.append(identity)
            self._refusals.connection_refused("it said no hello, and others need its place")
        return gone
