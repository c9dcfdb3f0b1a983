"""The calls that send tensors, and a server that answers in the background."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch

from aiotensor import TensorHandle, TensorSender
from aiotensor.channel import MessageServer
from tests.channel.parties import Question

__all__ = ["CALLS", "Call", "serving"]

Call = Callable[[TensorSender, torch.Tensor], Awaitable[TensorHandle]]


async def _send(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    return await sender.send(tensor)


async def _send_nowait(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    return sender.send_nowait(tensor)


async def _post(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    handle = sender.post(tensor)
    await sender.copied(handle)
    return handle


async def _send_in_message(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    async with sender.message() as message:
        return await message.send(tensor)


async def _send_allocated(sender: TensorSender, tensor: torch.Tensor) -> TensorHandle:
    allocated = await sender.allocate(tuple(tensor.shape), tensor.dtype)
    return await sender.send(allocated.copy_(tensor))


CALLS: tuple[Call, ...] = (_send, _send_nowait, _post, _send_in_message, _send_allocated)


@asynccontextmanager
async def serving(server: MessageServer[Question], handler: Any, **options: Any) -> AsyncIterator[None]:
    """Serve requests in the background."""
    task = asyncio.create_task(server.serve(handler, **options))
    yield
    task.cancel()
    await asyncio.wait([task])
