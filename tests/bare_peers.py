"""Inspectors and receivers on bare sockets, which write any record, and their peers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiotensor.inspection import Inspection
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Frame,
    Hello,
    ReceiverReport,
    decode,
    decode_hello,
    encode,
)
from verification.fuzz.listening import waiting_at
from verification.fuzz.speaking import say
from verification.inspecting import inspect_receiver

PATIENCE_S = 20.0  # longer than any answer takes


async def inspect_patiently(address: str) -> Inspection:
    """Inspect a receiver."""
    return await inspect_receiver(address, patience_s=PATIENCE_S)


class BareInspector:
    """An inspector on a bare socket."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self.sock.connect(address.removeprefix("unix://"))

    async def say(self, record: bytes) -> bool:
        """Write a record; return False if the connection has ended."""
        return await say(self.sock, record)

    async def read(self) -> list[Frame] | None:
        """Return the next frames, or None at the end."""
        loop = asyncio.get_running_loop()
        try:
            record = await loop.sock_recv(self.sock, MAX_RECORD_BYTES + 1)
        except ConnectionResetError:
            return await self.read()  # the last records follow
        assert len(record) <= MAX_RECORD_BYTES
        return decode(record) if record else None

    async def read_all(self) -> list[Frame]:
        """Return all frames until the end of the connection."""
        found: list[Frame] = []
        while (frames := await self.read()) is not None:
            found += frames
        return found

    async def reports(self) -> list[ReceiverReport]:
        """Return the reports of one inspection."""
        found: list[ReceiverReport] = []
        while not found or not found[-1].last:
            found += [frame for frame in await self.read() or [] if isinstance(frame, ReceiverReport)]
        return found


@asynccontextmanager
async def bare_inspector(address: str, *, inspects: bool = True) -> AsyncIterator[BareInspector]:
    """Connect an inspector to a receiver, and disconnect it at the end.

    Args:
        address: the address of the receiver.
        inspects: whether the inspector sends its first frame.
    """
    observer = BareInspector(address)
    with observer.sock:
        if inspects:
            assert await observer.say(encode(Hello(VERSION, 1, "inspector")))
        yield observer


class BareReceiver:
    """A receiver on a bare socket, with one inspector."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def say(self, *frames: Any) -> None:
        """Write frames in one record."""
        assert await say(self.sock, encode(*frames))


@asynccontextmanager
async def inspecting_bare_receiver(
    address: str,
) -> AsyncIterator[tuple["asyncio.Task[Inspection]", BareReceiver]]:
    """Inspect a bare receiver, which has read the first frame of the inspector."""
    with waiting_at(address) as listener:
        inspecting = asyncio.create_task(inspect_patiently(address))
        loop = asyncio.get_running_loop()
        sock, _ = await loop.sock_accept(listener)
        with sock:
            sock.setblocking(False)
            first = decode_hello(await loop.sock_recv(sock, MAX_RECORD_BYTES))
            assert first.role == "inspector"
            yield inspecting, BareReceiver(sock)
