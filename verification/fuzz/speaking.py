"""A rogue sender: plain sockets, on which it can send any record."""

import asyncio
import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import Protocol

from aiotensor.protocol.frames import MAX_RECORD_BYTES, VERSION, Hello, encode
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.roads import Connections
from verification.fuzz.speaking_tcp import OnTcp
from verification.fuzz.steps import STAND_IN, Conversation, Step
from verification.fuzz.things import Things

__all__ = ["Road", "converse", "heard", "road_to", "say"]

# The errors of a socket that was cut off, or of a record that cannot be sent.
_UNHEARD = (errno.EPIPE, errno.ECONNRESET, errno.ECONNREFUSED, errno.EMSGSIZE)


class Road(Protocol):
    """A connection to a receiver."""

    async def connect(self, opening: str | None = None) -> None:
        """Connect, and end an earlier connection; the opening is that of the first step."""

    async def say(self, step: Step, sender: bytes) -> bool:
        """Send a record; return False if the connection has ended."""

    async def answered(self) -> None:
        """Wait for the first reply, or for the end of the connection."""

    async def read(self, within_s: float) -> bytes:
        """Return the next record of the other side; nothing if none comes soon, or the connection ended."""

    async def say_beside(self, step: Step, sender: bytes) -> None:
        """Send a record on a further connection, which stays open, and wait for the reply to it."""


async def say(sock: socket.socket, record: bytes, descriptors: Sequence[int] = ()) -> bool:
    """Write one record, waiting until the socket is writable; return False if the connection has ended."""
    while True:
        try:
            socket.send_fds(sock, [record], list(descriptors), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            await _has_room(sock.fileno())
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


async def _has_room(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    has_room = loop.create_future()
    loop.add_writer(descriptor, _wake, has_room)
    try:
        await has_room
    finally:
        loop.remove_writer(descriptor)


def _wake(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)


async def _first_byte(sock: socket.socket) -> None:
    """Wait for the first reply on a connection, or for its end."""
    with contextlib.suppress(ConnectionResetError):
        await asyncio.get_running_loop().sock_recv(sock, 1)


async def _record(sock: socket.socket | None, within_s: float) -> bytes:
    """Return the next record; nothing if none comes soon, or the connection ended."""
    if sock is not None:
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            async with asyncio.timeout(within_s):
                return await asyncio.get_running_loop().sock_recv(sock, MAX_RECORD_BYTES)
    return b""


class OnSocket:
    """Separate connections to a receiver at an address."""

    def __init__(self, address: str, things: Things) -> None:
        self._path = address.removeprefix("unix://")
        self._things = things
        self._open = Connections[socket.socket]()

    async def connect(self, opening: str | None = None) -> None:
        self._open.leave()
        self._open.current = await self._connected()

    async def _connected(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        while True:
            try:
                sock.connect(self._path)
            except BlockingIOError:  # too many others connect right now
                await asyncio.sleep(0)
            else:
                return sock

    async def say(self, step: Step, sender: bytes) -> bool:
        sock = self._open.current
        if sock is None:
            raise RuntimeError("nothing is said before connecting")
        if step.carried is not None:
            return True
        beside = self._things.descriptors(step.descriptors, sock.fileno())
        return await say(sock, step.data.replace(STAND_IN.encode(), sender), beside)

    async def answered(self) -> None:
        if self._open.current is not None:
            await _first_byte(self._open.current)

    async def read(self, within_s: float) -> bytes:
        return await _record(self._open.current, within_s)

    async def say_beside(self, step: Step, sender: bytes) -> None:
        sock = await self._connected()
        self._open.beside.append(sock)
        if await say(sock, step.data):
            await _first_byte(sock)

    def close(self) -> None:
        self._open.close()


@contextlib.contextmanager
def road_to(endpoint: Endpoint, things: Things) -> Iterator[Road]:
    """Return an object that connects to a receiver."""
    address = str(endpoint)
    road = OnTcp(address) if address.startswith("tcp://") else OnSocket(address, things)
    with contextlib.closing(road):
        yield road


async def converse(road: Road, conversation: Conversation) -> bool:
    """Send a whole conversation under a new name; return False if the receiver cut it off."""
    sender = secrets.token_hex(16).encode()
    is_connected = is_heard = False
    for step in conversation.steps:
        if step.beside:
            await road.say_beside(step, secrets.token_hex(16).encode())
            continue
        if step.connects or not is_connected:
            await road.connect(step.opening)
            is_connected = True
        elif not is_heard:
            continue
        is_heard = await road.say(step, sender)
    return is_heard


async def heard(endpoint: Endpoint, things: Things) -> None:
    """Wait until a receiver has read every earlier record."""
    hello = encode(Hello(VERSION, os.getpid(), STAND_IN, 1, 0))
    with road_to(endpoint, things) as road:
        await road.connect()
        await road.say(Step(hello.hex()), secrets.token_hex(16).encode())
        await road.answered()
