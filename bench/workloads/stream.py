"""A stream of tensors in one direction; the last tensor contains the number of the others."""

import asyncio
from collections.abc import Iterable, Iterator

import torch

from bench.contenders.base import Port

_END = 255  # the first byte of the last tensor of a stream; all others begin with a one
_COUNT = slice(8, 16)


def fresh(size: int, count: int) -> list[torch.Tensor]:
    """Make tensors in ordinary, warm memory."""
    tensors = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
    for tensor in tensors:
        # All ones: pages of zeros may be shared by the kernel and would not be warm. Not by torch, whose
        # threads wait for each other by spinning: with those of the other process they are too many for two
        # cores.
        tensor.numpy().fill(1)
    return tensors


def computed(size: int, count: int) -> Iterator[torch.Tensor]:
    """Compute tensors one after the other, each with an operation that torch divides among its threads."""
    for _ in range(count):
        yield torch.full((size,), 1, dtype=torch.uint8)


def drained(tensors: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors and drop them, so that the sender of a tensor has the last reference to it."""
    while tensors:
        yield tensors.pop()


async def pour(port: Port, tensors: Iterable[torch.Tensor], width: int) -> None:
    """Send tensors, up to `width` at once if sends of the port may overlap; otherwise it has a queue."""
    shared = iter(tensors)

    async def send() -> None:
        for tensor in shared:
            await port.send(tensor)

    if not port.overlaps or width == 1:
        await send()
        return
    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(send())


async def send_end(port: Port, size: int, count: int) -> None:
    """End a stream of `count` tensors."""
    (end,) = fresh(size, 1)
    end[0] = _END
    end[_COUNT] = torch.frombuffer(bytearray(count.to_bytes(8, "little")), dtype=torch.uint8)
    await port.send(end)


async def take(port: Port, streams: int = 1) -> int:
    """Take tensors until `streams` streams have ended, read each, and return their number except the ends."""
    taken = sent = 0
    while streams:
        tensor = await port.receive()
        if int(tensor[0]) == _END:
            streams -= 1
            sent += int.from_bytes(bytes(tensor[_COUNT].tolist()), "little")
        else:
            taken += 1
    if taken != sent:
        raise RuntimeError(f"{sent} tensors were sent, and {taken} arrived")
    return taken
