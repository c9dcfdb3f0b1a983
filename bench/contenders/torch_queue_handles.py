"""Handles over a `torch.multiprocessing.Queue`, in the way of vLLM's tensor IPC.

A sender moves a tensor to shared memory and puts it on one queue of the engine, with the id of the sender and
two counters. The request carries those three as a handle. The engine reads the queue into a buffer until the
tensor of a handle turns up, and then drops tensors of older messages of the same sender.

A thread moves the tensor to shared memory, so that the event loop is not blocked for the copy.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.queues import Queue
from typing import NamedTuple, TypeAlias

import msgspec
import torch
import torch.multiprocessing
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

_WAIT_S = 10.0  # the maximum wait for a tensor that was announced


class Handle(NamedTuple):
    """The name of a tensor; the counter of tensors restarts with each message."""

    sender: int
    message: int
    tensor: int


TensorQueue: TypeAlias = "Queue[tuple[Handle, torch.Tensor]]"


class UploadPort(LimitedPort):
    def __init__(self, sender: int, permits: int, tensors: TensorQueue, requests: Requests) -> None:
        super().__init__(permits)
        self._sender = sender
        self._messages = count()
        self._tensors = tensors
        self._requests = requests

    async def request(self, frames: torch.Tensor) -> int:
        await asyncio.to_thread(frames.share_memory_)
        # Named only now, so that tensors and requests are in the same order.
        handle = Handle(self._sender, next(self._messages), 0)
        self._tensors.put((handle, frames))
        del frames
        return await self._requests.ask([msgspec.msgpack.encode(handle)])


class Buffer:
    """The tensors that were read from the queue and not requested yet, by sender."""

    def __init__(self, tensors: TensorQueue) -> None:
        self._tensors = tensors
        self._found: dict[int, dict[Handle, torch.Tensor]] = {}

    def take(self, handle: Handle) -> torch.Tensor:
        """Wait for a tensor; blocks."""
        while handle not in self._found.get(handle.sender, ()):
            name, tensor = self._tensors.get(timeout=_WAIT_S)
            self._found.setdefault(name.sender, {})[name] = tensor
        of_sender = self._found[handle.sender]
        tensor = of_sender.pop(handle)
        for stale in [name for name in of_sender if name.message < handle.message]:
            del of_sender[stale]
        return tensor


@dataclass(frozen=True)
class ServerSide:
    number: int
    permits: int
    tensors: TensorQueue
    requests: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[UploadPort]:
        async with requesting(self.requests) as requests:
            yield UploadPort(self.number, self.permits, self.tensors, requests)


@dataclass(frozen=True)
class EngineSide:
    tensors: TensorQueue
    requests: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Engine]:
        buffer, handles = Buffer(self.tensors), msgspec.msgpack.Decoder(Handle)

        async def find(parts: "Sequence[zmq.Frame]") -> torch.Tensor:
            (handle,) = parts
            return buffer.take(handles.decode(handle.buffer))

        async with listening(self.requests, find) as engine:
            yield engine


def connect(layout: Layout) -> tuple[list[ServerSide], EngineSide]:
    tensors: TensorQueue = torch.multiprocessing.get_context("spawn").Queue()
    requests = address_in(layout)
    servers = [
        ServerSide(number, share(layout.depth, layout.peers, number), tensors, requests)
        for number in range(layout.peers)
    ]
    return servers, EngineSide(tensors, requests)
