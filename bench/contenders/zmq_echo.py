"""The bytes of a tensor over a bare ZeroMQ socket and back, blocking: the limit for all users of ZeroMQ.

No header, no encoding, and an exclusive pair of sockets: one part each way.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import zmq

from bench.contenders.base import Layout
from bench.messages import Message, Video, tensor_of

__all__ = ["address_in", "pair", "receive", "send"]

_FPS = 0.0  # it carries none


class EchoPort:
    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    async def request(self, message: Video) -> Video:
        send(self._socket, message.frames)
        return Video(_FPS, receive(self._socket))

    def __aiter__(self) -> "EchoPort":
        return self

    async def __anext__(self) -> "EchoRequest":
        return EchoRequest(self._socket, Video(_FPS, receive(self._socket)))


class EchoRequest(NamedTuple):
    socket: "zmq.Socket[bytes]"
    message: Video

    async def reply(self, answer: Message) -> None:
        send(self.socket, tensor_of(answer))


@dataclass(frozen=True)
class EchoSide:
    address: str
    binds: bool

    @asynccontextmanager
    async def open(self) -> AsyncIterator[EchoPort]:
        with pair(self.address, binds=self.binds) as socket:
            yield EchoPort(socket)


def connect(layout: Layout) -> tuple[list[EchoSide], EchoSide]:
    address = address_in(layout)
    return [EchoSide(address, binds=False)], EchoSide(address, binds=True)


def address_in(layout: Layout) -> str:
    """Return the address at which one side listens and the other connects."""
    return f"ipc://{layout.folder}/echo"


@contextmanager
def pair(address: str, *, binds: bool) -> "Iterator[zmq.Socket[bytes]]":
    """Open one of the two sockets."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        if binds:
            socket.bind(address)
        else:
            socket.connect(address)
        yield socket


def send(socket: "zmq.Socket[bytes]", tensor: torch.Tensor, flags: int = 0) -> None:
    """Send the bytes of a tensor."""
    array: Any = tensor.numpy()  # a buffer, which its type does not say before Python 3.12
    socket.send(array, flags, copy=False)


def receive(socket: "zmq.Socket[bytes]", flags: int = 0) -> torch.Tensor:
    """Receive bytes as a tensor, which is a view of the frame and keeps it alive."""
    return torch.frombuffer(socket.recv(flags, copy=False).buffer, dtype=torch.uint8)
