"""Frames inside the requests: pickle, protocol 5, with the memory of the frames out of band and not copied.

A pickle holds a numpy array over the memory of the tensor; torch would pickle a tensor with its bytes inside.
"""

import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import torch
import zmq

from bench.contenders.base import Layout, Sides
from bench.contenders.video_requests import Engine, LimitedPort, address_in, listening, permits, requesting


class UploadPort(LimitedPort):
    async def request(self, frames: torch.Tensor) -> int:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(frames.numpy(), protocol=5, buffer_callback=buffers.append)
        del frames
        parts = [body, *buffers]
        buffers.clear()
        return await self.requests.ask(parts)


async def _unpickled(parts: "Sequence[zmq.Frame]") -> torch.Tensor:
    body, *buffers = parts
    return torch.from_numpy(pickle.loads(body.buffer, buffers=buffers))


@asynccontextmanager
async def serving(address: str, limit: int) -> AsyncIterator[UploadPort]:
    async with requesting(address) as requests:
        yield UploadPort(limit, requests)


def connect(layout: Layout) -> Sides[UploadPort | Engine]:
    address = address_in(layout)
    servers = [partial(serving, address, count) for count in permits(layout)]
    return [*servers], partial(listening, address, _unpickled)
