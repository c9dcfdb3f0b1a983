"""Frames inside the requests: pickle, protocol 5, with the memory of the frames out of band and not copied.

As in `zmq_pickle.py`, a pickle holds a numpy array over the memory of the tensor.
"""

import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import zmq

from bench.contenders.base import Layout
from bench.contenders.video_requests import (
    Engine,
    LimitedPort,
    Requests,
    address_in,
    listening,
    requesting,
)
from bench.measure import share


class UploadPort(LimitedPort):
    def __init__(self, permits: int, requests: Requests) -> None:
        super().__init__(permits)
        self._requests = requests

    async def request(self, frames: torch.Tensor) -> int:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(frames.numpy(), protocol=5, buffer_callback=buffers.append)
        del frames
        parts = [body, *buffers]
        buffers.clear()
        return await self._requests.ask(parts)


async def _unpickled(parts: "Sequence[zmq.Frame]") -> torch.Tensor:
    body, *buffers = parts
    return torch.from_numpy(pickle.loads(body.buffer, buffers=buffers))


@dataclass(frozen=True)
class ServerSide:
    permits: int
    requests: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[UploadPort]:
        async with requesting(self.requests) as requests:
            yield UploadPort(self.permits, requests)


@dataclass(frozen=True)
class EngineSide:
    requests: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        async with listening(self.requests, _unpickled) as engine:
            yield engine


def connect(layout: Layout) -> tuple[list[ServerSide], EngineSide]:
    requests = address_in(layout)
    servers = [
        ServerSide(share(layout.depth, layout.peers, number), requests) for number in range(layout.peers)
    ]
    return servers, EngineSide(requests)
