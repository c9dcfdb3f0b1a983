"""Plain pyzmq, as it is written by hand: a small header, and the memory of the tensor as a part beside it.

A DEALER asks a ROUTER over `ipc://`, blocking. Large parts are copied neither when they are sent nor when
they are received.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch
import zmq

from bench.contenders.base import Layout, Sides
from bench.messages import Message

_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class _Header(msgspec.Struct, array_like=True):
    fps: float
    dtype: str
    shape: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def _encode(message: Message) -> list[Any]:
    tensor = message.tensor
    header = _Header(message.fps, _NAMES[tensor.dtype], tuple(tensor.shape))
    return [_encoder.encode(header), tensor.numpy()]


def _decode(parts: "Sequence[zmq.Frame]") -> Message:
    header = _decoder.decode(parts[0].buffer)
    # The tensor is a view of the frame, and keeps it alive.
    tensor = torch.frombuffer(parts[1].buffer, dtype=_DTYPES[header.dtype]).view(header.shape)
    return Message(header.fps, tensor)


class Port(NamedTuple):
    socket: "zmq.Socket[bytes]"

    async def request(self, message: Message) -> Message:
        self.socket.send_multipart(_encode(message), copy=False)
        return _decode(self.socket.recv_multipart(copy=False))

    async def __anext__(self) -> "Request":
        client, *parts = self.socket.recv_multipart(copy=False)
        return Request(self.socket, client, _decode(parts))


class Request(NamedTuple):
    socket: "zmq.Socket[bytes]"
    client: "zmq.Frame"
    message: Message

    async def answer(self, answer: Message) -> None:
        self.socket.send_multipart([self.client, *_encode(answer)], copy=False)


@asynccontextmanager
async def opened(address: str, kind: int) -> AsyncIterator[Port]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        if kind == zmq.ROUTER:
            socket.bind(address)
        else:
            socket.connect(address)
        yield Port(socket)


def connect(layout: Layout) -> Sides[Port]:
    address = f"ipc://{layout.folder}/requests"
    return [partial(opened, address, zmq.DEALER)], partial(opened, address, zmq.ROUTER)
