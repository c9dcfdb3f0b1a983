"""Those who look at a receiver, by the library and on bare sockets, and those who are looked at."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiotensor import TensorReceiver, TensorSender
from aiotensor.errors import ProtocolError
from aiotensor.inspection import Inspection, inspect
from aiotensor.protocol.frames import (
    FROM_SENDER,
    MAX_RECORD_BYTES,
    OPENING,
    TO_INSPECTOR,
    VERSION,
    FromSender,
    Inspect,
    Opening,
    ReceiverReport,
    StatisticsReply,
    ToInspector,
    Welcome,
    decode,
    encode,
)
from verification.fuzz.listening import waiting_at
from verification.fuzz.speaking import say
from verification.internals import inspectors_of

__all__ = [
    "PATIENCE_S",
    "Observer",
    "RogueReceiver",
    "look_at",
    "looking_at_rogue",
    "observers",
    "observing",
    "rogue_receiver",
]

PATIENCE_S = 20.0  # with those who answer at once


async def look_at(address: str) -> Inspection:
    """Look at a receiver all of whose senders answer."""
    return await inspect(address, patience_s=PATIENCE_S)


def observers(receiver: TensorReceiver) -> int:
    """Count those who look at a receiver."""
    found = inspectors_of(receiver)
    assert not any(one.transport.is_closed for one in found), "one is remembered that is gone"
    return len(found)


class Observer:
    """Somebody who looks, on a bare socket."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self.sock.connect(address.removeprefix("unix://"))

    async def say(self, record: bytes) -> bool:
        return await say(self.sock, record)

    async def read(self) -> list[ToInspector] | None:
        """Return the next frames, or None at the end."""
        loop = asyncio.get_running_loop()
        try:
            record = await loop.sock_recv(self.sock, MAX_RECORD_BYTES + 1)
        except ConnectionResetError:
            return await self.read()  # the last words come after that
        assert len(record) <= MAX_RECORD_BYTES
        return decode(TO_INSPECTOR, record) if record else None

    async def read_all(self) -> list[ToInspector]:
        """Return all that is said until the end."""
        found: list[ToInspector] = []
        while (frames := await self.read()) is not None:
            found += frames
        return found

    async def reports(self) -> list[ReceiverReport]:
        """Return the reports, up to the last."""
        found: list[ReceiverReport] = []
        while not found or not found[-1].last:
            found += [frame for frame in await self.read() or [] if isinstance(frame, ReceiverReport)]
        return found


@asynccontextmanager
async def observing(address: str, *, looks: bool = True) -> AsyncIterator[Observer]:
    """Look at a receiver, for as long as the block lasts."""
    observer = Observer(address)
    with observer.sock:
        if looks:
            assert await observer.say(encode(Inspect(VERSION, 1)))
        yield observer


def read_record(record: bytes) -> list[Opening | FromSender]:
    """Decode a record of a sender or an inspector, the first or a later one."""
    try:
        return [*decode(OPENING, record)]
    except ProtocolError:
        return [*decode(FROM_SENDER, record)]


class RogueReceiver:
    """A receiver on a bare socket, which says what it likes to one sender or observer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def say(self, *frames: Any) -> None:
        assert await say(self.sock, encode(*frames))

    async def replies(self, count: int) -> list[StatisticsReply]:
        """Read until there were so many replies."""
        found: list[StatisticsReply] = []
        while len(found) < count:
            record = await asyncio.get_running_loop().sock_recv(self.sock, MAX_RECORD_BYTES)
            found += [frame for frame in read_record(record) if isinstance(frame, StatisticsReply)]
        return found

    async def read_all(self) -> list[Opening | FromSender]:
        """Read until the sender has closed."""
        found: list[Opening | FromSender] = []
        while record := await asyncio.get_running_loop().sock_recv(self.sock, MAX_RECORD_BYTES):
            found += read_record(record)
        return found


@asynccontextmanager
async def rogue_receiver(address: str) -> AsyncIterator[tuple[TensorSender, RogueReceiver]]:
    """Connect a sender to somebody who says what it likes."""
    with waiting_at(address) as listener:
        async with TensorSender(address, 2000) as sender:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            with sock:
                sock.setblocking(False)
                receiver = RogueReceiver(sock)
                await receiver.say(Welcome(VERSION, 1, is_admitted=True))
                yield sender, receiver


@asynccontextmanager
async def looking_at_rogue(address: str) -> AsyncIterator[tuple["asyncio.Task[Inspection]", RogueReceiver]]:
    """Look at somebody who says what it likes."""
    with waiting_at(address) as listener:
        looking = asyncio.create_task(look_at(address))
        loop = asyncio.get_running_loop()
        sock, _ = await loop.sock_accept(listener)
        with sock:
            sock.setblocking(False)
            [look] = read_record(await loop.sock_recv(sock, MAX_RECORD_BYTES))
            assert isinstance(look, Inspect)
            yield looking, RogueReceiver(sock)
