"""One side of a transfer, for containers: the arguments are its role, an address, and numbers for some roles.

It prints what happens, and runs until it is killed or there is nothing left to do.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

import torch

from aiotensor import AioTensorError, TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, Subscriber
from verification.patterns import pattern

MIB = 1 << 20


def tell(*words: object) -> None:
    """Print a line."""
    print(*words, flush=True)  # noqa: T201


async def watch(losses: Callable[[], int]) -> None:
    """Print each loss of a peer that a counter counts."""
    known = 0
    while True:
        await asyncio.sleep(0.01)
        if known < (known := losses()):
            tell("lost a peer")


async def receive(address: str) -> None:
    """Print the size of each tensor, and whether it has the right values."""
    async with TensorReceiver(address) as receiver, asyncio.TaskGroup() as group:
        watching = group.create_task(watch(lambda: receiver.statistics().senders_lost))
        tell("listens as", os.getpid())
        number = 0
        async for delivery in receiver:
            good = torch.equal(delivery.tensor, pattern(number, delivery.tensor.numel()))
            tell("received", delivery.tensor.nbytes // MIB, good)
            number = 0 if number == 1 else number + 1
            del delivery
        watching.cancel()


async def hold(address: str) -> None:
    """Receive one tensor, and keep it without copying it."""
    async with TensorReceiver(address) as receiver:
        delivery = await anext(receiver)
        tell("holds", delivery.tensor[-1].item())
        await asyncio.Event().wait()


async def hoard(address: str) -> None:
    """Keep a copy of each tensor."""
    copies = []
    async with TensorReceiver(address) as receiver:
        tell("listens as", os.getpid())
        async for delivery in receiver:
            copies.append(delivery.tensor.clone())
            del delivery


async def send(address: str, mib: int, count: int) -> None:
    """Send tensors, and print how each ended."""
    async with (
        TensorSender(address, max_concurrent_videos=2, arena_bytes=1 << 30, max_wait_s=20) as sender,
        asyncio.TaskGroup() as group,
    ):
        watching = group.create_task(watch(lambda: sender.statistics().receivers_lost))
        for number in range(count):
            try:
                await sender.send(pattern(number % 2, mib * MIB // 8))
                await sender.drain()
            except AioTensorError as error:
                tell(type(error).__name__, error)
            else:
                tell("taken", number)
        watching.cancel()


async def keep(address: str, mib: int) -> None:
    """Fill the memory of a sender, and keep it."""
    async with TensorSender(address, arena_bytes=1 << 30) as sender:
        frames = await sender.allocate((mib * MIB,), torch.uint8)
        frames.fill_(1)
        await sender.send(frames)
        await sender.drain()
        tell("filled")
        await asyncio.Event().wait()


async def publish(address: str, mib: int) -> None:
    """Publish to two subscribers, and print when they have answered, and when their memory is free."""
    async with Publisher(address, arena_bytes=1 << 29) as publisher:
        await publisher.wait_for_subscribers(2)
        sent = await publisher.publish(pattern(0, mib * MIB // 8))
        tell("delivered to", sent.delivered)
        await publisher.drain()
        tell("drained with", publisher.statistics().bytes_in_use)
        while publisher.statistics().bytes_in_use:  # until the tensors of both are free
            await asyncio.sleep(0.01)
        tell("free")


async def subscribe(address: str, keeps: int) -> None:
    """Receive one publication, and free it, or keep it."""
    async with Subscriber(address, torch.Tensor) as subscriber:
        publication = await anext(subscriber)
        message = publication.message
        tell("received", torch.equal(message, pattern(0, message.numel())))
        if keeps:
            await asyncio.Event().wait()
        del publication, message
        await asyncio.Event().wait()


ROLES: dict[str, Callable[..., Awaitable[None]]] = {
    one.__name__: one for one in (receive, hold, hoard, send, keep, publish, subscribe)
}


async def main(role: str, address: str, *numbers: str) -> None:
    """Take a role."""
    await ROLES[role](address, *map(int, numbers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
