"""A server at one address, as its client sees it: the connection to it, and to its successors there.

    DIALING --handshake, hello, hello--> READY --lost--> DIALING

While there is no connection, new requests wait for the next server. When a server is lost, its open requests
fail with `PeerLostError`.

`dialing.py` decides where to connect and when. Each attempt has a new socket, and no socket is connected
twice: closing a socket discards its unsent messages, so no cancelled message reaches the next server. Each
connection has a new `ClientConnection`, and a `ServerSession` once the server has accepted this client.
"""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

import zmq

from aiotensor.channel.context import ZmqContext
from aiotensor.channel.dialing import DIALING_OPTIONS, Dialer
from aiotensor.channel.options import Address, Target
from aiotensor.channel.payloads import Handles, ReceivedAnswer
from aiotensor.channel.session import SentRequest, ServerSession
from aiotensor.channel.sockets import LoopSocket
from aiotensor.errors import (
    AccessDeniedError,
    AioTensorError,
    ClosedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    WouldBlockError,
    again,
)
from aiotensor.protocol.client import ClientConnection
from aiotensor.protocol.connection import Close, Loss
from aiotensor.protocol.exchange import ServerHello
from aiotensor.protocol.parts import PartLimits, Parts
from aiotensor.runtime.descriptors import copy_of
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters, at_most
from aiotensor.transports.users import check_owner, check_user
from aiotensor.types import Usage

__all__ = ["RemoteServer"]

logger = logger_of("channel")

_LAST_MESSAGES = 1024  # the most messages that are read before a disconnected server counts as lost
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class BalancerEvents(Protocol):
    """The callbacks of the object that chooses among several servers."""

    def changed(self) -> None:
        """Handle a server that was connected or lost, or that may take a message again."""

    def reported(self, server: "RemoteServer", others: int) -> None:
        """Record the load of a server: the messages of other clients there."""


class _Attempt(NamedTuple):
    """An attempt to connect, and the connection that it leads to."""

    sock: LoopSocket
    connection: ClientConnection


class RemoteServer:
    """Send messages to the server at one address; belongs to the running loop.

    Args:
        context: the context of its sockets.
        address: the address of the server.
        options: the options of its sockets.
        receiver: the id of the receiver that takes the tensors of answers; "" for none.
        limits: the largest part, and the largest body, of an answer.
        max_wait_s: seconds after which a wait for the server, or for credit, fails; None for no limit.
        drop: called with an answer whose request was cancelled.

    Attributes:
        session: the connection to a server that has accepted this client; None while there is none.
        in_flight: the number of messages that are being sent, or wait for an answer; counted by the client.
        being_sent: the number of messages that are being sent; counted by the client.
        lost: the number of servers that were lost.
        refused_at: the time at which the last attempt to connect failed.
    """

    def __init__(
        self,
        context: ZmqContext,
        address: Address,
        options: Mapping[int, int | bytes],
        receiver: str,
        limits: PartLimits,
        max_wait_s: float | None,
        drop: Callable[[ReceivedAnswer], None],
    ) -> None:
        self.session: ServerSession | None = None
        self.in_flight = self.being_sent = self.lost = 0
        self.refused_at = 0.0
        self._context = context
        self._address = address
        self._options = {**options, **DIALING_OPTIONS}
        self._receiver = receiver
        self._limits = limits
        self._max_wait_s = max_wait_s
        self._drop = drop
        self._balancer: BalancerEvents | None = None
        self._waiters = Waiters()
        self._dialer = Dialer(address, self._dial)
        self._failure: AioTensorError | None = None  # why there is no attempt
        self._attempt: _Attempt | None = None

    def connect(self, balancer: BalancerEvents | None) -> None:
        """Begin to connect, and keep trying until a server is reached or `ready` raises.

        Args:
            balancer: the object that chooses among several servers; None for a single one.
        """
        self._balancer = balancer
        self._connect()

    def _connect(self) -> None:
        self._failure = None
        self._dialer.begin()

    def _changed(self) -> None:
        if self._balancer is not None:
            self._balancer.changed()

    def _dial(self, target: Target) -> None:
        """Try one address; try again later if this process has no descriptors or memory."""
        try:
            sock = LoopSocket(self._context, zmq.DEALER, {**self._options, **target.options}, self)
            self._attempt = _Attempt(sock, ClientConnection(self._limits, self._address.text))
            sock.connect(target.address)
        except zmq.ZMQError as error:
            text = f"this client cannot connect to {self._address.text}: {error.strerror}"
            if error.errno in _EXHAUSTED:
                self._dialer.report(text, error.strerror)
                self._dial_again()
            else:
                self._end(PeerLostError(text))
                self._changed()

    def _dial_again(self) -> None:
        """End an attempt, and have the dialer make the next one."""
        self._close_socket()
        self._dialer.again()

    def close(self, error: AioTensorError, linger_s: float = 0.0) -> None:
        """Close, and fail waiting requests. Sent messages get `linger_s` seconds to leave."""
        self._dialer.close()
        self._end(error, linger_s)

    # Sending

    async def ready(self) -> ServerSession:
        """Wait until a server is connected; tries to connect again after an error of an earlier call.

        Raises:
            RefusedError: the server refused this client, because of a limit or of its version.
            PeerLostError: ZeroMQ cannot connect there, or one side closed the connection because of an error.
            AccessDeniedError: the server belongs to another user, or does not accept the key.
            WouldBlockError: no server was connected within `max_wait_s`.
            ClosedError: this client was closed.
        """
        self.try_again()
        try:
            async with self._wait_limit():
                while self.session is None:
                    if self.failure is not None:
                        raise self.failure
                    await self._waiters.wait()
        except WouldBlockError:
            if self.session is None:  # a server may have connected in this iteration of the loop
                raise
        return self.session

    def _wait_limit(self) -> AbstractAsyncContextManager[None]:
        return at_most(self._max_wait_s, self._timed_out)

    def _timed_out(self) -> WouldBlockError:
        is_ready = self.session is not None
        why = "has had no capacity for this message" if is_ready else "was not reached"
        more = f"; {self._dialer.reason}" if self._dialer.reason and not is_ready else ""
        return WouldBlockError(
            f"the server at {self._address.text} {why} for {self._max_wait_s:g} s{more}",
            messages=Usage(None, self.in_flight, 1),
        )

    @property
    def is_hopeless(self) -> bool:
        """Return whether no attempt to connect is pending, until `try_again`."""
        return self._attempt is None and not self._dialer.is_active

    def try_again(self, at_most_every_s: float = 0.0) -> None:
        """Connect again after a permanent failure, at most once per interval."""
        may_have_changed = isinstance(self._failure, PeerLostError | RefusedError | AccessDeniedError)
        can_try = self._attempt is None and may_have_changed
        if can_try and asyncio.get_running_loop().time() >= self.refused_at + at_most_every_s:
            self._connect()

    async def ask(
        self, session: ServerSession, handles: Handles, parts: Parts, *, wants_answer: bool, may_move: bool
    ) -> SentRequest | None:
        """Wait for credit, and send a message, in the order of the calls.

        Cancelling removes an unsent message, and notifies the server of a sent one.

        Args:
            session: the value of `session` before its tensors were sent.
            handles: the handles of its tensors.
            parts: its body, and the buffers beside it.
            wants_answer: whether it expects an answer.
            may_move: whether to return None if this server was lost, since another one may have the message.

        Raises:
            PeerLostError: the server was lost after the first tensor was sent.
            WouldBlockError: the message could not be sent within `max_wait_s`.
            TooLargeError: the server does not accept a body or a part of this size.
        """
        while True:
            if session is self.session:
                request = await session.ask(handles, parts, wants_answer=wants_answer)
                if request is not None or may_move:
                    return request
            if may_move:
                return None
            if isinstance(self._failure, ClosedError):
                raise again(self._failure)
            # Its tensors were sent to a lost server, so the message does not wait for the next one.
            if handles:
                raise PeerLostError(
                    f"the server at {self._address.text} was replaced while the tensors of a message were on "
                    "their way to it"
                )
            session = await self.ready()

    # Events of the socket

    def connected(self, descriptor: int) -> None:
        """Check the user of the peer before sending anything."""
        self._dialer.connected(descriptor)
        if self._address.path is None:
            return
        try:
            with copy_of(descriptor) as peer:
                if peer.family == socket.AF_UNIX:  # the connection may have ended, and its number be reused
                    check_user(peer)
        except AccessDeniedError as error:
            self._refuse(error)
        except OSError as error:
            if error.errno in _EXHAUSTED:  # the user is unknown, so nothing may be sent
                self._dialer.report(
                    f"the user of the server at {self._address.text} cannot be checked: {error}", str(error)
                )
                self._dial_again()

    def handshaken(self) -> None:
        """Send the hello of this client."""
        self._dialer.reached()
        sock, connection = self._current()
        sock.send(connection.hello(os.getpid(), self._receiver))

    def unreachable(self) -> None:
        """Try the next address, unless the socket file belongs to another user."""
        try:
            if self._address.path is not None:
                check_owner(self._address.path)
        except AccessDeniedError as error:
            self._refuse(error)
            return
        self._dialer.unreachable()
        self._dial_again()

    def refused(self, *, is_final: bool, error: int) -> None:
        """Give up if the server does not accept this client's keys."""
        if is_final or (self._dialer.refused(error) and zmq.CURVE_SECRETKEY in self._options):
            self._refuse(
                AccessDeniedError(
                    f"the server at {self._address.text} and this client do not agree on their keys: give "
                    "secret_key and server_key, and have the server list this client's public key"
                )
            )

    def disconnected(self, descriptor: int) -> None:
        """Handle the end of the connection, after the messages that arrived before."""
        attempt = self._current()
        attempt.sock.read_some(_LAST_MESSAGES)
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
        self._changed()

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Handle a message of the server."""
        sock, connection = self._current()
        try:
            frame, following = connection.receive([part.buffer for part in parts])
        except RefusedError as error:
            self._lose(Loss(error, is_retried=False, reason=str(error)))
            return
        except ProtocolError as error:
            self._log_violation(connection.peer_pid, str(error))
            self._lose(connection.violated(error))
            return
        match frame:
            case ServerHello():
                self.session = ServerSession(sock, connection, self._wait_limit, self._drop)
                self._waiters.wake()
                if self._balancer is not None:
                    self._balancer.reported(self, 0)
            case Close():
                self._lose(connection.closed(frame))
            case _ if self.session is not None:
                self.session.handle(frame, following)
                if self._balancer is not None:
                    self._balancer.reported(self, frame.others)

    # Ends

    def _lose(self, loss: Loss) -> None:
        """Handle the end of a connection after the handshake."""
        was_ready = self.session is not None
        lost = 0 if self.session is None else self.session.unanswered
        self.lost += was_ready
        self._end(loss.error)
        logger.log(
            logging.WARNING if lost or isinstance(loss.error, RefusedError) else logging.INFO,
            "%s; %s messages get no answer",
            loss.error,
            lost,
            extra={
                "event": "server_lost",
                "address": self._address.text,
                "peer_pid": loss.error.pid,
                "reason": loss.reason,
                "messages_lost": lost,
            },
        )
        if loss.is_retried:
            self._failure = None
            if was_ready:
                self._connect()
            else:  # with a delay: the server may close every connection before its hello
                self._dialer.again()
        self._changed()

    def _log_violation(self, pid: int | None, reason: str) -> None:
        logger.error(
            "the server (pid %s) broke the protocol: %s",
            pid,
            reason,
            extra={"event": "protocol_broken", "count": 1, "peer_pid": pid, "reason": reason},
        )

    def _refuse(self, error: AccessDeniedError) -> None:
        logger.error(
            "%s",
            error,
            extra={"event": "server_refused", "address": self._address.text, "reason": str(error)},
        )
        self._end(error)
        self._changed()

    def _close_socket(self, linger_s: float = 0.0) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.sock.close(linger_s)

    def _end(self, error: AioTensorError, linger_s: float = 0.0) -> None:
        self._close_socket(linger_s)
        self._dialer.end()
        self.refused_at = asyncio.get_running_loop().time()
        session, self.session = self.session, None
        self._failure = error
        if session is not None:
            session.end(error)
        self._waiters.wake()

    @property
    def failure(self) -> AioTensorError | None:
        """Return a new error if the connection stays without a server until `try_again`."""
        return None if self._failure is None else again(self._failure)

    def _current(self) -> _Attempt:
        if self._attempt is None:
            raise AssertionError("a socket that reports events is open")
        return self._attempt
