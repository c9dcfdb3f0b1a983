"""The common part of aiotensor between API servers and an engine: one sender in each server, one receiver.

The permits are those of the sender: each request begins a message before it decodes. The arena of a sender
has memory for two of the largest videos, so further requests wait for memory even if they have a permit.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import torch
import zmq

import aiotensor
from bench.contenders.base import Layout
from bench.contenders.video_requests import Engine, Requests, address_in, listening, requesting
from bench.measure import share

__all__ = ["EngineSide", "ServerSide", "connect_with"]

_VIDEOS_IN_ARENA = 2
_SLACK_BYTES = 64 << 10  # a block is a little larger than its tensor
_KEEP_WARM_S = 0.5  # shorter than the pause before the memory of idle objects is read


class UploadPort:
    def __init__(self, sender: aiotensor.TensorSender, requests: Requests, in_place: bool) -> None:
        self._sender = sender
        self._requests = requests
        self._in_place = in_place

    @asynccontextmanager
    async def slot(self) -> "AsyncIterator[UploadSlot]":
        async with self._sender.message() as message:
            yield UploadSlot(message, self._requests, self._in_place)


class UploadSlot:
    def __init__(self, message: aiotensor.OpenMessage, requests: Requests, in_place: bool) -> None:
        self._message = message
        self._requests = requests
        self._in_place = in_place

    async def allocate(self, shape: Sequence[int]) -> torch.Tensor:
        if self._in_place:
            return await self._message.allocate(shape, torch.uint8)
        return torch.empty(tuple(shape), dtype=torch.uint8)

    async def request(self, frames: torch.Tensor) -> int:
        handle = await self._message.send(frames)
        del frames
        self._message.finish()  # so that the engine can take it
        return await self._requests.ask([msgspec.msgpack.encode(handle)])


@dataclass(frozen=True)
class ServerSide:
    tensors: str
    requests: str
    permits: int
    arena_bytes: int
    in_place: bool

    @asynccontextmanager
    async def open(self) -> AsyncIterator[UploadPort]:
        sender = aiotensor.TensorSender(
            self.tensors,
            max_concurrent_videos=self.permits,
            arena_bytes=self.arena_bytes,
            keep_warm_s=_KEEP_WARM_S,
        )
        async with sender, requesting(self.requests) as requests:
            yield UploadPort(sender, requests, self.in_place)


@dataclass(frozen=True)
class EngineSide:
    tensors: str
    requests: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        handles = msgspec.msgpack.Decoder(aiotensor.TensorHandle)

        async def find(parts: "Sequence[zmq.Frame]") -> torch.Tensor:
            (handle,) = parts
            return await receiver.receive(handles.decode(handle.buffer))

        async with (
            aiotensor.TensorReceiver(self.tensors) as receiver,
            listening(self.requests, find) as engine,
        ):
            yield engine


def connect_with(layout: Layout, *, in_place: bool) -> tuple[list[ServerSide], EngineSide]:
    """Connect the servers and the engine."""
    tensors, requests = f"unix://{layout.folder}/tensors.sock", address_in(layout)
    permits = [share(layout.depth, layout.peers, number) for number in range(layout.peers)]
    arena_bytes = _VIDEOS_IN_ARENA * (layout.largest + _SLACK_BYTES)
    servers = [ServerSide(tensors, requests, each, arena_bytes, in_place) for each in permits]
    return servers, EngineSide(tensors, requests)
