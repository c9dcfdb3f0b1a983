"""aiotensor over one `MessageQueue` each way, with one consumer; each message is a tensor."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

from aiotensor.queues import MessageQueue, QueueConsumer, QueueProducer
from bench.contenders.aiotensor_link import arena_bytes
from bench.contenders.base import Layout

__all__ = ["connect"]

_Queue = MessageQueue[torch.Tensor]


class MessageQueuePort:
    overlaps = True

    def __init__(self, producer: QueueProducer | None, consumer: QueueConsumer[torch.Tensor] | None) -> None:
        self._producer = producer
        self._consumer = consumer

    async def send(self, tensor: torch.Tensor) -> None:
        if self._producer is None:
            raise TypeError("this side only receives")
        await self._producer.put(tensor)

    async def receive(self) -> torch.Tensor:
        if self._consumer is None:
            raise TypeError("this side only sends")
        return await self._consumer.get()


@dataclass(frozen=True)
class MessageQueueSide:
    outgoing: _Queue | None
    incoming: _Queue | None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[MessageQueuePort]:
        async with AsyncExitStack() as stack:
            consumer = producer = None
            if self.incoming is not None:
                consumer = await stack.enter_async_context(self.incoming.consumer())
            if self.outgoing is not None:
                producer = await stack.enter_async_context(self.outgoing.producer())
            yield MessageQueuePort(producer, consumer)


def connect(layout: Layout) -> tuple[list[MessageQueueSide], MessageQueueSide]:
    there, back = (
        MessageQueue(
            torch.Tensor,
            producers=producers,
            max_messages=layout.depth,
            arena_bytes=arena_bytes(layout),
            folder=layout.folder / name,
        )
        for name, producers in (("there", layout.peers), ("back", 1))
    )
    returns = back if layout.both_ways else None
    return [MessageQueueSide(there, returns) for _ in range(layout.peers)], MessageQueueSide(returns, there)
