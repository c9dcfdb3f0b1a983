"""A process with the traffic and the errors that the example servers do not have; the argument is its port.

A publisher waits for a slow subscriber, and a sender waits for permits and for memory. Calls of the sender
and of the receiver fail.
"""

import asyncio
import contextlib
import sys
import tempfile

import prometheus_client
import torch

from aiotensor import AlreadyTakenError, TensorReceiver, TensorSender, WouldBlockError
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.integrations.prometheus import AioTensorCollector

WAIT_S = 0.1
TENSOR = torch.zeros(1 << 18)


async def publish(publisher: Publisher, subscriber: Subscriber[torch.Tensor]) -> None:
    """Publish faster than the subscriber reads."""

    async def read() -> None:
        async for publication in subscriber:
            del publication
            await asyncio.sleep(WAIT_S)

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        await publisher.wait_for_subscribers(1)
        while True:
            await publisher.publish(TENSOR)


async def send(sender: TensorSender, receiver: TensorReceiver) -> None:
    """Send faster than the receiver receives, and fail once per round."""
    while True:
        # Four messages need more than two permits.
        sending = [asyncio.create_task(sender.send(TENSOR)) for _ in range(4)]
        await asyncio.sleep(WAIT_S)
        with contextlib.suppress(WouldBlockError):
            sender.send_nowait(TENSOR)
        for _ in sending:
            await asyncio.sleep(WAIT_S)
            await anext(receiver)
        await asyncio.gather(*sending)
        # The arena is as large as two tensors.
        kept = [await sender.allocate(TENSOR.shape, TENSOR.dtype) for _ in range(2)]
        third = asyncio.create_task(sender.allocate(TENSOR.shape, TENSOR.dtype))
        await asyncio.sleep(WAIT_S)
        kept.clear()
        kept.append(await third)
        kept.clear()
        del third
        handle = await sender.send(TENSOR)
        await receiver.receive(handle)
        with contextlib.suppress(AlreadyTakenError):
            receiver.receive_nowait(handle)


async def main(port: int) -> None:
    """Run until the process is killed."""
    prometheus_client.REGISTRY.register(AioTensorCollector())
    with tempfile.TemporaryDirectory(prefix="aiotensor-") as folder:
        tensors, weights = f"unix://{folder}/tensors", f"unix://{folder}/weights"
        async with (
            Publisher(weights, max_behind=1) as publisher,
            Subscriber(weights, torch.Tensor) as subscriber,
            TensorReceiver(tensors) as receiver,
            TensorSender(tensors, max_concurrent_videos=2, arena_bytes=2 * TENSOR.nbytes) as sender,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(publish(publisher, subscriber))
            group.create_task(send(sender, receiver))
            prometheus_client.start_http_server(port, "127.0.0.1")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
