"""A server at one address, as its client sees it: the connection to it, and to its successors there.

    DIALING --handshake, hello, hello--> READY --lost--> DIALING

While there is no connection, new requests wait for the next server. When a server is lost, its unanswered
requests fail with `PeerLostError`.

`transports/zeromq/dialing.py` decides where to connect and when. Each attempt has a new socket, and no socket
is connected twice, so no cancelled message reaches the next server. Each attempt is a new `ServerSession`,
which is used once the server has accepted this client.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import zmq

from aiotensor.channel.connection_log import log_failure, log_loss, log_violation
from aiotensor.channel.payloads import ReceivedAnswer
from aiotensor.channel.server_session import ServerSession
from aiotensor.errors import (
    AccessDeniedError,
    AioTensorError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    UnavailableError,
    UsageError,
    WouldBlockError,
    again,
    is_shortage,
)
from aiotensor.protocol.client import ClientConnection
from aiotensor.protocol.connection import Loss
from aiotensor.protocol.exchange import ServerHello
from aiotensor.protocol.frames import Close
from aiotensor.protocol.parts import PartLimits
from aiotensor.runtime.descriptors import copy_of
from aiotensor.runtime.outage import Outage
from aiotensor.runtime.waiting import Waiters, at_most
from aiotensor.statistics.counters import WaitCounter, new_counts, snapshot
from aiotensor.transports.address import label_of
from aiotensor.transports.users import check_file, check_user
from aiotensor.transports.zeromq.addresses import Address, Target
from aiotensor.transports.zeromq.context import ZmqContext
from aiotensor.transports.zeromq.dialing import DIALING_OPTIONS, Dialer
from aiotensor.transports.zeromq.sockets import LoopSocket
from aiotensor.types import EngineStatistics, Usage

__all__ = ["RemoteServer"]

# A server that has sent its last message closes the connection. If ZeroMQ has sent only some parts of a
# message by then, and this side has discarded the others, libzmq 4.3.5 fails an assertion, which ends the
# process. So unsent parts remain until the server has read them or has closed, at most for this long.
_LINGER_S = 0.2


class RemoteServer:
    """Send messages to the server at one address; belongs to the running loop.

    Args:
        context: the context of the sockets.
        address: the address to connect to.
        options: the options of the sockets.
        receiver: the id of the receiver for the tensors of answers; "" for none.
        limits: the limits on the parts and the body of an answer.
        max_wait_s: the time in seconds after which a wait for the server, or for credit, fails; None for no
            limit.
        grace_s: the time in seconds without a server after which no call waits for it; None for no limit.
        drop: called with an answer whose request was cancelled.

    Attributes:
        address: the address of the server.
        session: the connection to a server that has accepted this client; None while there is none.
        in_flight: the number of messages that are being sent, or wait for an answer; counted by the client.
        being_sent: the number of messages that are being sent; counted by the client.
        lost: the number of servers that were lost at this address.
        counts: the counters of `EngineStatistics`; some are counted by the client.
        replies: counts the durations until answers; counted by the client.
        refused_at: the time at which the last connection ended or failed permanently, in seconds by the clock
            of the event loop.
        outage: measures for how long no server has accepted this client.
    """

    def __init__(
        self,
        context: ZmqContext,
        address: Address,
        options: Mapping[int, int | bytes],
        receiver: str,
        limits: PartLimits,
        max_wait_s: float | None,
        grace_s: float | None,
        drop: Callable[[ReceivedAnswer], None],
    ) -> None:
        self.session: ServerSession | None = None
        self.in_flight = self.being_sent = self.lost = 0
        self.counts = new_counts(EngineStatistics)
        self.replies = WaitCounter()
        self.refused_at = 0.0
        self._context = context
        self.address = address
        self._options = {**options, **DIALING_OPTIONS}
        self._receiver = receiver
        self._limits = limits
        self._max_wait_s = max_wait_s
        self._grace_s = grace_s
        self.outage = Outage(grace_s, self._unavailable_for_long)
        self._drop = drop
        self._changed: Callable[[], object] | None = None
        self._waiters = Waiters()
        self._dialer = Dialer(address, self._dial)
        self._failure: AioTensorError | None = None  # why no attempt is made
        self._attempt: ServerSession | None = None

    def connect(self, changed: Callable[[], object] | None = None) -> None:
        """Begin to connect, and keep trying until a server is reached or an attempt fails permanently.

        Args:
            changed: called when a server was connected or lost, or may take a message again.
        """
        self._changed = changed
        self.outage.begin()
        self._connect()

    def _connect(self) -> None:
        self._failure = None
        self._dialer.begin()

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed()

    def _dial(self, target: Target) -> None:
        """Try one address; try again later if this process has no descriptors or memory."""
        try:
            sock = LoopSocket(self._context, zmq.DEALER, {**self._options, **target.options}, self)
            connection = ClientConnection(self._limits, self.address.text)
            self._attempt = ServerSession(sock, connection, self._wait_limit, self._drop)
            sock.connect(target.address)
        except zmq.ZMQError as error:
            text = f"connecting to {self.address.text} failed: {error.strerror}"
            if is_shortage(error):
                self._dialer.report(text, error.strerror)
                self._dial_again()
            else:
                self._end(PeerLostError(text))
                self._notify()

    def _dial_again(self) -> None:
        """End an attempt; the dialer makes the next one."""
        self._close_socket()
        self._dialer.again()

    def close(self, error: AioTensorError, linger_s: float = 0.0) -> None:
        """Close, and fail waiting requests; ZeroMQ has `linger_s` seconds to send accepted messages."""
        self._end(error, linger_s)
        self.outage.end()

    async def ready(self) -> ServerSession:
        """Wait until a server is connected, and return its session; retries after a permanent failure.

        Raises:
            RefusedError: the server refused this client, because of a limit or its version.
            PeerLostError: ZeroMQ cannot connect to the address, or one side closed the connection because of
                an error.
            AccessDeniedError: the server belongs to another user, or does not accept the key.
            UsageError: there can be no socket at the path of the address.
            UnavailableError: no server was connected within `max_wait_s`, or has been for the grace period.
            ClosedError: this client was closed.
        """
        self.try_again()
        try:
            async with self._wait_limit():
                while self.session is None:
                    if self.failure is not None:
                        raise self.failure
                    if self.outage.is_too_long:
                        raise self.unavailable()
                    await self._waiters.wait()
        except WouldBlockError:
            if self.session is None:  # a server may have connected in this iteration of the loop
                raise
        return self.session

    def _wait_limit(self) -> AbstractAsyncContextManager[None]:
        return at_most(self._max_wait_s, self._timed_out)

    def _unavailable_for_long(self) -> None:
        self._waiters.wake()
        self._notify()

    def unavailable(self) -> UnavailableError:
        """Return the error of a call after a long outage."""
        return self._unreached(f"has not been reached for the grace period of {self._grace_s:g} s")

    def _timed_out(self) -> WouldBlockError:
        if self.session is None:
            return self._unreached(f"could not be reached for {self._max_wait_s:g} s")
        return WouldBlockError(
            f"the server at {self.address.text} has had no capacity for this message for "
            f"{self._max_wait_s:g} s",
            messages=Usage(None, self.in_flight, 1),
        )

    def _unreached(self, reason: str) -> UnavailableError:
        more = f"; {self._dialer.reason}" if self._dialer.reason else ""
        return UnavailableError(
            f"the server at {self.address.text} {reason}{more}", messages=Usage(None, self.in_flight, 1)
        )

    @property
    def is_hopeless(self) -> bool:
        """Whether there is neither a connection nor a pending attempt, until `try_again`."""
        return self._attempt is None and not self._dialer.is_active

    def try_again(self, at_most_every_s: float = 0.0) -> None:
        """Connect again after a permanent failure, but not within `at_most_every_s` seconds of it."""
        may_have_changed = isinstance(
            self._failure, PeerLostError | RefusedError | AccessDeniedError | UsageError
        )
        can_try = self._attempt is None and may_have_changed
        if can_try and asyncio.get_running_loop().time() >= self.refused_at + at_most_every_s:
            self._connect()

    # Events of the socket

    def connected(self, descriptor: int) -> None:
        """Check the user of the peer before sending anything."""
        self._dialer.connected(descriptor)
        if self.address.path is None:
            return
        try:
            with copy_of(descriptor) as peer:
                if peer.family == socket.AF_UNIX:  # the connection may have ended, and its number be reused
                    check_user(peer)
        except AccessDeniedError as error:
            self._refuse(error)
        except OSError as error:
            if is_shortage(error):  # the user is unknown, so nothing may be sent
                self._dialer.report(
                    f"the user of the server at {self.address.text} cannot be checked: {error}", str(error)
                )
                self._dial_again()

    def handshaken(self) -> None:
        """Send the hello of this client."""
        self._dialer.reached()
        attempt = self._current()
        attempt.socket.send(attempt.connection.hello(os.getpid(), self._receiver))

    def unreachable(self) -> None:
        """Try the next address, unless the socket file belongs to another user, or cannot exist."""
        try:
            if self.address.path is not None:
                check_file(self.address.path)
        except (AccessDeniedError, UsageError) as error:
            self._refuse(error)
            return
        self._dialer.unreachable()
        self._dial_again()

    def refused(self, *, is_final: bool, error: int) -> None:
        """Give up if the server does not accept this client's keys."""
        if is_final or (self._dialer.refused(error) and zmq.CURVE_SECRETKEY in self._options):
            self._refuse(
                AccessDeniedError(
                    f"the keys of this client and of the server at {self.address.text} do not match: pass "
                    "secret_key and server_key, and add this client's public key to the client_keys of the "
                    "server"
                )
            )

    def disconnected(self, descriptor: int) -> None:
        """Handle the end of the connection, after the messages that arrived before it."""
        attempt = self._current()
        attempt.socket.read_last()
        if self._attempt is not attempt:
            return
        if attempt.connection.has_sent_hello:
            self._lose(attempt.connection.disconnected())
        else:
            self._dial_again()

    def writable(self) -> None:
        """Send messages that the socket did not accept before."""
        if self.session is not None:
            self.session.flush()
        self._notify()

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Handle a message of the server."""
        attempt = self._current()
        connection = attempt.connection
        try:
            frame, following = connection.receive([part.buffer for part in parts])
        except RefusedError as error:
            self._lose(Loss(error, is_retried=False, reason=str(error)), _LINGER_S)
            return
        except ProtocolError as error:
            log_violation(error, connection.peer_pid)
            self._lose(connection.violated(error), _LINGER_S)
            return
        match frame:
            case ServerHello():
                self.session = attempt
                self.outage.end()
                self._waiters.wake()
                self._notify()
            case Close():
                self._lose(connection.closed(frame), _LINGER_S)
            case _:
                attempt.handle(frame, following)
                self._notify()

    # Ends

    def _lose(self, loss: Loss, linger_s: float = 0.0) -> None:
        """Handle the end of a connection after the handshake."""
        was_ready = self.session is not None
        unanswered = 0 if self.session is None else self.session.unanswered
        self.lost += was_ready
        is_refusal = isinstance(loss.error, RefusedError)
        self.counts["refusals" if is_refusal else "losses"] += is_refusal or was_ready
        self._end(loss.error, linger_s)
        log_loss(loss, self.address.text, unanswered)
        if loss.is_retried:
            self._failure = None
            if was_ready:
                self._connect()
            else:  # with a delay: the server may close every connection before its hello
                self._dialer.again()
        self._notify()

    def statistics(self) -> EngineStatistics:
        """Return the current messages of the client here, and their totals."""
        return snapshot(
            EngineStatistics,
            self.counts,
            address=label_of(self.address.text),
            connected=int(self.session is not None),
            in_flight=self.in_flight,
            replies=self.replies.waits(),
        )

    def _refuse(self, error: AccessDeniedError | UsageError) -> None:
        self.counts["refusals"] += 1
        log_failure(error, self.address.text)
        self._end(error)
        self._notify()

    def _close_socket(self, linger_s: float = 0.0) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.socket.close(linger_s)

    def _end(self, error: AioTensorError, linger_s: float = 0.0) -> None:
        self._close_socket(linger_s)
        self._dialer.end()
        self.refused_at = asyncio.get_running_loop().time()
        session, self.session = self.session, None
        self.outage.begin()
        self._failure = error
        if session is not None:
            session.end(error)
        self._waiters.wake()

    @property
    def failure(self) -> AioTensorError | None:
        """A new error if no server can be connected until `try_again`; None otherwise."""
        return None if self._failure is None else again(self._failure)

    def _current(self) -> ServerSession:
        if self._attempt is None:
            raise AssertionError("a socket that reports events is open")
        return self._attempt
