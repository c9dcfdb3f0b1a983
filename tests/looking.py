"""Those who look at a receiver, by the library and on bare sockets, and those who are looked at."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiotensor import TensorReceiver, TensorSender
from aiotensor.inspection import Inspection, inspect
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Account,
    Look,
    Report,
    ToObserver,
    Welcome,
    decode_to_observer,
    decode_to_receiver,
    encode,
)
from verification.fuzz.listening import waiting_at
from verification.fuzz.speaking import say

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
    incoming = receiver._incoming
    count = sum(link in incoming._observers for link in incoming._peers)
    assert count == len(incoming._observers._observers), "one is remembered that is gone"
    return count


class Observer:
    """Somebody who looks, on a bare socket."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self.sock.connect(address.removeprefix("unix://"))

    async def say(self, record: bytes) -> bool:
        return await say(self.sock, record)

    async def read(self) -> list[ToObserver] | None:
        """Return the next frames, or None at the end."""
        loop = asyncio.get_running_loop()
        try:
            record = await loop.sock_recv(self.sock, MAX_RECORD_BYTES + 1)
        except ConnectionResetError:
            return await self.read()  # the last words come after that
        assert len(record) <= MAX_RECORD_BYTES
        return decode_to_observer(record) if record else None

    async def read_all(self) -> list[ToObserver]:
        """Return all that is said until the end."""
        found: list[ToObserver] = []
        while (frames := await self.read()) is not None:
            found += frames
        return found

    async def reports(self) -> list[Report]:
        """Return the reports, up to the last."""
        found: list[Report] = []
        while not found or not found[-1].last:
            found += [frame for frame in await self.read() or [] if isinstance(frame, Report)]
        return found


@asynccontextmanager
async def observing(address: str, *, looks: bool = True) -> AsyncIterator[Observer]:
    """Look at a receiver, for as long as the block lasts."""
    observer = Observer(address)
    with observer.sock:
        if looks:
            assert await observer.say(encode(Look(VERSION, 1)))
        yield observer


class RogueReceiver:
    """A receiver on a bare socket, which says what it likes to one sender or observer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    async def say(self, *frames: Any) -> None:
        assert await say(self.sock, encode(*frames))

    async def accounts(self, count: int) -> list[Account]:
        """Read until there were so many accounts."""
        found: list[Account] = []
        while len(found) < count:
            record = await asyncio.get_running_loop().sock_recv(self.sock, MAX_RECORD_BYTES)
            found += [frame for frame in decode_to_receiver(record) if isinstance(frame, Account)]
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
                await receiver.say(Welcome(VERSION, 1))
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
            [look] = decode_to_receiver(await loop.sock_recv(sock, MAX_RECORD_BYTES))
            assert isinstance(look, Look)
            yield looking, RogueReceiver(sock)
