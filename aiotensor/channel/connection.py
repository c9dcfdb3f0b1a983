"""A client's way to one server, through all the servers that come and go at its address.

    CONNECTING --handshake, hello, hello--> READY --lost--> CONNECTING

What is asked while it is not ready waits for the next server. What was asked fails with `PeerLostError`.

Each connection is a socket of its own: when it is lost, whatever had not left goes with it, so nothing that
was given up reaches the next server. ZeroMQ waits before it connects again, so the loss is known here first.
"""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import zmq

from aiotensor.channel.options import Address
from aiotensor.channel.sockets import LoopSocket
from aiotensor.errors import (
    AccessDeniedError,
    AioTensorError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    again,
)
from aiotensor.gates import Waiters
from aiotensor.links.users import check_user
from aiotensor.protocol.exchange import (
    VERSION,
    Answer,
    Ask,
    Cancel,
    ClientHello,
    Failure,
    Farewell,
    ServerHello,
    read_from_server,
    write,
)
from aiotensor.types import TensorHandle

__all__ = ["Answered", "Asked", "Connection"]

logger = logging.getLogger("aiotensor.channel")

_HANDSHAKES = 3  # that fail without a reason before it counts: one may be that of a server just killed

Handles = tuple[TensorHandle, ...]


class Answered(NamedTuple):
    """What came back: handles of tensors that travel by a sender, the body, and the buffers beside it."""

    handles: Handles
    parts: list[memoryview]


class Asked(NamedTuple):
    """A message that was sent: its number, and the future of the answer, if there will be one."""

    number: int
    answered: "asyncio.Future[Answered] | None"


class Connection:
    """Ask one server; belongs to the running loop.

    Args:
        context: for its sockets.
        address: of the server.
        options: of its sockets.
        receiver: the id of the receiver that takes the tensors of answers; "" for none.
        drop: called with the handles of an answer that nobody waits for.
        changed: called when it became ready, or is not ready any more.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: Address,
        options: Mapping[int, int | bytes],
        receiver: str,
        drop: Callable[[Handles], None],
        changed: Callable[[], None],
    ) -> None:
        self.is_ready = False
        self.preparing = 0  # messages that are not sent yet
        self.session = 0  # counts the servers that were lost
        self.leads_to = ""  # the id of the server's receiver
        self._context = context
        self._address = address
        self._options = {**options, **address.options}
        self._receiver = receiver
        self._drop = drop
        self._changed = changed
        self._open: dict[int, asyncio.Future[Answered]] = {}
        self._next_number = 0
        self._pid: int | None = None
        self._waiters = Waiters()
        self._unsent: deque[bytes] = deque()  # cancels, for want of room
        self._failed_handshakes = 0
        self._is_introduced = False
        self._failure: AioTensorError | None = None  # why there is no socket
        self._socket: LoopSocket | None = None

    @property
    def in_flight(self) -> int:
        """Count the messages that are not answered."""
        return len(self._open) + self.preparing

    def connect(self) -> None:
        """Begin to connect."""
        self._failure = None
        self._failed_handshakes = 0
        self._socket = LoopSocket(self._context, zmq.DEALER, self._options, self)
        self._socket.connect(self._address.text)

    def close(self, error: AioTensorError, linger_s: float = 0.0) -> None:
        """Close for good, and fail what waits; what was sent has so many seconds to leave."""
        self._end(error, linger_s)

    # What is said

    async def ready(self) -> None:
        """Wait until a server is there.

        Raises:
            PeerLostError: it refused this client. The next one who asks tries again.
            AccessDeniedError: it is another user, or does not know the key.
            ClosedError: this client was closed.
        """
        if self._socket is None and isinstance(self._failure, PeerLostError | AccessDeniedError):
            self.connect()
        while not self.is_ready:
            self._raise_failure()
            await self._waiters.wait()

    @property
    def is_hopeless(self) -> bool:
        """Say whether no server will come, unless somebody asks for one."""
        return self._socket is None

    async def ask(
        self, session: int, handles: Handles, parts: Sequence[bytes | memoryview], *, wants_answer: bool
    ) -> Asked:
        """Send a message, once there is room for it.

        Args:
            session: when its tensors were sent.
            handles: of its tensors.
            parts: its body, and the buffers beside it.
            wants_answer: whether it is to be answered.

        Raises:
            PeerLostError: the server went while the tensors were on their way.
        """
        body, *buffers = parts
        while True:
            if not self.is_ready:
                await self.ready()
            if handles and session != self.session:
                raise PeerLostError(
                    f"the server at {self._address.text} was replaced while the tensors of a message were on "
                    "their way to it"
                )
            number = self._next_number
            header = write(Ask(number, memoryview(body), handles, wants_answer))
            if not self._unsent and self._open_socket().send([header, *buffers]):
                break
            await self._waiters.wait()
        self._next_number += 1
        if not wants_answer:
            return Asked(number, None)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        return Asked(number, future)

    def cancel(self, asked: Asked) -> None:
        """Say that nobody wants an answer any more, unless it has come."""
        if asked.answered is None or self._open.get(asked.number) is not asked.answered:
            return
        del self._open[asked.number]
        self._unsent.append(write(Cancel(asked.number)))
        self.has_room()

    # What is heard

    def connected(self, descriptor: int) -> None:
        """Look who is at the other end, before anything is said."""
        if self._address.path is None:
            return
        try:
            with _copy_of(descriptor) as peer:
                check_user(peer)
        except AccessDeniedError as error:
            self._refuse(error)
        except OSError:
            return  # it is gone already

    def handshaken(self) -> None:
        """Introduce this client."""
        self._failed_handshakes = 0
        self._is_introduced = True
        self._open_socket().send([write(ClientHello(VERSION, os.getpid(), self._receiver))])

    def refused(self, *, is_final: bool) -> None:
        """Give up if the other side will never have us."""
        self._failed_handshakes += 1
        if is_final or self._failed_handshakes >= _HANDSHAKES:
            self._refuse(
                AccessDeniedError(
                    f"the server at {self._address.text} and this client do not agree on their keys: give "
                    "secret_key and server_key, and have the server list this client's public key"
                )
            )

    def disconnected(self, descriptor: int) -> None:
        """Note that the server is gone; what it said before still counts."""
        self._open_socket().read_all()
        if self._is_introduced:
            self._lose("it ended, or the connection broke", retry=True)

    def has_room(self) -> None:
        """Send what there was no room for."""
        while self._unsent and self.is_ready and self._open_socket().send([self._unsent[0]]):
            self._unsent.popleft()
        if not self._unsent:
            self._waiters.wake()

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Take what the server says."""
        try:
            header = read_from_server(parts[0].buffer)
            match header:
                case Answer(number, body, handles):
                    future = self._answered(number)
                    if future is not None:
                        future.set_result(Answered(handles, [body, *[part.buffer for part in parts[1:]]]))
                    elif handles:
                        self._drop(handles)
                case Failure(number, type_name, text):
                    future = self._answered(number)
                    if future is not None:
                        future.set_exception(RemoteError(f"{type_name}: {text}", type_name=type_name))
                case ServerHello():
                    self._welcome(header)
                case Farewell(""):
                    self._lose("it closed", retry=True)
                case Farewell(reason):
                    self._lose(f"it refused this client: {reason}", retry=False)
        except ProtocolError as error:
            logger.error("the server (pid %s) broke the protocol: %s", self._pid, str(error))
            self._lose(f"it broke the protocol: {error}", ProtocolError(*error.args), retry=False)

    def _welcome(self, hello: ServerHello) -> None:
        if self.is_ready:
            raise ProtocolError("it introduced itself twice")
        self._pid, self.leads_to = hello.pid, hello.receiver
        if hello.version != VERSION:
            raise ProtocolError(f"it speaks version {hello.version}, this client speaks {VERSION}")
        self.is_ready = True
        self._waiters.wake()
        self._changed()

    def _answered(self, number: int) -> "asyncio.Future[Answered] | None":
        """Find who waits for an answer, or None if it was given up in the meantime."""
        future = self._open.pop(number, None)
        if future is None:
            if number >= self._next_number:
                raise ProtocolError(f"it answered message {number}, which was never sent")
            return None
        return None if future.done() else future

    # Ends

    def _lose(self, reason: str, cause: ProtocolError | None = None, *, retry: bool) -> None:
        who = "the server" if self._pid is None else f"the server (pid {self._pid})"
        error = PeerLostError(f"{who} at {self._address.text} is gone: {reason}", pid=self._pid)
        error.__cause__ = cause
        lost = len(self._open)
        self.session += self.is_ready
        self._end(error)
        logger.log(logging.WARNING if lost else logging.INFO, "%s; %s messages get no answer", error, lost)
        if retry:
            self.connect()
        self._changed()

    def _refuse(self, error: AccessDeniedError) -> None:
        logger.error("%s", error)
        self._end(error)
        self._changed()

    def _end(self, error: AioTensorError, linger_s: float = 0.0) -> None:
        sock, self._socket = self._socket, None
        if sock is not None:
            sock.close(linger_s)
        self.is_ready = self._is_introduced = False
        self._failure = error
        self._pid = None
        self._next_number = 0
        self._unsent.clear()
        lost, self._open = self._open, {}
        for future in lost.values():
            if not future.done():
                future.set_exception(again(error))
        self._waiters.wake()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise again(self._failure)

    def _open_socket(self) -> LoopSocket:
        if self._socket is None:
            raise AssertionError("a ready connection has a socket")
        return self._socket


def _copy_of(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
