"""A rogue sender: plain sockets, on which it can send any record."""

import asyncio
import contextlib
import errno
import os
import secrets
import select
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from typing import Protocol

from aiotensor import TensorQueue
from aiotensor.protocol.frames import MAX_RECORD_BYTES, VERSION, Hello, encode
from aiotensor.transports.endpoints import Endpoint
from aiotensor.transports.records import record_pair
from aiotensor.transports.stock.ends import address_of, new_socket
from aiotensor.transports.stock.pipe import (
    CONNECTION_BYTES,
    MAX_DATA_BYTES,
    Kind,
    StockQueue,
    encode_chunk,
    open_writer,
)
from verification.fuzz.roads import Connections
from verification.fuzz.speaking_tcp import OnTcp
from verification.fuzz.steps import RIGHT, STAND_IN, Conversation, Step
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


class OnQueue:
    """The pipe of a queue, which honest senders also use."""

    def __init__(self, queue: TensorQueue, things: Things) -> None:
        self._queue = queue.open_writer()
        self._things = things
        self._open = Connections[socket.socket]()
        self._is_new = False

    async def connect(self, opening: str | None = None) -> None:
        self._open.leave()
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
                self._open.leave()
                self._open.current, far = record_pair()
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
        if self._open.current is not None:
            await _first_byte(self._open.current)

    async def read(self, within_s: float) -> bytes:
        return await _record(self._open.current, within_s)

    async def say_beside(self, step: Step, sender: bytes) -> None:
        pipe, far = record_pair()
        self._open.beside.append(pipe)
        with far:
            is_said = await say(self._queue, b"H" + sender + step.data, [far.fileno()])
        if is_said:
            await _first_byte(pipe)

    def close(self) -> None:
        self._open.close()
        self._queue.close()


class _StockConnection:
    """A connection over a stock queue.

    Args:
        write: writes bytes to the queue.
        sock: the socket to the other side; None if there is none.
        name: identifies the connection.
    """

    def __init__(
        self, write: Callable[[bytes], Awaitable[None]], sock: socket.socket | None, name: bytes
    ) -> None:
        self.sock = sock
        self._write = write
        self._name = name
        self._number = 0

    async def say(self, record: bytes, descriptors: Sequence[int] = (), kind: bytes = Kind.LAST) -> bool:
        """Send a record; return False if the connection has ended."""
        is_heard = True
        if descriptors and self.sock is not None:
            is_heard = await say(self.sock, b"D", descriptors)
            kind = Kind.CARRIER
        for start in range(0, len(record) or 1, MAX_DATA_BYTES):
            part = record[start : start + MAX_DATA_BYTES]
            is_last = start + MAX_DATA_BYTES >= len(record)
            chunk = encode_chunk(kind if is_last else Kind.PART, self._name, self._number, part)
            await self._write(chunk)
            self._number += 1
        return is_heard

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()


class OnStockQueue:
    """The pipe of a stock queue, which honest senders also use."""

    def __init__(self, queue: StockQueue, things: Things) -> None:
        self._queue = open_writer(queue)
        self._things = things
        self._open: Connections[_StockConnection] = Connections()
        self._is_new = False

    async def connect(self, opening: str | None = None) -> None:
        self._open.leave()
        self._is_new = True

    async def _connected(self) -> _StockConnection:
        name = secrets.token_bytes(CONNECTION_BYTES)
        with new_socket() as door:
            door.bind(address_of(name))
            door.listen()
            await self._write(encode_chunk(Kind.CONNECT, name, 0, b""))
            sock, _ = await asyncio.get_running_loop().sock_accept(door)
        return _StockConnection(self._write, sock, name)

    async def _write(self, chunk: bytes) -> None:
        while True:
            try:
                os.write(self._queue.number, chunk)
            except BlockingIOError:
                await _has_room(self._queue.number)
            else:
                return

    async def say(self, step: Step, sender: bytes) -> bool:
        record = step.data.replace(STAND_IN.encode(), sender)
        beside = self._things.descriptors(step.descriptors, self._queue.number)
        is_new, self._is_new = self._is_new, False
        envelope = step.envelope
        if envelope.startswith("hello") or is_new:
            self._open.leave()
            if envelope == "hello without a pipe":
                self._open.current = _StockConnection(
                    self._write, None, secrets.token_bytes(CONNECTION_BYTES)
                )
            else:
                self._open.current = await self._connected()
        connection = self._open.current
        if connection is None:
            raise RuntimeError("nothing is said before connecting")
        match envelope:
            case "none":  # an object of the application
                body = record[: select.PIPE_BUF - 4]
                await self._write(len(body).to_bytes(4) + body)
                return True
            case "stranger":
                return await _StockConnection(self._write, None, b"\xff" * CONNECTION_BYTES).say(record)
            case "unknown kind":
                return await connection.say(record, kind=b"X")
        if envelope.startswith("hello with a ") and connection.sock is not None:
            thing = self._things.descriptor(envelope.removeprefix("hello with a "))
            await say(connection.sock, b"D", [thing])  # which belong to no record
        return await connection.say(record, beside)

    async def answered(self) -> None:
        if self._open.current is not None and self._open.current.sock is not None:
            await _first_byte(self._open.current.sock)

    async def read(self, within_s: float) -> bytes:
        return await _record(None if self._open.current is None else self._open.current.sock, within_s)

    async def say_beside(self, step: Step, sender: bytes) -> None:
        connection = await self._connected()
        self._open.beside.append(connection)
        if await connection.say(step.data) and connection.sock is not None:
            await _first_byte(connection.sock)

    def close(self) -> None:
        self._open.close()
        self._queue.close()


@contextlib.contextmanager
def road_to(endpoint: Endpoint, things: Things) -> Iterator[Road]:
    """Return an object that connects to a receiver."""
    road: OnQueue | OnStockQueue | OnTcp | OnSocket
    if isinstance(endpoint, TensorQueue):
        road = OnQueue(endpoint, things)
    elif isinstance(endpoint, Queue):
        road = OnStockQueue(endpoint, things)
    elif endpoint.startswith("tcp://"):
        road = OnTcp(endpoint)
    else:
        road = OnSocket(endpoint, things)
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
