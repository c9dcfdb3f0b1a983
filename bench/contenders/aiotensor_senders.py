"""aiotensor without a publisher: one sender for each reader, which copies the tensor for it alone.

With one reader it is the one-to-one transport.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

import aiotensor
from bench.contenders.aiotensor_link import LinkSide
from bench.contenders.base import Layout

_ARENA_BYTES = 1 << 30


class SendersPort:
    overlaps = True

    def __init__(self, senders: list[aiotensor.TensorSender]) -> None:
        self._senders = senders

    async def send(self, tensor: torch.Tensor) -> None:
        if len(self._senders) == 1:  # without a task, which the one-to-one transport does not need
            await self._senders[0].send(tensor)
            return
        async with asyncio.TaskGroup() as group:
            for sender in self._senders:
                group.create_task(sender.send(tensor))

    async def receive(self) -> torch.Tensor:
        raise TypeError("this side only sends")


@dataclass(frozen=True)
class SendersSide:
    addresses: tuple[str, ...]
    depth: int

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SendersPort]:
        async with AsyncExitStack() as stack:
            senders = [
                await stack.enter_async_context(
                    aiotensor.TensorSender(
                        address, max_concurrent_videos=self.depth, arena_bytes=_ARENA_BYTES
                    )
                )
                for address in self.addresses
            ]
            yield SendersPort(senders)


def connect(layout: Layout) -> tuple[list[LinkSide], SendersSide]:
    addresses = tuple(f"unix://{layout.folder}/{number}.sock" for number in range(layout.peers))
    readers = [LinkSide(None, address, layout.depth, _ARENA_BYTES) for address in addresses]
    return readers, SendersSide(addresses, layout.depth)
