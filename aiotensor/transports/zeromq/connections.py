"""The connections of a socket that listens, from the first message to the end, and the limit on their number.

Each connection has an identity. ZeroMQ refuses an identity that another open connection has.

    opened --first message--> without a role --the owner identifies it--> identified
      |                          |                                         |
      '--------------------------+--closed by the peer, or for the limit---'--> gone
"""

import abc
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from functools import partial

import zmq

from aiotensor.transports.zeromq.monitor import SocketEvents
from aiotensor.transports.zeromq.sockets import LoopSocket, PeerGoneError

__all__ = ["ConnectionLimit", "Connections"]

_REMEMBERED = 1024  # identities of closed connections

# The maximum number of connections of unidentified peers, which have sent no hello yet, or were refused.
_UNIDENTIFIED = 64


class ConnectionLimit:
    """Keep the connections of a socket within their limit; belongs to the running loop.

    Any process that reaches the address can open a connection and keep it open. Such a connection never
    keeps a peer out: beyond the limit, the oldest unidentified connection is closed. A peer of this library
    sends its hello as soon as it can, so it is not among the oldest.

    Args:
        most: the maximum number of identified peers; None for no limit.
        identified: the identities of the identified peers.
    """

    def __init__(self, most: int | None, identified: Container[bytes]) -> None:
        self._most = most
        self._identified = identified
        # The identities by descriptor, the oldest connection first. A descriptor may have several: ZeroMQ may
        # deliver a message of an ended connection after one of the next connection with this descriptor.
        self._identities: dict[int, list[bytes]] = {}

    def opened(self, descriptor: int) -> None:
        """Add a connection."""
        self._identities.pop(descriptor, None)
        self._identities[descriptor] = []

    def closed(self, descriptor: int) -> list[bytes]:
        """Forget a connection, and return its identities: none if no message has arrived on it."""
        return self._identities.pop(descriptor, [])

    def identify(self, descriptor: int, identity: bytes) -> list[bytes] | None:
        """Record the identity of a connection.

        Returns None if the connection has ended, and otherwise the earlier identities that this one replaces.
        The identities of identified peers are kept, because these peers may still be connected.
        """
        before = self._identities.get(descriptor)
        if before is None:
            return None
        self._identities[descriptor] = [*filter(self._identified.__contains__, before), identity]
        return [one for one in before if one not in self._identified]

    def excess(self) -> list[int]:
        """Return the descriptors of connections beyond the limit: the oldest unidentified ones."""
        others = [
            descriptor
            for descriptor, identities in self._identities.items()
            if not any(map(self._identified.__contains__, identities))
        ]
        identified = len(self._identities) - len(others)
        most = _UNIDENTIFIED if self._most is None else _UNIDENTIFIED + self._most - identified
        return others[: max(0, len(others) - most)]


class Connections(abc.ABC):
    """Track the connections of one socket by their identities; belongs to the running loop.

    There is a subclass for each kind of peer, which identifies the connections of these peers. This class
    implements `SocketEvents`.

    Args:
        listen: opens the socket, which calls the callbacks of the given object.
        identified: the identities of the identified peers, whose connections the limit does not close.
        most: the maximum number of identified peers; None for no limit.
    """

    def __init__(
        self, listen: Callable[[SocketEvents], LoopSocket], identified: Container[bytes], most: int | None
    ) -> None:
        self._identified = identified
        self._limit = ConnectionLimit(most, identified)
        self._is_limit_due = False
        self._ending: set[bytes] = set()  # of connections whose last messages may not have been read
        # The identities closed last: messages of them may still arrive.
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._socket = listen(self)

    @abc.abstractmethod
    def is_ignored(self, identity: bytes) -> bool:
        """Return whether the messages of a connection that is still open are ignored."""

    @abc.abstractmethod
    def received(self, identity: bytes, parts: "list[zmq.Frame]") -> None:
        """Process a message that arrived before its peer was identified; its first part is the identity."""

    @abc.abstractmethod
    def ended(self, identity: bytes) -> None:
        """Called when a connection has ended, after the messages that arrived before it."""

    @abc.abstractmethod
    def connection_refused(self, reason: str) -> None:
        """Log that a connection was refused, or closed for the limit."""

    @abc.abstractmethod
    def writable(self) -> None:
        """Retry messages that the socket did not accept, as `SocketEvents.writable` does."""

    def send(
        self,
        identity: bytes,
        parts: Sequence[bytes | memoryview],
        is_retry: bool = False,
        *,
        copies: bool = False,
    ) -> bool:
        """Pass a message to ZeroMQ, as `LoopSocket.send` does; return False also if the peer is gone."""
        try:
            return self._socket.send([identity, *parts], is_retry, copies=copies)
        except PeerGoneError:
            # The monitor reports this too, but perhaps only after the descriptor has been reused.
            self._end(identity)
            return False

    # Events of the socket

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Pass on a message of an unidentified connection, once the events before it were reported."""
        identity = parts[0].bytes
        if identity not in self._gone and not self.is_ignored(identity):
            # The operating system reuses descriptors: the end of an earlier connection with the same
            # descriptor may have to be reported first.
            self._socket.monitor.after_events(partial(self._first_arrived, identity, parts))

    def _first_arrived(self, identity: bytes, parts: "list[zmq.Frame]") -> None:
        if identity not in self._identified:
            if identity in self._gone or self.is_ignored(identity):
                return
            replaced = self._limit.identify(int(parts[0].get(zmq.SRCFD)), identity)
            if replaced is None:
                return
            for one in replaced:
                self._disconnected(one)
        self.received(identity, parts)

    def connected(self, descriptor: int) -> None:
        """Add a connection, and close the oldest unidentified ones if there are too many."""
        self._limit.opened(descriptor)
        if not self._is_limit_due:
            self._is_limit_due = True
            self._socket.monitor.after_events(self._enforce_limit)

    def _enforce_limit(self) -> None:
        self._is_limit_due = False
        for descriptor in self._limit.excess():
            if not self._socket.monitor.reset(descriptor):
                break  # this process has no descriptors left
            self.connection_refused("it sent no hello, and was closed to admit other connections")
            for identity in self._limit.closed(descriptor):
                self._disconnected(identity)

    def handshaken(self) -> None:  # noqa: B027 - most kinds of peers need no more
        """Wait for the first message of the peer."""

    def unreachable(self) -> None:  # noqa: B027 - see the docstring
        """Do nothing: a socket that listens does not connect."""

    def refused(self, *, is_final: bool, error: int) -> None:
        """Log a peer without the keys, unless it disconnected during the handshake."""
        if is_final:
            self.connection_refused("its peer does not have the keys")

    def disconnected(self, descriptor: int) -> None:
        """Report the end of a connection, for each of its identities."""
        for identity in self._limit.closed(descriptor):
            self._end(identity)

    def _end(self, identity: bytes) -> None:
        """Report the end of the connection with this identity, after the messages that arrived before it."""
        if identity not in self._ending:
            self._ending.add(identity)
            self._socket.after_messages(partial(self._disconnected, identity))

    def _disconnected(self, identity: bytes) -> None:
        """Report the end of the connection with this identity now."""
        self._ending.discard(identity)
        self._gone[identity] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        self.ended(identity)
