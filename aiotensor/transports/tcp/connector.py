"""The connecting side between machines: connects to the process at an address, and again after a loss.

    dialing --handshake--> reached --OPEN of the peer--> connected
       ^                      |                              |
       '----------------------'-------------lost-------------'

An address has one target, or several: ``localhost`` and a name can have more than one. They are tried in
turn; after the last one, the next round begins after a delay. A name is resolved in each round, because the
process may have moved to another machine.

Each attempt has its own socket, and no socket is connected twice. So the messages of a lost connection do not
reach the next process, and a connection that ends slowly does not disturb the next attempt.
"""

import asyncio
import errno
from collections import Counter
from collections.abc import Mapping, Sequence
from hmac import compare_digest

import zmq

from aiotensor.errors import AccessDeniedError, UsageError, is_shortage
from aiotensor.transports.address import look_up
from aiotensor.transports.base import Connector, Events
from aiotensor.transports.tcp.sockets import (
    DISCONNECTED,
    LoopSocket,
    TcpOptions,
    ZmqContext,
    is_ipv6,
    new_context,
)
from aiotensor.transports.tcp.transport import TcpTransport

_CONNECT_S = 1.0  # the kernel would try for a minute or two, with pauses that grow to many seconds
_HANDSHAKE_S = 2.0  # less than the other side waits: this side can tell its own timeout from refused keys
_HANDSHAKES = 3  # ended handshakes in a row that indicate other keys: others may be due to killed processes

_RETRIED = int(zmq.EVENT_CONNECT_RETRIED)
_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_ENDED = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)

_OPTIONS: Mapping[int, int] = {
    zmq.CONNECT_TIMEOUT: int(_CONNECT_S * 1000),
    zmq.HANDSHAKE_IVL: int(_HANDSHAKE_S * 1000),
    # Practically never: a socket that ZeroMQ reconnects sends its queued messages to the next process.
    # Without an interval, ZeroMQ would discard messages that have arrived, and not report failed attempts.
    zmq.RECONNECT_IVL: 2**31 - 1,
}


class TcpConnector(Connector):
    """Connect to the process that listens at an address, and again after a loss.

    Args:
        options: the address and its options.
        events: the callbacks.
    """

    def __init__(self, options: TcpOptions, events: Events) -> None:
        super().__init__(options.address.text, events)
        self.options = options
        self._context: ZmqContext | None = None
        self._left: list[str] = []  # to be tried in this round
        self._lookup: asyncio.Future[Sequence[str]] | None = None
        self._sockets: set[_Attempt] = set()  # that are open
        self._current: _Attempt | None = None  # whose peer has not answered
        self._ended_handshakes: Counter[str] = Counter()  # in a row, by the process at each target

    @property
    def is_trying(self) -> bool:
        """Whether an attempt is scheduled or under way."""
        return super().is_trying or self._lookup is not None or self._current is not None

    def missing(self) -> str:
        """Return why no peer is connected, as `Connector.missing` does."""
        if self._lookup is not None:
            return "its name cannot be resolved: no name server answers"
        return "no process listens there, or it does not answer"

    def connect(self) -> None:
        """Begin a round, as `Connector.connect` does."""
        self._absence.begin()
        if self._context is None:
            self._context = new_context()
        if self.options.address.targets:
            self._left = list(self.options.address.targets)
            self._dial()
        else:
            self._lookup = look_up(self.options.address)
            self._lookup.add_done_callback(self._looked_up)

    def close(self) -> None:
        """Stop all attempts; the connections stay open."""
        super().close()
        if self._lookup is not None:
            self._lookup.cancel()
        if self._current is not None:
            self._current.close()
        self._end_if_unused()

    def _looked_up(self, lookup: "asyncio.Future[Sequence[str]]") -> None:
        self._lookup = None
        if lookup.cancelled():
            return
        error = lookup.exception()
        if isinstance(error, OSError):
            self.obstacle = f"its name cannot be resolved: {error.strerror or error}"
            self.reconnect()
            return
        self.obstacle = ""
        self._left = list(lookup.result())
        self.try_to(self._dial)

    def _dial(self) -> None:
        """Try the next target of this round."""
        self._attempt = None
        if self._context is None:
            raise AssertionError("a connector that dials has a context")
        try:
            self._current = _Attempt(self._context, self._left.pop(0), self)
        except zmq.ZMQError as error:
            if is_shortage(error):
                raise OSError(error.errno, error.strerror) from error
            raise UsageError(f"connecting to {self._label} failed: {error.strerror}") from error
        self._sockets.add(self._current)

    # Events of the attempts

    def failed(self) -> None:
        """Try the next target after an attempt whose peer has not answered, and which was closed."""
        if self._is_closed:
            return
        if self._left:
            self._attempt = self._loop.call_soon(self.try_to, self._dial)
        else:
            self.reconnect()

    def handshake_ended(self, target: str, *, is_clean: bool) -> bool:
        """Return whether a peer has ended enough handshakes in a row to conclude that it has other keys.

        A process that is overloaded resets the connection instead, and a process that was stopped leaves it
        open. Neither shows anything about the keys.
        """
        self._ended_handshakes[target] = self._ended_handshakes[target] + 1 if is_clean else 0
        return self._ended_handshakes[target] >= _HANDSHAKES

    def refused(self) -> None:
        """Give up, because the keys do not match."""
        self._ended_handshakes.clear()
        self._left.clear()
        self.fail(
            AccessDeniedError(
                f"the keys of this process and of the one at {self._label} do not match: pass secret_key and "
                "server_key here, and add this side's public key to its client_keys"
            )
        )

    def answered(self, attempt: "_Attempt", answer: memoryview) -> None:
        """Begin the connection after the first message of the peer, or fail if it is not the expected one."""
        self._ended_handshakes.clear()
        self._left.clear()
        self._current = None
        if compare_digest(answer, self.options.opening):
            self.try_to(lambda: self.begin(attempt.begin()))
        else:
            attempt.close()
            self.fail(UsageError(f"the process at {self._label} is not one of this version of aiotensor"))

    def closed(self, attempt: "_Attempt") -> None:
        """Forget an attempt whose socket was closed."""
        self._sockets.discard(attempt)
        if self._current is attempt:
            self._current = None
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_closed and not self._sockets and self._context is not None:
            context, self._context = self._context, None
            context.term()


class _Attempt(LoopSocket):
    """An attempt to connect, and the connection that it becomes.

    Args:
        context: the context of the socket.
        target: the address of the peer.
        owner: the connector.

    Raises:
        zmq.ZMQError: ZeroMQ cannot connect to this address, or the process has no descriptors left.
    """

    def __init__(self, context: ZmqContext, target: str, owner: TcpConnector) -> None:
        options = {**owner.options.socket, **_OPTIONS, zmq.IPV6: is_ipv6(target)}
        super().__init__(context, zmq.DEALER, _RETRIED | _SUCCEEDED | _REFUSED | _ENDED, options)
        self._transport: TcpTransport | None = None  # set once the peer has answered
        self._target = target
        self._owner = owner
        self._is_ending = False
        try:
            self._socket.connect(target)
        except BaseException:
            self.shut()
            raise

    def begin(self) -> TcpTransport:
        """Create and return the transport of the connection."""
        self._transport = TcpTransport(self.send, self.close, self.read_now)
        return self._transport

    def close(self) -> None:
        """Close the socket."""
        self.shut()
        self._owner.closed(self)

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Pass a message of the peer to the transport, which the first message creates."""
        if self._transport is None:
            self._owner.answered(self, parts[0].buffer)
        else:
            self._transport.receive(parts[0].buffer)

    def event(self, kind: int, value: int) -> None:
        """Follow the connection; see `TcpConnector`."""
        if kind == _SUCCEEDED:
            self.send(self._owner.options.opening, True)
        elif kind == _RETRIED and not self._is_ending:  # after the end of a connection, ZeroMQ retries, too
            self._owner.handshake_ended(self._target, is_clean=False)
            self.close()
            self._owner.failed()
        elif kind == _ENDED:  # `DISCONNECTED` follows
            # ZeroMQ reports a timeout as EAGAIN, and a reset as ECONNRESET, or rarely also as EPIPE.
            is_clean = value == errno.EPIPE
            has_keys = zmq.CURVE_SECRETKEY in self._owner.options.socket
            if self._owner.handshake_ended(self._target, is_clean=is_clean) and has_keys:
                self.close()
                self._owner.refused()
        elif kind & _REFUSED:
            self.close()
            self._owner.refused()
        elif kind == DISCONNECTED:
            self._is_ending = True
            self.end_after_messages()

    def ended(self, identity: bytes) -> None:
        """Report the end of the connection, after the messages that arrived before it."""
        self.close()
        if self._transport is None:
            self._owner.failed()
        else:
            self._transport.connection_ended(self._owner.options.loss_reason)
