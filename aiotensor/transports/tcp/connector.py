"""The connecting side between machines: reaches the process that listens at an address, again after a loss.

    dialing --handshake--> reached --answer--> connected
       ^                      |                    |
       '----------------------'--------lost--------'

Each attempt has its own socket, and no socket is connected twice. So the messages of a lost connection do not
reach the next process.
"""

import asyncio
import errno
import math
from collections.abc import Mapping

import zmq

from aiotensor.errors import AccessDeniedError, UsageError
from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.protocol.moves import OPENING
from aiotensor.transports.base import ConnectorEvents
from aiotensor.transports.tcp.transport import TcpTransport
from aiotensor.transports.zeromq.addresses import Address, Target
from aiotensor.transports.zeromq.context import ZmqContext, begin
from aiotensor.transports.zeromq.dialing import DIALING_OPTIONS, Dialer
from aiotensor.transports.zeromq.sockets import LoopSocket

__all__ = ["TcpConnector"]

_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)

# After a longer connection, the next attempt follows without a delay.
_SHORT_S = 0.25


class TcpConnector:
    """Connect to the process that listens at an address.

    Args:
        address: the address.
        options: the options of the sockets.
        loss_reason: how a lost connection has ended, for errors.
        events: the object that is notified.
    """

    reconnects = True
    connects_at_once = False
    is_backlogged = False  # the kernel of another machine does not tell

    def __init__(
        self, address: Address, options: Mapping[int, int | bytes], loss_reason: str, events: ConnectorEvents
    ) -> None:
        self._address = address
        self._options = {**options, **DIALING_OPTIONS}
        self._loss_reason = loss_reason
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._dialer = Dialer(address, self._dial)
        self._context: ZmqContext | None = None
        self._socket: LoopSocket | None = None  # of the connection or the present attempt
        self._transport: TcpTransport | None = None
        self._connected_at = math.inf
        self._is_closed = False

    def connect(self) -> None:
        """Begin to connect, as `Connector.connect` does."""
        if self._context is None:
            self._context = begin()
        self._dialer.begin()

    def reconnect(self) -> None:
        """Begin to connect again after a loss, as `Connector.reconnect` does."""
        if self._is_closed or self._dialer.is_active:
            return
        was_short = self._loop.time() - self._connected_at < _SHORT_S
        self._connected_at = math.inf
        if was_short:
            self._dialer.again()
        else:
            self._dialer.begin()

    def connect_now(self) -> None:
        """Connect now, if there is no connection and no attempt is under way."""
        is_connected = self._transport is not None and not self._transport.is_closed
        if not (self._is_closed or self._dialer.is_active or self._socket is not None or is_connected):
            self._dialer.begin()

    def close(self) -> None:
        """Stop all attempts; the connection stays open."""
        if self._is_closed:
            return
        self._is_closed = True
        self._dialer.close()
        if self._transport is None or self._transport.is_closed:
            self._close_socket()

    def _dial(self, target: Target) -> None:
        """Try to connect to one target."""
        if self._context is None:
            raise AssertionError("a connector that dials has a context")
        if self._transport is None or self._transport.is_closed:  # otherwise it is ending, and closes its own
            self._close_socket()
        try:
            self._socket = LoopSocket(self._context, zmq.DEALER, {**self._options, **target.options}, self)
            self._socket.connect(target.address)
        except zmq.ZMQError as error:
            text = f"connecting to {self._address.text} failed: {error.strerror}"
            if error.errno in _EXHAUSTED:
                self._dialer.report(f"{text}; it is tried again", error.strerror)
                self._dial_again()
            else:
                self._close_socket()
                self._dialer.end()
                self._events.connecting_failed(UsageError(text))

    def _dial_again(self) -> None:
        self._close_socket()
        self._dialer.again()

    def _close_socket(self) -> None:
        """Close the socket of the present attempt or connection; after `close`, the context too."""
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close()
        if self._is_closed and self._context is not None:
            context, self._context = self._context, None
            context.term()

    # Events of the socket

    def connected(self, descriptor: int) -> None:
        """Handle a new connection; the handshake follows."""
        self._dialer.connected(descriptor)

    def handshaken(self) -> None:
        """Send the first message."""
        self._dialer.reached()
        if self._socket is not None:
            self._socket.send([OPENING])

    def _answered(self, sock: LoopSocket, answer: memoryview) -> None:
        """Handle the first message of the peer."""
        if answer != OPENING:
            self._close_socket()
            self._events.connecting_failed(
                UsageError(
                    f"the process at {self._address.text} is no receiver and no publisher, or has another "
                    "version of aiotensor"
                )
            )
            return
        transport = TcpTransport(sock.send, lambda: self._shut(sock), sock.read_now, MAX_RECORD_BYTES)
        self._transport = transport
        self._connected_at = self._loop.time()
        try:
            self._events.connected(transport)
        except OSError as error:
            transport.close()
            self._dialer.report(
                f"connecting to {self._address.text} failed, and is tried again: {error}", str(error)
            )
            self._dialer.again()

    def unreachable(self) -> None:
        """Try the next target."""
        self._dialer.unreachable()
        self._dial_again()

    def refused(self, *, is_final: bool, error: int) -> None:
        """Give up if the other side does not accept the keys."""
        if is_final or (self._dialer.refused(error) and zmq.CURVE_SECRETKEY in self._options):
            self._close_socket()
            self._dialer.end()
            self._events.connecting_failed(
                AccessDeniedError(
                    f"the process at {self._address.text} and this one do not agree on their keys: give "
                    "secret_key and server_key here, and list this side's public key in its client_keys"
                )
            )

    def disconnected(self, descriptor: int) -> None:
        """Handle the end of the connection, after the messages that arrived before."""
        sock, transport = self._socket, self._transport
        if sock is None:
            return
        sock.read_last()
        if self._socket is not sock:
            return
        if transport is None or transport.is_closed:
            self._dial_again()
        else:
            self._close_socket()
            transport.connection_ended(self._loss_reason)

    def writable(self) -> None:
        """Do nothing: the credit of the peer limits the messages, so the socket has no limit."""

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Handle a message of the peer."""
        sock, transport = self._socket, self._transport
        if sock is None:
            return
        if transport is None or transport.is_closed:
            self._answered(sock, parts[-1].buffer)
        else:
            transport.receive(parts)

    def _shut(self, sock: LoopSocket) -> None:
        """Close the socket of a connection; the next attempt may have begun."""
        if self._socket is sock:
            self._close_socket()
        else:
            sock.close()
