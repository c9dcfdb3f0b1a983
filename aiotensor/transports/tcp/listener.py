"""The accepting side between machines: one socket for all connections to an address.

Each connection has an identity, which ZeroMQ chooses.

    opened --OPEN--> accepted --closed here--> ignored --.
       |                |                                 |
       '----------------'--closed by the peer, or for the limit---> gone
"""

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Collection, Sequence
from functools import partial
from hmac import compare_digest

import zmq
from zmq.utils import z85

from aiotensor.errors import UsageError
from aiotensor.runtime.descriptors import copy_of
from aiotensor.runtime.logs import RepeatedEvent
from aiotensor.transports.address import TcpAddress, look_up
from aiotensor.transports.base import Acceptor, log_refused
from aiotensor.transports.tcp.sockets import (
    ACCEPTED,
    DISCONNECTED,
    LAST_MESSAGES,
    LoopSocket,
    TcpOptions,
    ZmqContext,
    is_ipv6,
    new_context,
)
from aiotensor.transports.tcp.transport import TcpTransport

_LOOKUP_S = 10.0  # the maximum time that opening waits for a name to be resolved
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.ENODEV)  # this machine has no such address

# A connection whose handshake takes longer is closed. A client has a shorter limit, and ends it first.
_HANDSHAKE_S = 5

# The maximum number of connections that wait to be accepted. In a flood, the kernel retries a rejected
# connection a second later. With a larger backlog, it would wait as long behind connections that have ended.
_BACKLOG = 256

# The maximum number of connections that are not accepted: their peers have sent no OPEN yet, or were refused.
_UNIDENTIFIED = 64

_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)

_LINGER_NEVER = struct.pack("ii", 1, 0)  # closing discards unsent data, and sends a reset

# ZAP, https://rfc.zeromq.org/spec/27/
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"


async def listen_at(options: TcpOptions, acceptor: Acceptor) -> "TcpListener":
    """Listen at an address, as `Route.listen` does; a host name is resolved first, for at most ten seconds.

    Args:
        options: the address and its options.
        acceptor: called with each new connection.
    """
    targets = options.address.targets or await _resolve(options.address)
    return TcpListener(options, targets, acceptor)


async def _resolve(address: TcpAddress) -> Sequence[str]:
    try:
        async with asyncio.timeout(_LOOKUP_S):
            return await look_up(address)
    except TimeoutError:
        reason = f"no name server answered for {_LOOKUP_S:g} s"
    except OSError as error:
        reason = error.strerror or str(error)
    raise OSError(
        errno.EADDRNOTAVAIL,
        f"cannot listen at {address.text}: the name {address.host} cannot be resolved ({reason}); use an "
        f"address of this machine, or tcp://*:{address.port} for all of them",
    )


class TcpListener(LoopSocket):
    """Accept connections, and pass messages to their transports; created by `listen_at`.

    For a host name, this listens at the first of its addresses that this machine has. For ``localhost``, that
    is 127.0.0.1, or ::1 where there is no IPv4.

    After `close`, the socket stays open until the last connection is closed: ZeroMQ cannot stop listening
    without closing the connections. New connections get no answer.

    Raises:
        UsageError: another process listens at the address.
        OSError: this process cannot listen at the address, or has no descriptors left; see `errno`.
    """

    def __init__(self, options: TcpOptions, targets: Sequence[str], acceptor: Acceptor) -> None:
        self.address = options.address.text
        self._options = options
        self._acceptor = acceptor
        # The identities by descriptor, the oldest connection first. A descriptor may have several: ZeroMQ may
        # deliver a message of an ended connection after one of the next connection with this descriptor.
        self._identities: dict[int, list[bytes]] = {}
        self._transports: dict[bytes, TcpTransport] = {}
        self._ignored: set[bytes] = set()  # refused or closed here; the peer has not closed them yet
        self._refused = RepeatedEvent(log_refused)
        self._is_closed = False
        with contextlib.ExitStack() as opened:
            context = new_context()
            opened.callback(context.term)
            try:
                super().__init__(
                    context,
                    zmq.ROUTER,
                    _REFUSED,
                    {
                        **options.socket,
                        # Otherwise, a ROUTER silently drops messages to a peer that is not connected.
                        zmq.ROUTER_MANDATORY: 1,
                        zmq.HANDSHAKE_IVL: _HANDSHAKE_S * 1000,
                        zmq.BACKLOG: _BACKLOG,
                    },
                )
                opened.callback(self.shut)
                if options.allowed:
                    opened.callback(_Authenticator(context, options.allowed).close)
                self._bind(targets)
            except zmq.ZMQError as error:
                raise OSError(error.errno, error.strerror) from error
            self._opened = opened.pop_all()

    def _bind(self, targets: Sequence[str]) -> None:
        """Listen at the first target that is an address of this machine."""
        for target in targets:
            self._socket.set(zmq.IPV6, is_ipv6(target))
            try:
                self._socket.bind(target)
                break
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE:
                    raise UsageError(f"another process already listens at {self.address}") from error
                if error.errno not in _NOT_HERE or target is targets[-1]:
                    raise OSError(error.errno, f"cannot listen at {target}: {error.strerror}") from error
        self.address = bytes(self._socket.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        self._port = int(self.address.rpartition(":")[2])
        self._report()  # the listening descriptor: a child forked in this iteration must close it

    def accept_now(self) -> None:
        """Read the messages that have arrived, on all connections."""
        if not self._is_closed:
            self.read_now(LAST_MESSAGES)
            self._report()

    def close(self) -> None:
        """Accept no more connections; existing ones stay open."""
        if not self._is_closed:
            self._is_closed = True
            self._refused.close()
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_closed and not self._transports:
            self._opened.close()

    # Messages

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Pass a message to its transport, or keep it until it is known which connection it belongs to."""
        identity = parts[0].bytes
        transport = self._transports.get(identity)
        if transport is not None:
            transport.receive(parts[1].buffer)
        elif not (self._is_closed or identity in self._ignored):
            self.postpone(parts)

    def message_postponed(self, parts: "list[zmq.Frame]") -> None:
        """Accept a connection with its first message, or refuse it."""
        identity = parts[0].bytes
        if identity in self._transports or identity in self._ignored or self._is_closed:
            self.message_arrived(parts)
            return
        identities = self._identities.get(int(parts[0].get(zmq.SRCFD)))
        if identities is None:
            return  # the connection has ended
        identities.append(identity)
        if not compare_digest(parts[1].bytes, self._options.opening):
            self._ignored.add(identity)
            reason = "it uses another protocol, or another version of this one, or has no access"
            self._refused.add(self.address, reason)
            return
        self._send(identity, self._options.opening, True)
        transport = self._transports[identity] = TcpTransport(
            partial(self._send, identity),
            partial(self._shut, identity),
            lambda: False,  # `accept_now` reads for all connections
        )
        self._acceptor(transport)

    def _send(self, identity: bytes, message: bytes | memoryview, copies: bool) -> None:
        if not self.send(message, copies, identity):
            # An event reports this, too, but perhaps only that of the next connection with the descriptor.
            self.end_after_messages(identity)

    # Connections

    def event(self, kind: int, value: int) -> None:
        """Count the connections."""
        if kind == ACCEPTED:
            self._identities.pop(value, None)
            self._identities[value] = []
        elif kind == DISCONNECTED:
            for identity in self._identities.pop(value, ()):
                self.end_after_messages(identity)
        elif kind & _REFUSED:
            self._refused.add(self.address, "its peer does not have the keys")

    def _report(self) -> None:
        """Report events, and close the oldest unidentified connections if there are too many.

        Any process that reaches the address can open a connection and keep it open. Such a connection never
        keeps a peer out: a peer of this library sends its OPEN as soon as it can, so it is not among the
        oldest.
        """
        super()._report()
        if len(self._identities) - len(self._transports) <= _UNIDENTIFIED:
            return
        others = [
            descriptor
            for descriptor, identities in self._identities.items()
            if not any(identity in self._transports for identity in identities)
        ]
        for descriptor in others[:-_UNIDENTIFIED]:
            if not self._reset(descriptor):
                break  # this process has no descriptors left
            self._refused.add(self.address, "it sent no hello, and was closed to admit other connections")
            for identity in self._identities.pop(descriptor):
                self.end_after_messages(identity)

    def _reset(self, descriptor: int) -> bool:
        """Reset a connection; return whether it has ended or is about to end."""
        # A copy is used, because ZeroMQ may close the descriptor at any time, and its number may be reused.
        try:
            copy = copy_of(descriptor)
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE)
        with contextlib.suppress(OSError), copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getsockname()[1] == self._port:
                # ZeroMQ reads the end of the stream and closes the socket, which sends a reset. To a client
                # with keys, an end without a reset means that the keys do not match.
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NEVER)
                copy.shutdown(socket.SHUT_RD)
        return True

    def ended(self, identity: bytes) -> None:
        """Report the end of a connection to its transport, after the last messages."""
        self._ignored.discard(identity)
        transport = self._transports.pop(identity, None)
        if transport is not None:
            transport.connection_ended(self._options.loss_reason)
            self._end_if_unused()

    def _shut(self, identity: bytes) -> None:
        """Forget a connection that was closed here; its peer closes it when it receives the last message."""
        if self._transports.pop(identity, None) is not None:  # otherwise it has ended
            self._ignored.add(identity)
            self._end_if_unused()


class _Authenticator:
    """Accept only peers with certain public keys.

    This uses a plain socket rather than `zmq.auth.asyncio`, which stops watching its descriptor only after it
    has closed it. By then the descriptor may be that of the next listener, whose peers would get no answer.

    Args:
        context: the context of the socket to which these peers connect.
        allowed: the public keys.

    Raises:
        zmq.ZMQError: the process has no descriptors left.
    """

    def __init__(self, context: ZmqContext, allowed: Collection[bytes]) -> None:
        self._allowed = allowed
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.REP)
        try:
            self._socket.linger = 0
            self._socket.bind(_ZAP_ADDRESS)
            self._descriptor = int(self._socket.get(zmq.FD))
            self._loop.add_reader(self._descriptor, self._answer_all)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Answer no more requests; ZeroMQ then refuses all peers."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _answer_all(self) -> None:
        """Answer all requests: the descriptor becomes readable only once for them."""
        while int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            _, number, _, _, _, mechanism, *credentials = self._socket.recv_multipart()
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" else b""
            answer = (b"200", b"OK", key) if key in self._allowed else (b"400", b"unknown key", b"")
            self._socket.send_multipart([_ZAP_VERSION, number, *answer, b""], zmq.NOBLOCK)
