"""The bytes of a tensor from a DEALER to a ROUTER and back, by pyzmq's own sockets for asyncio.

No header and no encoding: one part each way beside the identity that a ROUTER needs. This is the minimal cost
of a request and its answer if both sides only await pyzmq.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import zmq
import zmq.asyncio

from bench.contenders.base import Layout
from bench.contenders.zmq_echo import address_in
from bench.messages import Message, Video, tensor_of

__all__ = ["connect"]

_FPS = 0.0  # it carries none


class ClientPort:
    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    async def request(self, message: Video) -> Video:
        await self._socket.send(_buffer(message.frames), copy=False)
        return _video(await self._socket.recv(copy=False))


class ServerPort:
    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket

    def __aiter__(self) -> "ServerPort":
        return self

    async def __anext__(self) -> "Request":
        client, frame = await self._socket.recv_multipart(copy=False)
        return Request(self._socket, client, _video(frame))


class Request(NamedTuple):
    socket: zmq.asyncio.Socket
    client: zmq.Frame
    message: Video

    async def reply(self, answer: Message) -> None:
        await self.socket.send_multipart([self.client, _buffer(tensor_of(answer))], copy=False)


def _buffer(tensor: torch.Tensor) -> Any:
    return tensor.numpy()  # which its type does not say before Python 3.12


def _video(frame: zmq.Frame) -> Video:
    return Video(_FPS, torch.frombuffer(frame.buffer, dtype=torch.uint8))


@dataclass(frozen=True)
class ClientSide:
    address: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ClientPort]:
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.address)
            yield ClientPort(socket)


@dataclass(frozen=True)
class ServerSide:
    address: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ServerPort]:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(self.address)
            yield ServerPort(socket)


def connect(layout: Layout) -> tuple[list[ClientSide], ServerSide]:
    address = address_in(layout)
    return [ClientSide(address)], ServerSide(address)
