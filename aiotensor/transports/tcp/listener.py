"""The accepting side between machines: one socket for all connections to an address."""

from functools import partial
from hmac import compare_digest

import zmq

from aiotensor.runtime.logs import RepeatedEvent, logger_of, others
from aiotensor.transports.base import MAX_UNREAD_BYTES, Acceptor
from aiotensor.transports.tcp.options import TcpOptions
from aiotensor.transports.tcp.transport import TcpTransport
from aiotensor.transports.zeromq.connections import Connections
from aiotensor.transports.zeromq.listener import MessageListener

__all__ = ["TcpListener", "listen_at"]

logger = logger_of("transports")


async def listen_at(options: TcpOptions, acceptor: Acceptor) -> "TcpListener":
    """Listen at an address, as `Route.listen` does; a host name is resolved first.

    Args:
        options: the address and its options.
        acceptor: the object that is notified of new connections.
    """
    listener = MessageListener(options.address, options.socket, options.allowed)
    await listener.open()
    try:
        return TcpListener(listener, options, acceptor)
    except BaseException:
        listener.abort()
        raise


class TcpListener(Connections):
    """Accept connections, and pass messages to their transports; created by `listen_at`.

    After `close`, the socket stays open until the last connection is closed: ZeroMQ cannot stop listening
    without closing the connections. New connections get no answer.
    """

    def __init__(self, listener: MessageListener, options: TcpOptions, acceptor: Acceptor) -> None:
        self._listener = listener
        self._opening = options.opening
        self._loss_reason = options.loss_reason
        self._acceptor = acceptor
        self._transports: dict[bytes, TcpTransport] = {}
        self._closed: set[bytes] = set()  # closed here; the peer has not closed them yet
        self._refused = RepeatedEvent(_log_refused)
        self._is_closed = False
        super().__init__(listener.listen, self._transports, None)

    @property
    def address(self) -> str:
        """The address, with the actual port."""
        return self._listener.address

    def accept_now(self) -> None:
        """Read the messages that have arrived, on all connections."""
        if not self._is_closed:
            self._socket.read_last()

    def close(self) -> None:
        """Accept no more connections; existing ones stay open."""
        if self._is_closed:
            return
        self._is_closed = True
        self._refused.close()
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_closed and not self._transports:
            self._listener.abort()

    # Events of the connections

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Pass a message to its transport."""
        transport = self._transports.get(parts[0].bytes)
        if transport is not None:
            transport.receive(parts[-1].buffer)
        else:
            super().message_arrived(parts)

    def is_ignored(self, identity: bytes) -> bool:
        """Return whether a connection, or this listener, was closed here."""
        return identity in self._closed or self._is_closed

    def received(self, identity: bytes, parts: "list[zmq.Frame]") -> None:
        """Accept a connection with its first message, or pass a later one to its transport."""
        transport = self._transports.get(identity)
        if transport is not None:
            transport.receive(parts[-1].buffer)
        elif not compare_digest(parts[-1].bytes, self._opening):
            self._closed.add(identity)
            self.connection_refused(
                "it uses another protocol, or another version of this one, or has no access"
            )
        else:
            self.send(identity, [self._opening])
            transport = self._transports[identity] = TcpTransport(
                lambda message, copies: self.send(identity, [message], copies=copies),
                partial(self._shut, identity),
                lambda: False,  # `accept_now` reads for all connections
                MAX_UNREAD_BYTES,
            )
            self._acceptor.connection_accepted(transport)

    def ended(self, identity: bytes) -> None:
        """Report the end of a connection to its transport."""
        self._closed.discard(identity)
        transport = self._transports.get(identity)
        if transport is not None:
            transport.connection_ended(self._loss_reason)

    def connection_refused(self, reason: str) -> None:
        """Log a connection that was refused."""
        self._refused.add(self._listener.address, reason)

    def writable(self) -> None:
        """Do nothing: the credit of the peers limits the messages, so the socket has no limit."""

    def _shut(self, identity: bytes) -> None:
        """Forget a connection that was closed here; its peer closes it when it receives the last message."""
        del self._transports[identity]
        if identity not in self._gone:
            self._closed.add(identity)
        self._end_if_unused()


def _log_refused(count: int, address: str, reason: str) -> None:
    logger.warning(
        "a connection to %s was refused: %s%s",
        address,
        reason,
        others(count),
        extra={"event": "connection_refused", "address": address, "reason": reason, "count": count},
    )
