"""ZeroMQ XPUB and SUB over `ipc://`, with pickle protocol 5, blocking: the bytes are out of band.

A thread of ZeroMQ copies the bytes into the socket of each subscriber. Neither side copies them
in Python.
"""

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import zmq

from bench.contenders.base import Layout


class XpubPort:
    overlaps = False

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    async def send(self, tensor: torch.Tensor) -> None:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(tensor.numpy(), protocol=5, buffer_callback=buffers.append)
        self._socket.send_multipart([body, *buffers], copy=False)

    async def receive(self) -> torch.Tensor:
        raise TypeError("a publisher only sends")


class SubPort:
    overlaps = False

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    async def send(self, tensor: torch.Tensor) -> None:
        raise TypeError("a subscriber only receives")

    async def receive(self) -> torch.Tensor:
        body, *buffers = self._socket.recv_multipart(copy=False)
        return torch.from_numpy(pickle.loads(body.buffer, buffers=buffers))


@dataclass(frozen=True)
class XpubSide:
    address: str
    subscribers: int
    depth: int

    @asynccontextmanager
    async def open(self) -> AsyncIterator[XpubPort]:
        with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
            socket.set_hwm(self.depth)
            socket.linger = 0
            socket.xpub_verbose = True  # so that each subscription arrives, and not only the first
            socket.xpub_nodrop = True
            socket.bind(self.address)
            for _ in range(self.subscribers):
                socket.recv()
            yield XpubPort(socket)


@dataclass(frozen=True)
class SubSide:
    address: str
    depth: int

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SubPort]:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.set_hwm(self.depth)
            socket.linger = 0
            socket.subscribe(b"")
            socket.connect(self.address)
            yield SubPort(socket)


def connect(layout: Layout) -> tuple[list[SubSide], XpubSide]:
    address = f"ipc://{layout.folder}/publications"
    subscribers = [SubSide(address, layout.depth) for _ in range(layout.peers)]
    return subscribers, XpubSide(address, layout.peers, layout.depth)
