"""Both ends of the socket link, as its tests see them."""

import asyncio
import multiprocessing
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from aiotensor.errors import AioTensorError
from aiotensor.runtime.descriptors import close_all
from aiotensor.transports.base import ReceiverLink
from aiotensor.transports.unix import UnixListener, UnixSenderLink

P = ParamSpec("P")
R = TypeVar("R")

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

_children = multiprocessing.get_context("forkserver")
_children.set_forkserver_preload(["pytest", "torch", "uvloop", "aiotensor"])


class Receiver:
    """A listener, and what it was told."""

    def __init__(self, path: Path) -> None:
        self.listener = UnixListener(str(path))
        self.links: list[ReceiverLink] = []
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()

    def link_opened(self, link: ReceiverLink) -> None:
        self.links.append(link)

    def record_arrived(
        self, link: ReceiverLink, data: bytes | memoryview, descriptors: Sequence[int]
    ) -> None:
        assert link in self.links
        close_all(descriptors)
        self.arrived.put_nowait(bytes(data))

    def link_lost(self, link: ReceiverLink, reason: str) -> None:
        self.links.remove(link)
        self.lost.put_nowait(reason)

    def listener_failed(self, error: BaseException) -> None:
        pytest.fail(str(error))


class Sender:
    """A sender's link, and what it was told."""

    def __init__(self, path: Path) -> None:
        self.link = UnixSenderLink(str(path))
        self.introductions = 0
        self.arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: asyncio.Queue[AioTensorError] = asyncio.Queue()

    def is_ready(self) -> bool:
        return self.link.is_ready

    def looks_at(self) -> float | None:
        """Say when it will look for a receiver next."""
        return None if self.link._retry is None else self.link._retry.when()

    def introduction(self) -> bytes:
        self.introductions += 1
        return f"introduction {self.introductions}".encode()

    def record_arrived(self, data: bytes | memoryview) -> None:
        self.arrived.put_nowait(bytes(data))

    def link_lost(self, error: AioTensorError) -> None:
        self.lost.put_nowait(error)


@asynccontextmanager
async def listening(path: Path) -> AsyncIterator[Receiver]:
    receiver = Receiver(path)
    await receiver.listener.open(receiver, 1 << 16)
    try:
        yield receiver
    finally:
        await receiver.listener.close()


@asynccontextmanager
async def connecting(path: Path) -> AsyncIterator[Sender]:
    sender = Sender(path)
    await sender.link.open(sender)
    try:
        yield sender
    finally:
        sender.link.close()


def leave_stale(path: Path) -> None:
    """Leave what a receiver leaves that is killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))
        sock.listen()


@asynccontextmanager
async def squatting(path: Path, kind: socket.SocketKind, *, listens: bool) -> AsyncIterator[None]:
    """Have another user occupy a path, and accept no connection there.

    Args:
        path: of the socket, in a folder that this opens to everybody.
        kind: of the socket.
        listens: whether there is a listener, whose backlog is full then.
    """
    path.parent.chmod(0o777)
    is_there, is_over = path.with_name("there"), path.with_name("over")
    squatter = asyncio.create_task(in_child(_squat, path, kind, is_there, is_over, listens=listens))
    while not is_there.exists():
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        is_over.touch()
        await squatter


def _squat(path: Path, kind: socket.SocketKind, is_there: Path, is_over: Path, *, listens: bool) -> None:
    os.setuid(NOBODY)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
        elsewhere = path.with_name("elsewhere")  # renamed once nothing can connect any more
        listener.bind(str(elsewhere))
        elsewhere.chmod(0o666)
        if listens:
            listener.listen(0)
            with suppress(BlockingIOError):
                while True:
                    sock = stack.enter_context(socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK))
                    sock.connect(str(elsewhere))
        elsewhere.rename(path)
        is_there.touch()
        asyncio.run(_seen(is_over))


async def _seen(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC240
        await asyncio.sleep(0.01)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Have no descriptor left in this process; for one that runs nothing else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # no number is free below it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def in_child(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function of a test in a process of its own, and return what it returns."""
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
