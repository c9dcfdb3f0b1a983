"""The messages of honest clients and servers beside rogues, and their outcomes."""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import torch

from aiotensor import PeerLostError, ProtocolError, RefusedError, RemoteError, TooLargeError
from aiotensor.channel import MessageClient, Request
from aiotensor.transports.endpoints import Endpoint
from verification.patterns import BIG, pattern

# The errors of requests to a rogue server.
_ENDS = (RemoteError, PeerLostError, RefusedError, ProtocolError, TooLargeError)


class Note(msgspec.Struct):
    """A request or a reply: a number and tensors."""

    number: int
    tensors: list[torch.Tensor] = []
    array: np.ndarray | None = None


def messages_at(endpoint: Endpoint) -> str:
    """Return the address of the server that belongs to a receiver."""
    return f"ipc://{os.path.dirname(str(endpoint).removeprefix('unix://'))}/m"


async def respond(request: Request[Note]) -> None:
    """Answer with a number and tensors that follow from the question's."""
    async with request:
        note = request.message
        try:
            await request.reply(Note(_next(note.number), note.tensors))
        except TooLargeError as error:  # a rogue client accepts only a few bytes
            await request.fail(error)


def _next(number: int) -> int:
    return number // 2 + 1  # which is in range for every number in range


async def ask_rightly(client: MessageClient[Note], number: int, *sizes: int) -> None:
    """Send a request, and check the reply."""
    tensors = [pattern(number + index, size) for index, size in enumerate(sizes)]
    answer = await client.request(Note(number, tensors))
    assert answer.number == _next(number)
    assert len(answer.tensors) == len(tensors)
    assert all(map(torch.equal, answer.tensors, tensors)), f"a wrong answer to note {number}"


async def work(client: MessageClient[Note]) -> Counter[str]:
    """Send requests in every way concurrently, and count the outcomes; raise all unexpected errors."""
    outcomes: Counter[str] = Counter()

    async def ends(asking: Awaitable[object]) -> None:
        try:
            await asking
        except _ENDS as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["answered"] += 1

    ways: tuple[Callable[[MessageClient[Note]], Awaitable[object]], ...] = (_small, _big, _one_way, _given_up)
    await asyncio.gather(*(ends(way(client)) for way in (*ways, _small)))
    return outcomes


async def _small(client: MessageClient[Note]) -> None:
    await client.request(Note(1, [pattern(1, 3)]))


async def _big(client: MessageClient[Note]) -> None:
    await client.request(Note(2, [pattern(2, BIG), pattern(3, 3)]))


async def _one_way(client: MessageClient[Note]) -> None:
    await client.send(Note(3, [pattern(4, BIG)]))


async def _given_up(client: MessageClient[Note]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.005):
            await client.request(Note(5))
