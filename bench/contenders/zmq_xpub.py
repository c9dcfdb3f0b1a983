"""ZeroMQ XPUB and SUB over `ipc://`, with pickle protocol 5, blocking: the bytes are out of band.

A thread of ZeroMQ copies the bytes into the socket of each subscriber. Neither side copies them
in Python.
"""

import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import torch
import zmq

from bench.contenders.base import Layout, Port, Sides


@asynccontextmanager
async def publishing(address: str, layout: Layout) -> AsyncIterator[Port]:
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.set_hwm(layout.depth)
        socket.linger = 0
        socket.xpub_verbose = True  # so that each subscription arrives, and not only the first
        socket.xpub_nodrop = True
        socket.bind(address)
        for _ in range(layout.peers):
            socket.recv()

        async def send(tensor: torch.Tensor) -> None:
            buffers: list[pickle.PickleBuffer] = []
            body = pickle.dumps(tensor.numpy(), protocol=5, buffer_callback=buffers.append)
            socket.send_multipart([body, *buffers], copy=False)

        yield Port(send)


@asynccontextmanager
async def subscribing(address: str, depth: int) -> AsyncIterator[Port]:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set_hwm(depth)
        socket.linger = 0
        socket.subscribe(b"")
        socket.connect(address)

        async def receive() -> torch.Tensor:
            body, *buffers = socket.recv_multipart(copy=False)
            return torch.from_numpy(pickle.loads(body.buffer, buffers=buffers))

        yield Port(receive=receive)


def connect(layout: Layout) -> Sides[Port]:
    address = f"ipc://{layout.folder}/publications"
    return [partial(subscribing, address, layout.depth)] * layout.peers, partial(publishing, address, layout)
