"""The connection of a client to one address, and to each server that listens there in turn.

    DIALING --handshake, hello, hello--> READY --lost--> DIALING

While the connection is not ready, new requests wait for the next server. When a server is lost, its open
requests fail with `PeerLostError`.

`dialing.py` decides where to connect and when. Each attempt has a new socket, and no socket is connected
twice: closing a socket discards its unsent messages, so no cancelled message reaches the next server.
"""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import zmq

from aiotensor.channel.context import Context
from aiotensor.channel.dialing import DIALING_OPTIONS, Dialer
from aiotensor.channel.options import Address, Target
from aiotensor.channel.outbox import Parts
from aiotensor.channel.parcels import Answered, Asked, Handles
from aiotensor.channel.pipeline import Pipeline
from aiotensor.channel.sockets import MAX_PARTS, LoopSocket
from aiotensor.errors import (
    AccessDeniedError,
    AioTensorError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    WouldBlockError,
    again,
)
from aiotensor.protocol.exchange import (
    VERSION,
    Answer,
    ClientHello,
    Failure,
    Farewell,
    PartLimits,
    ServerHello,
    Taken,
    read_from_server,
    write,
)
from aiotensor.protocol.versions import mismatch
from aiotensor.runtime.descriptors import copy_of
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters, at_most
from aiotensor.transports.users import check_owner, check_user
from aiotensor.types import Usage

__all__ = ["Connection"]

logger = logger_of("channel")

_LAST_MESSAGES = 1024  # the most messages that are read before a disconnected server counts as lost
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class ServersEvents(Protocol):
    """The callbacks of the object that chooses among several servers."""

    def changed(self) -> None:
        """Handle a server that was connected or lost, or that may take a message again."""

    def reported(self, connection: "Connection", others: int) -> None:
        """Record the load of a server: the messages of other clients there."""


class Connection:
    """Send messages to one server; belongs to the running loop.

    Args:
        context: the context of its sockets.
        address: the address of the server.
        options: the options of its sockets.
        receiver: the id of the receiver that takes the tensors of answers; "" for none.
        limits: the largest part, and the largest body, of an answer.
        max_wait_s: seconds after which a wait for the server, or for credit, fails; None for no limit.
        drop: called with an answer whose request was cancelled.
    """

    def __init__(
        self,
        context: Context,
        address: Address,
        options: Mapping[int, int | bytes],
        receiver: str,
        limits: PartLimits,
        max_wait_s: float | None,
        drop: Callable[[Answered], None],
    ) -> None:
        self.is_ready = False
        self.leaving = 0  # messages that are being sent
        self.in_flight = 0  # messages that are being sent, or wait for an answer; counted by the client
        self.session = 0  # counts the servers that were lost
        self.leads_to = ""  # the id of the server's receiver
        self._context = context
        self._address = address
        self._options = {**options, **DIALING_OPTIONS}
        self.pipeline = Pipeline(self._send, self._patience, drop, limits)
        self._hello = write(ClientHello(VERSION, os.getpid(), receiver, *limits))
        self._max_wait_s = max_wait_s
        self._servers: ServersEvents | None = None
        self._pid: int | None = None
        self._waiters = Waiters()
        self._dialer = Dialer(address, self._dial)
        self._is_introduced = False
        self.refused_at = 0.0
        self._failure: AioTensorError | None = None  # why there is no socket and no attempt
        self._socket: LoopSocket | None = None

    def connect(self, servers: "ServersEvents | None") -> None:
        """Begin to connect, and keep trying until a server is reached or `ready` raises.

        Args:
            servers: the object that chooses among several servers; None for a single one.
        """
        self._servers = servers
        self._connect()

    def _connect(self) -> None:
        self._failure = None
        self._dialer.begin()

    def _changed(self) -> None:
        if self._servers is not None:
            self._servers.changed()

    def _dial(self, target: Target) -> None:
        """Try one address; try again later if this process has no descriptors or memory."""
        try:
            self._socket = LoopSocket(self._context, zmq.DEALER, {**self._options, **target.options}, self)
            self._socket.connect(target.address)
        except zmq.ZMQError as error:
            text = f"nobody can connect to {self._address.text}: {error.strerror}"
            if error.errno in _EXHAUSTED:
                self._dialer.report(text, error.strerror)
                self._dial_again()
            else:
                self._end(PeerLostError(text))
                self._changed()

    def _dial_again(self) -> None:
        """Give up an attempt, and have the dialer make the next one."""
        self._hang_up()
        self._dialer.again()

    def close(self, error: AioTensorError, linger_s: float = 0.0) -> None:
        """Close, and fail waiting requests. Sent messages get `linger_s` seconds to leave."""
        self._dialer.close()
        self._end(error, linger_s)

    # Sending

    async def ready(self) -> None:
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
            async with self._patience():
                while not self.is_ready:
                    if self.failure is not None:
                        raise self.failure
                    await self._waiters.wait()
        except WouldBlockError:
            if not self.is_ready:  # a server may have connected in this iteration of the loop
                raise

    def _patience(self) -> AbstractAsyncContextManager[None]:
        return at_most(self._max_wait_s, self._overdue)

    def _overdue(self) -> WouldBlockError:
        why = "has had no room for this message" if self.is_ready else "has not been there"
        more = f"; {self._dialer.reason}" if self._dialer.reason and not self.is_ready else ""
        return WouldBlockError(
            f"the server at {self._address.text} {why} for {self._max_wait_s:g} s{more}",
            messages=Usage(None, self.in_flight, 1),
        )

    @property
    def is_hopeless(self) -> bool:
        """Return whether no attempt to connect is pending, until `try_again`."""
        return self._socket is None and not self._dialer.is_active

    def try_again(self, at_most_every_s: float = 0.0) -> None:
        """Connect again after a permanent failure, at most once per interval."""
        may_have_changed = isinstance(self._failure, PeerLostError | RefusedError | AccessDeniedError)
        can_try = self._socket is None and may_have_changed
        if can_try and asyncio.get_running_loop().time() >= self.refused_at + at_most_every_s:
            self._connect()

    async def ask(
        self, session: int, handles: Handles, parts: Parts, *, wants_answer: bool, may_move: bool
    ) -> Asked | None:
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
            if may_move and (session != self.session or not self.is_ready):
                return None
            # Its tensors were sent to a lost server, so the message does not wait for the next one.
            if handles and session != self.session:
                raise PeerLostError(
                    f"the server at {self._address.text} was replaced while the tensors of a message were on "
                    "their way to it"
                )
            if not self.is_ready:
                await self.ready()
                continue
            asked = await self.pipeline.ask(handles, parts, wants_answer=wants_answer)
            if asked is not None or may_move:
                return asked

    def _send(self, parts: Parts, is_retry: bool) -> bool:
        return self.is_ready and self._open_socket().send(parts, is_retry=is_retry)

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
        self._is_introduced = True
        self._open_socket().send([self._hello])

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
        sock = self._open_socket()
        sock.read_some(_LAST_MESSAGES)
        if self._socket is not sock:
            return
        if self._is_introduced:
            self._lose("it ended, or the connection broke", retry=True)
        else:
            self._dial_again()

    def has_room(self) -> None:
        """Send messages that the socket did not accept before."""
        self.pipeline.has_room()
        self._changed()

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Handle a message of the server."""
        try:
            if len(parts) > MAX_PARTS:
                raise ProtocolError(f"it sent a message of more than {MAX_PARTS} parts")
            header = read_from_server(parts[0].buffer)
            match header:
                case Answer() | Failure() | Taken():
                    self.pipeline.heard(header, parts[1:])
                    if self._servers is not None:
                        self._servers.reported(self, header.others)
                case ServerHello():
                    self._welcome(header)
                case Farewell(""):
                    self._lose("it closed", retry=True)
                case Farewell(reason, is_refusal=True):
                    self._lose(reason, retry=False, is_refusal=True)
                case Farewell(reason):
                    self._lose(f"it refused this client: {reason}", retry=False)
        except ProtocolError as error:
            logger.error(
                "the server (pid %s) broke the protocol: %s",
                self._pid,
                error,
                extra={"event": "protocol_broken", "count": 1, "peer_pid": self._pid, "reason": str(error)},
            )
            self._lose(f"it broke the protocol: {error}", ProtocolError(*error.args), retry=False)

    def _welcome(self, hello: ServerHello) -> None:
        if self.is_ready:
            raise ProtocolError("it introduced itself twice")
        self._pid, self.leads_to = hello.pid, hello.receiver
        if hello.version != VERSION:
            self._lose(mismatch(hello.version, VERSION), retry=False, is_refusal=True)
            return
        self.is_ready = True
        self.pipeline.begin(hello)
        self._waiters.wake()
        if self._servers is not None:
            self._servers.reported(self, 0)

    # Ends

    def _lose(
        self, reason: str, cause: ProtocolError | None = None, *, retry: bool, is_refusal: bool = False
    ) -> None:
        pid = "" if self._pid is None else f" (pid {self._pid})"
        kind: type[PeerLostError | RefusedError] = RefusedError if is_refusal else PeerLostError
        what = "refused this client" if is_refusal else "is gone"
        error = kind(f"the server{pid} at {self._address.text} {what}: {reason}", pid=self._pid)
        error.__cause__ = cause
        lost = self.pipeline.unanswered
        was_ready = self.is_ready
        self.session += was_ready
        self._end(error)
        logger.log(
            logging.WARNING if lost or is_refusal else logging.INFO,
            "%s; %s messages get no answer",
            error,
            lost,
            extra={
                "event": "server_lost",
                "address": self._address.text,
                "peer_pid": error.pid,
                "reason": reason,
                "messages_lost": lost,
            },
        )
        if retry:
            self._failure = None
            if was_ready:
                self._connect()
            else:  # with a delay: the server may close every connection before its hello
                self._dialer.again()
        self._changed()

    def _refuse(self, error: AccessDeniedError) -> None:
        logger.error(
            "%s",
            error,
            extra={"event": "server_refused", "address": self._address.text, "reason": str(error)},
        )
        self._end(error)
        self._changed()

    def _hang_up(self, linger_s: float = 0.0) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close(linger_s)

    def _end(self, error: AioTensorError, linger_s: float = 0.0) -> None:
        self._hang_up(linger_s)
        self._dialer.end()
        self.refused_at = asyncio.get_running_loop().time()
        self.is_ready = self._is_introduced = False
        self._failure = error
        self._pid = None
        self.pipeline.end(error)
        self._waiters.wake()

    @property
    def failure(self) -> AioTensorError | None:
        """Return a new error if the connection stays without a server until `try_again`."""
        return None if self._failure is None else again(self._failure)

    def _open_socket(self) -> LoopSocket:
        if self._socket is None:
            raise AssertionError("a ready connection has a socket")
        return self._socket
