"""The requests of other contenders that carry videos: from a DEALER in each API server to a ROUTER.

They share it, so only the transfer of tensors differs. The sockets are pyzmq's for asyncio. A request is a
number and the parts that a contender adds: the handle of a tensor, or the tensor itself. The answer is an
integer.
"""

import abc
import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

import torch
import zmq
import zmq.asyncio

from bench.contenders.base import Layout
from bench.measure import share

_NUMBER = struct.Struct("<Q")


def address_in(layout: Layout) -> str:
    """Return the address where the engine listens for requests."""
    return f"ipc://{layout.folder}/requests"


def permits(layout: Layout) -> list[int]:
    """Return the permits of each API server."""
    return [share(layout.depth, layout.peers, number) for number in range(layout.peers)]


class Requests:
    """The requests of an API server that wait for their answers."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[int]] = {}

    async def ask(self, parts: list[Any]) -> int:
        """Send a request, clear its parts, and return the answer."""
        number = next(self._numbers)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        sending = self._socket.send_multipart([_NUMBER.pack(number), *parts], copy=False)
        parts.clear()  # from here on ZeroMQ alone keeps them, until they are sent
        await sending
        return await answer

    async def read(self) -> None:
        """Read the answers until this is cancelled."""
        while True:
            number, answer = await self._socket.recv_multipart()
            self._waiting.pop(*_NUMBER.unpack(number)).set_result(*_NUMBER.unpack(answer))


@asynccontextmanager
async def requesting(address: str) -> AsyncIterator[Requests]:
    """Connect an API server to the engine."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        requests = Requests(socket)
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(requests.read())
            yield requests
            reading.cancel()


class LimitedPort(abc.ABC):
    """The end of an API server for contenders without permits, with a semaphore instead.

    The engine does not report that it has taken a tensor, so a permit is free when its answer arrives.

    Args:
        permits: the requests that may hold decoded frames at once.
        requests: the requests of this server.
    """

    def __init__(self, permits: int, requests: Requests) -> None:
        self.requests = requests
        self._permits = asyncio.Semaphore(permits)

    @asynccontextmanager
    async def slot(self) -> "AsyncIterator[LimitedPort]":
        async with self._permits:
            yield self

    async def allocate(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=torch.uint8)

    @abc.abstractmethod
    async def request(self, frames: torch.Tensor) -> int:
        """Send frames, and return the answer of the engine."""


class Engine:
    """The requests that arrive at the engine.

    Args:
        socket: a ROUTER.
        find: returns the frames that the parts of a request hold or name.
    """

    def __init__(
        self, socket: zmq.asyncio.Socket, find: "Callable[[Sequence[zmq.Frame]], Awaitable[torch.Tensor]]"
    ) -> None:
        self._socket = socket
        self._find = find

    def __aiter__(self) -> "Engine":
        return self

    async def __anext__(self) -> "Request":
        client, number, *parts = await self._socket.recv_multipart(copy=False)
        return Request(self._socket, client, number, await self._find(parts))


class Request(NamedTuple):
    socket: zmq.asyncio.Socket
    client: "zmq.Frame"
    number: "zmq.Frame"
    frames: torch.Tensor

    async def answer(self, answer: int) -> None:
        await self.socket.send_multipart([self.client, self.number, _NUMBER.pack(answer)], copy=False)


@asynccontextmanager
async def listening(
    address: str, find: "Callable[[Sequence[zmq.Frame]], Awaitable[torch.Tensor]]"
) -> AsyncIterator[Engine]:
    """Listen for the requests of all API servers."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind(address)
        yield Engine(socket, find)
