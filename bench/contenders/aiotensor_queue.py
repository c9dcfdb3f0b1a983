"""aiotensor over its queue link: one `TensorQueue` each way, tensors sent from ordinary memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

import aiotensor


class QueuePort:
    def __init__(self, sender: aiotensor.TensorSender, receiver: aiotensor.TensorReceiver) -> None:
        self._sender = sender
        self._deliveries = aiter(receiver)

    async def send(self, tensor: torch.Tensor) -> None:
        await self._sender.send(tensor)

    async def receive(self) -> torch.Tensor:
        return (await anext(self._deliveries)).tensor


@dataclass(frozen=True)
class QueueSide:
    outgoing: aiotensor.TensorQueue
    incoming: aiotensor.TensorQueue

    @asynccontextmanager
    async def open(self) -> AsyncIterator[QueuePort]:
        async with (
            aiotensor.TensorReceiver(self.incoming) as receiver,
            aiotensor.TensorSender(self.outgoing) as sender,
        ):
            yield QueuePort(sender, receiver)


def pair() -> tuple[QueueSide, QueueSide]:
    there, back = aiotensor.TensorQueue(), aiotensor.TensorQueue()
    return QueueSide(there, back), QueueSide(back, there)
