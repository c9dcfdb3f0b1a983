"""A client and a server in one process, the messages that they exchange, and helpers that wait for them."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
import zmq

from aiotensor import TensorReceiver, TensorSender
from aiotensor.channel import MessageClient, MessageServer
from verification import inside
from verification.patterns import pattern
from verification.places import free_port

__all__ = [
    "Answer",
    "Channel",
    "Place",
    "Places",
    "Question",
    "answer",
    "channel",
    "key_options",
    "place",
    "said",
    "settled",
]


# A leak never ends. Resources on their way back get this much time before a test reports them as leaked.
_PATIENCE_S = 10.0


class Question(msgspec.Struct):
    """A request: a number, and tensors at several depths."""

    seed: int
    tensor: torch.Tensor | None = None
    more: dict[str, list[torch.Tensor]] = {}
    wish: str = ""


class Answer(msgspec.Struct):
    """The reply to a `Question`."""

    seed: int
    total: int = 0
    tensor: torch.Tensor | None = None


class Place(NamedTuple):
    """The addresses that two processes share: for messages, for their tensors, and for tensors of replies."""

    messages: str
    tensors: str
    answers: str


def key_options() -> tuple[dict[str, Any], dict[str, Any]]:
    """Make keys for a server and its clients, and return the arguments with which they are passed."""
    (server_public, server_secret), (public, secret) = zmq.curve_keypair(), zmq.curve_keypair()
    of_server = {"secret_key": server_secret, "client_keys": [public]}
    return of_server, {"secret_key": secret, "server_key": server_public}


class Places:
    """The kind of address that the running test uses; the fixture `way` of conftest.py sets it."""

    scheme = "ipc"


@contextmanager
def place() -> Iterator[Place]:
    """Create a place, and remove the files that a killed process left there."""
    folder = tempfile.mkdtemp(prefix="aiotensor-")  # the folders of pytest are too long for a socket
    messages = f"ipc://{folder}/m" if Places.scheme == "ipc" else f"tcp://127.0.0.1:{free_port()}"
    try:
        yield Place(messages, f"unix://{folder}/t", f"unix://{folder}/a")
    finally:
        shutil.rmtree(folder)


@dataclass
class Channel:
    """Open ends of one channel."""

    client: MessageClient[Answer]
    server: MessageServer[Question]
    sender: TensorSender
    receiver: TensorReceiver
    place: Place

    def held(self) -> dict[str, int]:
        """Return the resources held for messages; empty once all messages have ended."""
        sent, received = self.sender.statistics(), self.receiver.statistics()
        served, asked = self.server.statistics(), self.client.statistics()
        held = {
            "permits": sent.in_flight,
            "bytes": sent.bytes_in_use,
            "unclaimed tensors": received.unclaimed_tensors,
            "leases": received.leases,
            "waiters for tensors": received.waiting,
            "messages that wait": served.waiting,
            "bytes that wait": served.waiting_bytes,
            "requests in hand": served.in_hand,
            "requests in flight": sum(asked.in_flight),
            # Not part of any statistics.
            "messages whose tensors arrive": inside.arriving(self.server),
            "messages taken halfway": inside.found(self.server),
            "messages of clients": sum(len(one.requests) for one in inside.clients_of(self.server)),
            "cancels that have not left": inside.unsent(self.client),
        }
        return {name: amount for name, amount in held.items() if amount}


@asynccontextmanager
async def channel(
    max_concurrent_videos: int = 8,
    arena_bytes: int = 1 << 30,
    *,
    client: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
) -> AsyncIterator[Channel]:
    """Open a client and a server, and a sender and a receiver for the tensors of questions.

    Args:
        max_concurrent_videos: the permits of the sender.
        arena_bytes: the size of the sender's arena in bytes.
        client: further arguments of the client.
        server: further arguments of the server.
    """
    with place() as here:
        async with (
            TensorReceiver(here.tensors) as receiver,
            TensorSender(here.tensors, max_concurrent_videos, arena_bytes) as sender,
            MessageServer(here.messages, Question, receiver=receiver, **(server or {})) as listening,
            MessageClient(here.messages, sender=sender, reply_type=Answer, **(client or {})) as asking,
        ):
            yield Channel(asking, listening, sender, receiver, here)


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

    loggers = [logging.getLogger(f"aiotensor.{name}") for name in ("channel", "transports")]
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
