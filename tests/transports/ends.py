"""Ends of connections that record their events, and sockets at the other end."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

from aiotensor.errors import ProtocolError
from aiotensor.protocol.frames import MAX_RECORD_BYTES
from aiotensor.transports.base import Transport
from aiotensor.transports.records import SocketTransport


class End:
    """The handler of a transport, which it starts; it records the events."""

    def __init__(
        self,
        transport: Transport,
        when_record: Callable[[], None] = lambda: None,
        when_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.transport = transport
        self.arrived: asyncio.Queue[tuple[bytes, list[int]]] = asyncio.Queue()
        self.lost: list[str] = []
        self.was_lost = asyncio.Event()
        self.resumed = asyncio.Event()
        self.resumptions = 0
        self._when_record = when_record
        self._when_lost = when_lost
        transport.start(self)

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        self.arrived.put_nowait((bytes(data), descriptors))  # the data is valid during this call
        self._when_record()

    def connection_lost(self, reason: str | ProtocolError) -> None:
        self.lost.append(str(reason))
        self.was_lost.set()
        self._when_lost()

    def resume_writing(self) -> None:
        assert self.transport.is_writable
        self.resumptions += 1
        self.resumed.set()

    async def read(self) -> bytes:
        """Wait for a record without descriptors."""
        data, descriptors = await self.arrived.get()
        assert descriptors == []
        return data


def record_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected non-blocking sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)


def end_of(sock: socket.socket) -> End:
    """Return a started end over a socket."""
    return End(SocketTransport(sock))


def fill(transport: Transport) -> int:
    """Write numbered records until one of them is queued, and return their number."""
    count = 0
    while transport.is_writable:
        transport.write(count.to_bytes(4) + bytes(1000))
        count += 1
    return count


def read_all(sock: socket.socket) -> list[int]:
    """Read the numbers of the available records."""
    numbers: list[int] = []
    while True:
        try:
            data = sock.recv(MAX_RECORD_BYTES)
        except BlockingIOError:
            return numbers
        if not data:
            return numbers
        numbers.append(int.from_bytes(data[:4]))


async def turns(count: int = 3) -> None:
    """Run some iterations of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


def is_open(descriptor: int) -> bool:
    """Return whether a descriptor is open."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def open_sockets() -> set[str]:
    """Return the open sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing
            kind = os.readlink(f"/proc/self/fd/{name}")
            if kind.startswith("socket:"):
                found.add(f"{name} {kind}")
    return found
