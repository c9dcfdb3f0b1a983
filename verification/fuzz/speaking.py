"""A rogue sender: plain sockets, on which it can send any record."""

import asyncio
import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import Protocol

from aiotensor import TensorQueue
from aiotensor.protocol.frames import VERSION, Hello, encode
from aiotensor.transports.endpoints import Endpoint
from aiotensor.transports.records import record_pair
from verification.fuzz.steps import RIGHT, STAND_IN, Conversation, Step
from verification.fuzz.things import Things

__all__ = ["Road", "converse", "heard", "road_to", "say"]

# The errors of a socket that was cut off, or of a record that cannot be sent.
_UNHEARD = (errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.EMSGSIZE)


class Road(Protocol):
    """A connection to a receiver."""

    async def connect(self) -> None:
        """Connect, and end an earlier connection."""

    async def say(self, step: Step, sender: bytes) -> bool:
        """Send a record; return False if the connection has ended."""

    async def answered(self) -> None:
        """Wait for the first reply, or for the end of the connection."""

    def leave(self) -> None:
        """End the connection without a closing frame."""


async def say(sock: socket.socket, record: bytes, descriptors: Sequence[int] = ()) -> bool:
    """Write one record, waiting until the socket is writable; return False if the connection has ended."""
    while True:
        try:
            socket.send_fds(sock, [record], list(descriptors), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            await _has_room(sock)
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # too many descriptors wait to be read
                await asyncio.sleep(0)
            elif error.errno in (errno.EINVAL, errno.E2BIG):
                return True  # more descriptors than a record can have
            elif error.errno in _UNHEARD:
                return error.errno == errno.EMSGSIZE
            else:
                raise
        else:
            return True


async def _has_room(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    has_room = loop.create_future()
    loop.add_writer(sock.fileno(), _wake, has_room)
    try:
        await has_room
    finally:
        loop.remove_writer(sock.fileno())


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


class OnSocket:
    """A separate connection to a receiver at an address."""

    def __init__(self, address: str, things: Things) -> None:
        self._path = address.removeprefix("unix://")
        self._things = things
        self._sock: socket.socket | None = None

    async def connect(self) -> None:
        self.leave()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        self._sock = sock
        while True:
            try:
                sock.connect(self._path)
            except BlockingIOError:  # too many others connect right now
                await asyncio.sleep(0)
            else:
                return

    async def say(self, step: Step, sender: bytes) -> bool:
        sock = self._sock
        if sock is None:
            raise RuntimeError("nothing is said before connecting")
        beside = self._things.descriptors(step.descriptors, sock.fileno())
        return await say(sock, step.data.replace(STAND_IN.encode(), sender), beside)

    async def answered(self) -> None:
        if self._sock is not None:
            await asyncio.get_running_loop().sock_recv(self._sock, 1)

    def leave(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


class OnQueue:
    """The pipe of a queue, which honest senders also use."""

    def __init__(self, queue: TensorQueue, things: Things) -> None:
        self._queue = queue._duplicate_writer()
        self._things = things
        self._pipe: socket.socket | None = None
        self._is_new = False

    async def connect(self) -> None:
        self.leave()
        self._is_new = True

    async def say(self, step: Step, sender: bytes) -> bool:
        record = step.data.replace(STAND_IN.encode(), sender)
        beside = self._things.descriptors(step.descriptors, self._queue.fileno())
        is_new, self._is_new = self._is_new, False
        envelope = step.envelope
        if envelope == RIGHT:
            envelope = "hello" if is_new else "frame"
        match envelope:
            case "hello":
                self.leave()
                self._pipe, far = record_pair()
                with far:
                    return await say(self._queue, b"H" + sender + record, [far.fileno(), *beside])
            case "hello without a pipe":
                return await say(self._queue, b"H" + sender + record, beside)
            case "none":
                return await say(self._queue, record, beside)
            case "stranger":
                return await say(self._queue, b"F" + b"\xff" * 32 + record, beside)
            case "unknown kind":
                return await say(self._queue, b"X" + sender + record, beside)
            case "frame":
                return await say(self._queue, b"F" + sender + record, beside)
        thing = self._things.descriptor(envelope.removeprefix("hello with a "))
        return await say(self._queue, b"H" + sender + record, [thing, *beside])

    async def answered(self) -> None:
        if self._pipe is not None:
            await asyncio.get_running_loop().sock_recv(self._pipe, 1)

    def leave(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def close(self) -> None:
        self.leave()
        self._queue.close()


@contextlib.contextmanager
def road_to(endpoint: Endpoint, things: Things) -> Iterator[Road]:
    """Return an object that connects to a receiver."""
    if isinstance(endpoint, TensorQueue):
        on_queue = OnQueue(endpoint, things)
        try:
            yield on_queue
        finally:
            on_queue.close()
        return
    on_socket = OnSocket(endpoint, things)
    try:
        yield on_socket
    finally:
        on_socket.leave()


async def converse(road: Road, conversation: Conversation) -> bool:
    """Send a whole conversation under a new name; return False if the receiver cut it off."""
    sender = secrets.token_hex(16).encode()
    is_heard = False
    for index, step in enumerate(conversation.steps):
        if step.connects or index == 0:
            await road.connect()
        elif not is_heard:
            continue
        is_heard = await road.say(step, sender)
    road.leave()
    return is_heard


async def heard(endpoint: Endpoint, things: Things) -> None:
    """Wait until a receiver has read every earlier record."""
    hello = encode(Hello(VERSION, os.getpid(), STAND_IN, 1, 0))
    with road_to(endpoint, things) as road:
        await road.connect()
        await road.say(Step(hello.hex()), secrets.token_hex(16).encode())
        await road.answered()
