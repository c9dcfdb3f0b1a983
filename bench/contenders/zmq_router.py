"""The common part of requests over plain pyzmq: a DEALER asks a ROUTER over `ipc://`, blocking.

Blocking sockets are the faster half of pyzmq. Large parts are neither copied when they are sent nor when
they are received.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from bench.contenders.base import Layout
from bench.messages import Message, Video

__all__ = ["ClientSide", "Codec", "ServerSide", "connect_with"]


class Codec(NamedTuple):
    """How a message becomes parts, which are anything with a buffer, and the other way round."""

    encode: Callable[[Message], list[Any]]
    decode: "Callable[[Sequence[zmq.Frame]], Any]"


class ClientPort:
    def __init__(self, socket: "zmq.Socket[bytes]", codec: Codec) -> None:
        self._socket = socket
        self._codec = codec

    async def request(self, message: Video) -> Message:
        self._socket.send_multipart(self._codec.encode(message), copy=False)
        answer: Message = self._codec.decode(self._socket.recv_multipart(copy=False))
        return answer


class ServerPort:
    def __init__(self, socket: "zmq.Socket[bytes]", codec: Codec) -> None:
        self._socket = socket
        self._codec = codec

    def __aiter__(self) -> "ServerPort":
        return self

    async def __anext__(self) -> "Request":
        client, *parts = self._socket.recv_multipart(copy=False)
        return Request(self._socket, self._codec, client, self._codec.decode(parts))


class Request(NamedTuple):
    socket: "zmq.Socket[bytes]"
    codec: Codec
    client: "zmq.Frame"
    message: Video

    async def reply(self, answer: Message) -> None:
        self.socket.send_multipart([self.client, *self.codec.encode(answer)], copy=False)


@dataclass(frozen=True)
class ClientSide:
    address: str
    codec: Codec

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ClientPort]:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.address)
            yield ClientPort(socket, self.codec)


@dataclass(frozen=True)
class ServerSide:
    address: str
    codec: Codec

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ServerPort]:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(self.address)
            yield ServerPort(socket, self.codec)


def connect_with(codec: Codec, layout: Layout) -> tuple[list[ClientSide], ServerSide]:
    """Connect two sides that write messages in this way."""
    address = f"ipc://{layout.folder}/requests"
    return [ClientSide(address, codec)], ServerSide(address, codec)
