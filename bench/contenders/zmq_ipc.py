"""ZeroMQ without a copy in Python: a push socket each way over `ipc://`, with blocking calls.

Blocking sockets are the faster half of pyzmq; its sockets for asyncio add turns of the loop.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import zmq

from bench.contenders.base import Layout

__all__ = ["SocketSide", "connect"]


class SocketPort:
    overlaps = False

    def __init__(self, outgoing: "zmq.Socket[bytes] | None", incoming: "zmq.Socket[bytes] | None") -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, tensor: torch.Tensor) -> None:
        if self._outgoing is None:
            raise TypeError("this side only receives")
        self._outgoing.send(tensor.numpy().data, copy=False)

    async def receive(self) -> torch.Tensor:
        if self._incoming is None:
            raise TypeError("this side only sends")
        # The tensor is a view of the frame, and keeps it alive.
        return torch.frombuffer(self._incoming.recv(copy=False).buffer, dtype=torch.uint8)


@dataclass(frozen=True)
class SocketSide:
    outgoing: str | None
    incoming: str | None
    depth: int

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SocketPort]:
        with zmq.Context() as context:
            yield SocketPort(
                self._socket(context, zmq.PUSH, self.outgoing), self._socket(context, zmq.PULL, self.incoming)
            )

    def _socket(
        self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, address: str | None
    ) -> "zmq.Socket[bytes] | None":
        if address is None:
            return None
        socket = context.socket(kind)
        # Half of the messages in flight may wait on each side.
        socket.set_hwm(max(1, self.depth // 2))
        socket.linger = 0
        if kind == zmq.PULL:
            socket.bind(address)
        else:
            socket.connect(address)
        return socket


def connect(layout: Layout) -> tuple[list[SocketSide], SocketSide]:
    there = f"ipc://{layout.folder}/there"
    back = f"ipc://{layout.folder}/back" if layout.both_ways else None
    senders = [SocketSide(there, back, layout.depth) for _ in range(layout.peers)]
    return senders, SocketSide(back, there, layout.depth)
