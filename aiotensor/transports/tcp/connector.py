"""The connecting side between machines: connects to the process at an address, and again after a loss.

    dialing --handshake--> reached --answer--> connected
       ^                      |                    |
       '----------------------'--------lost--------'

Each attempt has its own socket, and no socket is connected twice. So the messages of a lost connection do not
reach the next process, and a connection that ends slowly does not disturb the next attempt.
"""

import asyncio
import math
from collections.abc import Mapping
from hmac import compare_digest

import zmq

from aiotensor.errors import AccessDeniedError, UsageError, is_shortage
from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.transports.base import ConnectorEvents, unexpected
from aiotensor.transports.tcp.options import TcpOptions
from aiotensor.transports.tcp.transport import TcpTransport
from aiotensor.transports.zeromq.addresses import Target
from aiotensor.transports.zeromq.context import ZmqContext, begin
from aiotensor.transports.zeromq.dialing import DIALING_OPTIONS, Dialer
from aiotensor.transports.zeromq.sockets import LoopSocket

__all__ = ["TcpConnector"]

# After a connection that has lasted longer than this, the next attempt follows without a delay.
_SHORT_S = 0.25


class TcpConnector:
    """Connect to the process that listens at an address, and again after a loss.

    Args:
        options: the address and its options.
        events: the object that is notified.
    """

    connects_at_once = False
    is_backlogged = False  # the kernel of another machine does not report this

    def __init__(self, options: TcpOptions, events: ConnectorEvents) -> None:
        self.opening = options.opening
        self._address = options.address
        self._options = {**options.socket, **DIALING_OPTIONS}
        self._loss_reason = options.loss_reason
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._dialer = Dialer(self._address, self._dial)
        self._context: ZmqContext | None = None
        self._attempts: set[_Attempt] = set()  # the attempts with an open socket
        self._current: _Attempt | None = None  # the last one, until its socket is closed
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
        if not (self._is_closed or self._dialer.is_active or self._current is not None):
            self._dialer.begin()

    def close(self) -> None:
        """Stop all attempts; the connections stay open."""
        if self._is_closed:
            return
        self._is_closed = True
        self._dialer.end()
        for attempt in [attempt for attempt in self._attempts if attempt.transport is None]:
            attempt.close()
        self._end_if_unused()

    def _dial(self, target: Target) -> None:
        """Try to connect to one target."""
        if self._context is None:
            raise AssertionError("a connector that dials has a context")
        if self._current is not None and self._current.transport is None:
            self._current.close()  # the peer has not answered
        try:
            attempt = _Attempt(self._context, {**self._options, **target.options}, target.address, self)
        except zmq.ZMQError as error:
            text = f"connecting to {self._address.text} failed: {error.strerror}"
            if is_shortage(error):
                self._dialer.report(f"{text}; it will be retried", error.strerror)
                self._dialer.again()
            else:
                self._dialer.end()
                self._events.connecting_failed(UsageError(text))
        else:
            self._current = attempt
            self._attempts.add(attempt)

    # Events of the attempts

    def dialed(self, descriptor: int) -> None:
        """Notify the dialer of a new connection, whose handshake follows."""
        self._dialer.connected(descriptor)

    def reached(self) -> None:
        """Notify the dialer of a successful handshake."""
        self._dialer.reached()

    def answered(self, attempt: "_Attempt", answer: memoryview) -> None:
        """Begin the connection after the first message of the peer, or fail if it is not the expected one."""
        if not compare_digest(answer, self.opening):
            attempt.close()
            self._events.connecting_failed(
                UsageError(
                    f"the process at {self._address.text} is not a receiver or publisher, but perhaps a "
                    "MessageServer, or it uses another version of aiotensor"
                )
            )
            return
        transport = attempt.begin()
        self._connected_at = self._loop.time()
        try:
            self._events.connected(transport)
        except OSError as error:
            transport.close()
            self._dialer.report(
                f"connecting to {self._address.text} failed and will be retried: {error}", str(error)
            )
            self._dialer.again()
        except Exception as error:  # noqa: BLE001 - otherwise, the calls that wait for the peer would hang
            transport.close()
            self._events.connecting_failed(unexpected(self._address.text, error))

    def unreachable(self) -> None:
        """Try again after an attempt that got no answer."""
        self._dialer.unreachable()
        self._dialer.again()

    def refused(self, *, is_final: bool, error: int) -> bool:
        """Give up, and return True, if the other side does not accept the keys."""
        if not is_final and not (self._dialer.refused(error) and zmq.CURVE_SECRETKEY in self._options):
            return False
        self._dialer.end()
        self._events.connecting_failed(
            AccessDeniedError(
                f"the keys of this process and of the one at {self._address.text} do not match: pass "
                "secret_key and server_key here, and add this side's public key to its client_keys"
            )
        )
        return True

    def lost(self, transport: TcpTransport | None) -> None:
        """Report the end of a connection; if the peer had not answered on it, try again."""
        if transport is not None:
            transport.connection_ended(self._loss_reason)
        elif not self._is_closed:
            self._dialer.again()

    def closed(self, attempt: "_Attempt") -> None:
        """Forget an attempt whose socket was closed."""
        self._attempts.discard(attempt)
        if self._current is attempt:
            self._current = None
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_closed and not self._attempts and self._context is not None:
            context, self._context = self._context, None
            context.term()


class _Attempt:
    """An attempt to connect, and the connection that it becomes; implements `SocketEvents`.

    Args:
        context: the context of the socket.
        options: the options of the socket.
        address: the address of the peer.
        owner: the connector.

    Raises:
        zmq.ZMQError: ZeroMQ cannot connect to this address, or the process has no descriptors left.
    """

    def __init__(
        self,
        context: ZmqContext,
        options: Mapping[int, int | bytes],
        address: str | bytes,
        owner: TcpConnector,
    ) -> None:
        self.transport: TcpTransport | None = None  # set once the peer has answered
        self._owner = owner
        self._is_closed = self._is_ending = False
        self._socket = LoopSocket(context, zmq.DEALER, options, self)
        try:
            self._socket.connect(address)
        except BaseException:
            self._socket.close()
            raise

    def begin(self) -> TcpTransport:
        """Create and return the transport of the connection."""
        self.transport = TcpTransport(
            lambda message, copies: self._socket.send([message], copies=copies),
            self.close,
            self._socket.read_now,
            MAX_RECORD_BYTES,
        )
        return self.transport

    def close(self) -> None:
        """Close the socket."""
        if not self._is_closed:
            self._is_closed = True
            self._socket.close()
            self._owner.closed(self)

    # Events of the socket

    def connected(self, descriptor: int) -> None:
        """Notify the connector of a new connection, whose handshake follows."""
        self._owner.dialed(descriptor)

    def handshaken(self) -> None:
        """Send the first message."""
        self._owner.reached()
        self._socket.send([self._owner.opening])

    def unreachable(self) -> None:
        """Try the next target, unless a connection has just ended, after which ZeroMQ tries to reconnect."""
        if not self._is_ending:
            self.close()
            self._owner.unreachable()

    def refused(self, *, is_final: bool, error: int) -> None:
        """Give up if the other side does not accept the keys; otherwise `disconnected` follows."""
        if self._owner.refused(is_final=is_final, error=error):
            self.close()

    def disconnected(self, descriptor: int) -> None:
        """Report the end of the connection, after the messages that arrived before it."""
        self._is_ending = True
        self._socket.after_messages(self._lost)

    def _lost(self) -> None:
        self.close()
        self._owner.lost(self.transport)

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Pass a message of the peer to the transport, which the first message creates."""
        if self._is_closed:
            return
        if self.transport is None:
            self._owner.answered(self, parts[-1].buffer)
        else:
            self.transport.receive(parts[-1].buffer)

    def writable(self) -> None:
        """Do nothing: the credit of the peer limits the messages, so the socket has no limit."""
