"""The bytes of a tensor over bare ZeroMQ sockets, blocking: the limit for all users of ZeroMQ.

No header, no encoding, and no copy in Python. Both ways, it is one exclusive pair of sockets; one way,
several push to one. Blocking sockets are the faster half of pyzmq; those for asyncio add turns of the loop.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import zmq

from bench.contenders.base import Layout, Port, Sides
from bench.messages import Message
from verification.places import free_port

_FPS = 0.0  # it carries none


@dataclass(frozen=True)
class EchoPort(Port):
    """A port that also sends requests and answers them."""

    async def request(self, message: Message) -> Message:
        await self.send(message.tensor)
        return Message(_FPS, await self.receive())

    def __aiter__(self) -> "EchoPort":
        return self

    async def __anext__(self) -> "EchoRequest":
        return EchoRequest(self, Message(_FPS, await self.receive()))


class EchoRequest(NamedTuple):
    port: EchoPort
    message: Message

    async def answer(self, answer: Message) -> None:
        await self.port.send(answer.tensor)


@asynccontextmanager
async def opened(address: str, kind: int, depth: int, *, binds: bool) -> AsyncIterator[EchoPort]:
    with zmq.Context() as context, context.socket(kind) as socket:
        # Half of the messages in flight may wait on each side.
        socket.set_hwm(max(1, depth // 2))
        socket.linger = 0
        if binds:
            socket.bind(address)
        else:
            socket.connect(address)

        async def send(tensor: torch.Tensor) -> None:
            array: Any = tensor.numpy()  # a buffer, which its type does not say before Python 3.12
            socket.send(array, copy=False)

        async def receive() -> torch.Tensor:
            # The tensor is a view of the frame, and keeps it alive.
            return torch.frombuffer(socket.recv(copy=False).buffer, dtype=torch.uint8)

        yield EchoPort(send, receive)


def connect(layout: Layout, over: Literal["ipc", "tcp"] = "ipc") -> Sides[EchoPort]:
    tcp = f"tcp://{layout.single_address}:{free_port()}"
    address = tcp if over == "tcp" else f"ipc://{layout.folder}/socket"
    out, into = (zmq.PAIR, zmq.PAIR) if layout.both_ways else (zmq.PUSH, zmq.PULL)
    peers = [partial(opened, address, out, layout.depth, binds=False)] * layout.peers
    return [*peers], partial(opened, address, into, layout.depth, binds=True)
