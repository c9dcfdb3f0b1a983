"""Listeners and connectors at a path, other users, and processes without descriptors."""

import asyncio
import multiprocessing
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest

from aiotensor.transports.unix import UnixConnector, listen_at
from tests.transports.parties import Accepting, Connecting

P = ParamSpec("P")
R = TypeVar("R")

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

_children = multiprocessing.get_context("forkserver")
_children.set_forkserver_preload(["pytest", "torch", "uvloop", "aiotensor"])


class Receiver(Accepting):
    """The owner of a listener at a path."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    async def listen(self) -> None:
        """Begin to listen."""
        self.listener = await listen_at(str(self._path), self.connection_accepted)

    async def end(self) -> None:
        """Stop listening, and close the connections."""
        self.listener.close()
        self.close()


class Sender(Connecting):
    """The owner of a connector to a path."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda events: UnixConnector(str(path), events))


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[Receiver]:
    receiver = Receiver(path)
    await receiver.listen()
    try:
        yield receiver
    finally:
        await receiver.end()


@contextmanager
def connecting(path: Path) -> Iterator[Sender]:
    sender = Sender(path)
    try:
        sender.connector.connect()
        yield sender
    finally:
        sender.close()


class Delays(list[float]):
    """The delays of the calls that were scheduled on an event loop, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._has_more = asyncio.Event()

    def add(self, delay: float) -> None:
        """Add a delay."""
        self.append(delay)
        self._has_more.set()

    async def reach(self, count: int) -> None:
        """Wait until there are as many."""
        while len(self) < count:
            self._has_more.clear()
            await self._has_more.wait()


@contextmanager
def recorded_delays(*, stops_clock: bool = False) -> Iterator[Delays]:
    """Record the delays of `call_later` of the running loop below 10 s; longer ones are those of log lines.

    With `stops_clock`, time stands still for the callbacks, so the speed of the machine has no effect.
    """
    loop: Any = asyncio.get_running_loop()
    call_later, delays, now = loop.call_later, Delays(), loop.time()

    def record(delay: float, *args: Any, **kwargs: Any) -> asyncio.Handle:
        if delay >= 10:
            unrecorded: asyncio.Handle = call_later(delay, *args, **kwargs)
            return unrecorded
        delays.add(delay)
        handle: asyncio.Handle = (
            loop.call_soon(*args, **kwargs) if stops_clock else call_later(delay, *args, **kwargs)
        )
        return handle

    loop.call_later = record
    if stops_clock:
        loop.time = lambda: now
    try:
        yield delays
    finally:
        del loop.call_later
        if stops_clock:
            del loop.time


def leave_stale(path: Path) -> None:
    """Leave the socket file of a killed receiver."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))
        sock.listen()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Leave this process without free descriptors; only for a process without other threads."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # no number is free below it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def in_child(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function in a child process, and return its result."""
    ours, theirs = _children.Pipe()
    process = _children.Process(target=_child, args=(theirs, work, args, kwargs))
    process.start()
    theirs.close()
    try:
        result: R = await asyncio.to_thread(ours.recv)
    finally:
        ours.close()
        await asyncio.to_thread(process.join)
        process.close()
    return result


def _child(
    connection: Connection, work: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    connection.send(work(*args, **kwargs))
