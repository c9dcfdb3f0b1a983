"""A client and a server in one process, the messages that they exchange, and helpers that wait for them."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import zmq

from aiotensor.channel.client import MessageClient
from aiotensor.channel.server import MessageServer
from verification.inside import held_by_client, held_by_server
from verification.patterns import pattern
from verification.places import free_port
from verification.waiting import until

# A leak never ends. Resources on their way back get this much time before a test reports them as leaked.
_PATIENCE_S = 10.0


class Question(msgspec.Struct):
    """A request: a number, and tensors at several depths."""

    seed: int
    tensor: torch.Tensor | None = None
    more: dict[str, list[torch.Tensor]] = {}
    wish: str = ""


class Answer(msgspec.Struct):
    """The answer to a `Question`."""

    seed: int
    total: int = 0
    tensor: torch.Tensor | None = None
    more: dict[str, list[torch.Tensor]] = {}


def key_options() -> tuple[dict[str, Any], dict[str, Any]]:
    """Make keys for a server and its clients, and return the arguments with which they are passed."""
    (server_public, server_secret), (public, secret) = zmq.curve_keypair(), zmq.curve_keypair()
    of_server = {"secret_key": server_secret, "client_keys": [public]}
    return of_server, {"secret_key": secret, "server_key": server_public}


class Places:
    """The kind of address that the running test uses; the fixture `way` of conftest.py sets it."""

    scheme = "unix"


@contextmanager
def place() -> Iterator[str]:
    """Create an address, and remove the files that a killed process left there."""
    folder = tempfile.mkdtemp(prefix="aiotensor-")  # the folders of pytest are too long for a socket
    try:
        yield f"unix://{folder}/m" if Places.scheme == "unix" else f"tcp://127.0.0.1:{free_port()}"
    finally:
        shutil.rmtree(folder)


@dataclass
class Channel:
    """Open ends of one channel."""

    client: MessageClient[Answer]
    server: MessageServer[Question]
    place: str

    def held(self) -> dict[str, int]:
        """Return the resources held for messages; empty once all messages have ended."""
        held = held_by_client(self.client) | held_by_server(self.server)
        return {name: amount for name, amount in held.items() if amount}


@asynccontextmanager
async def channel(
    max_concurrent_videos: int = 8,
    arena_bytes: int = 1 << 30,
    *,
    client: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
) -> AsyncIterator[Channel]:
    """Open a client and a server, with further arguments of each."""
    keys = key_options() if Places.scheme == "tcp" else ({}, {})
    with place() as here:
        async with (
            MessageServer(here, Question, **keys[0], **(server or {})) as listening,
            MessageClient(
                here, Answer, max_concurrent_videos, arena_bytes, **keys[1], **(client or {})
            ) as asking,
        ):
            await asking.ready()
            yield Channel(asking, listening, here)


@asynccontextmanager
async def channels(
    count: int,
    permits: int = 8,
    *,
    client: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
) -> AsyncIterator[tuple[MessageClient[Answer], list[MessageServer[Question]]]]:
    """Open several servers, and a client of all of them, with further arguments of each."""
    keys = key_options() if Places.scheme == "tcp" else ({}, {})
    async with AsyncExitStack() as stack:
        places = [stack.enter_context(place()) for _ in range(count)]
        servers = [
            await stack.enter_async_context(MessageServer(here, Question, **keys[0], **(server or {})))
            for here in places
        ]
        async with MessageClient(places, Answer, permits, **keys[1], **(client or {})) as asking:
            await until(lambda: asking.statistics().servers == count)
            yield asking, servers


@asynccontextmanager
async def serving(
    *servers: MessageServer[Question], handler: Callable[[Question], Awaitable[object]] | None = None
) -> AsyncIterator[None]:
    """Have servers answer within the block, with `answer` or another handler."""
    tasks = [asyncio.create_task(server.serve(handler or answer)) for server in servers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def answer_one(server: MessageServer[Question]) -> None:
    """Take a request, and answer it."""
    async with await anext(server) as request:
        await request.answer(await answer(request.message))


async def still_waits(task: "asyncio.Task[Any]") -> bool:
    """Run the loop for some iterations, and return whether a task has not ended."""
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def settled(*channels: Channel) -> None:
    """Wait until all resources held by messages have been released."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _PATIENCE_S
    while left := [held for channel in channels if (held := channel.held())]:
        assert loop.time() < end, f"still held: {left}"
        await asyncio.sleep(0)


async def answer(question: Question) -> Answer:
    """Compute the correct answer to a question; a handler for `serve`."""
    if question.wish == "raise":
        raise ValueError(f"no answer to {question.seed}")
    tensors = [tensor for many in question.more.values() for tensor in many]
    if question.tensor is not None:
        tensors.append(question.tensor)
    total = sum(int(tensor.sum()) for tensor in tensors)
    wished = pattern(question.seed, int(question.wish)) if question.wish else None
    return Answer(question.seed, total, wished)


@contextmanager
def said() -> Iterator[list[str]]:
    """Collect the formatted texts of log records, but not the records.

    A kept record keeps its exception, whose traceback holds the tensors of a request. Pytest keeps records.
    """
    texts: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(logging.Formatter().format(record))

    loggers = [logging.getLogger(f"aiotensor.{name}") for name in ("server", "client", "transports")]
    listener = Listener()
    for logger in loggers:
        logger.addHandler(listener)
        logger.propagate = False
    try:
        yield texts
    finally:
        for logger in loggers:
            logger.propagate = True
            logger.removeHandler(listener)
