"""Handles over a `torch.multiprocessing.Queue`, in the way of vLLM's tensor IPC.

A sender moves a tensor to shared memory and puts it on one queue of the engine, with the id of the sender and
two counters. The request carries those three as a handle. The engine reads the queue into a buffer until the
tensor of a handle turns up, and then drops tensors of older messages of the same sender.

A thread moves the tensor to shared memory, so that the event loop is not blocked for the copy.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from multiprocessing.queues import Queue
from typing import NamedTuple, TypeAlias

import msgspec
import torch
import torch.multiprocessing
import zmq

from bench.contenders.base import Layout, Sides
from bench.contenders.video_requests import (
    Engine,
    LimitedPort,
    Requests,
    address_in,
    listening,
    permits,
    requesting,
)

_WAIT_S = 10.0  # the maximum wait for a tensor that was announced


class Handle(NamedTuple):
    """The name of a tensor; the counter of tensors restarts with each message."""

    sender: int
    message: int
    tensor: int


TensorQueue: TypeAlias = "Queue[tuple[Handle, torch.Tensor]]"


class UploadPort(LimitedPort):
    def __init__(self, sender: int, permits: int, tensors: TensorQueue, requests: Requests) -> None:
        super().__init__(permits, requests)
        self._sender = sender
        self._messages = count()
        self._tensors = tensors

    async def request(self, frames: torch.Tensor) -> int:
        await asyncio.to_thread(frames.share_memory_)
        # Named only now, so that tensors and requests are in the same order.
        handle = Handle(self._sender, next(self._messages), 0)
        self._tensors.put((handle, frames))
        del frames
        return await self.requests.ask([msgspec.msgpack.encode(handle)])


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


@asynccontextmanager
async def serving(number: int, limit: int, tensors: TensorQueue, address: str) -> AsyncIterator[UploadPort]:
    async with requesting(address) as requests:
        yield UploadPort(number, limit, tensors, requests)


@asynccontextmanager
async def engine(tensors: TensorQueue, address: str) -> AsyncIterator[Engine]:
    buffer, handles = Buffer(tensors), msgspec.msgpack.Decoder(Handle)

    async def find(parts: "Sequence[zmq.Frame]") -> torch.Tensor:
        (handle,) = parts
        return buffer.take(handles.decode(handle.buffer))

    async with listening(address, find) as opened:
        yield opened


def connect(layout: Layout) -> Sides[UploadPort | Engine]:
    tensors: TensorQueue = torch.multiprocessing.get_context("spawn").Queue()
    address = address_in(layout)
    servers = [
        partial(serving, number, count, tensors, address) for number, count in enumerate(permits(layout))
    ]
    return [*servers], partial(engine, tensors, address)
