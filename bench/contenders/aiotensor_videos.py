"""aiotensor's requests between API servers and an engine, each with the frames of a video inside.

The permits are those of the client: each request acquires one before it decodes. The arena of a client has
memory for two of the largest videos, so further requests wait for memory even if they have a permit.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

import msgspec
import torch

from aiotensor.channel import MessageClient, MessageServer, Permit, Request
from bench.contenders.base import EnginePort, Layout, Sides
from bench.contenders.video_requests import permits

_VIDEOS_IN_ARENA = 2
_SLACK_BYTES = 64 << 10  # a block is a little larger than its tensor


class Video(msgspec.Struct):
    """The message of a request."""

    frames: torch.Tensor


class UploadSlot(NamedTuple):
    client: MessageClient[int]
    permit: Permit
    in_place: bool

    async def allocate(self, shape: Sequence[int]) -> torch.Tensor:
        if self.in_place:
            return await self.permit.allocate(shape, torch.uint8)
        return torch.empty(tuple(shape), dtype=torch.uint8)

    async def request(self, frames: torch.Tensor) -> int:
        messages = [Video(frames)]
        del frames
        return await self.client.request(messages.pop(), inside=self.permit)  # which has the last reference


class UploadPort(NamedTuple):
    client: MessageClient[int]
    in_place: bool

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[UploadSlot]:
        async with self.client.permit() as permit:
            yield UploadSlot(self.client, permit, self.in_place)


class VideoRequest(NamedTuple):
    request: Request[Video]

    @property
    def frames(self) -> torch.Tensor:
        return self.request.message.frames

    async def answer(self, answer: int) -> None:
        await self.request.answer(answer)


@asynccontextmanager
async def serving(address: str, limit: int, arena_bytes: int, in_place: bool) -> AsyncIterator[UploadPort]:
    async with MessageClient(address, int, limit, arena_bytes) as client:
        yield UploadPort(client, in_place)


@asynccontextmanager
async def engine(address: str) -> AsyncIterator[EnginePort]:
    async with MessageServer(address, Video) as server:
        yield (VideoRequest(request) async for request in server)


def connect(layout: Layout, in_place: bool = False) -> Sides[UploadPort | EnginePort]:
    address = f"unix://{layout.folder}/engine.sock"
    arena_bytes = _VIDEOS_IN_ARENA * (layout.largest + _SLACK_BYTES)
    servers = [partial(serving, address, each, arena_bytes, in_place) for each in permits(layout)]
    return [*servers], partial(engine, address)
