"""The calls of an application on a sender whose receiver is a rogue: every wait must end."""

import asyncio
from collections import Counter
from collections.abc import Awaitable

import torch

from aiotensor import DiscardedError, PeerLostError, RefusedError, TensorSender, WouldBlockError
from verification.internals import blocks_of, leases_of, memory_of, pipeline_of
from verification.patterns import BIG, pattern
from verification.waiting import until

__all__ = ["ARENA_BYTES", "PERMITS", "check_all_is_back", "is_whole", "work"]

PERMITS = 4
ARENA_BYTES = 4 << 20


async def work(sender: TensorSender) -> Counter[str]:
    """Send in every way, and count the outcomes; raise errors that no peer may cause."""
    outcomes: Counter[str] = Counter()

    async def ends(sending: Awaitable[object]) -> None:
        try:
            await sending
        except (PeerLostError, RefusedError, DiscardedError, WouldBlockError) as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["sent"] += 1

    await ends(_posted(sender))  # alone: the others would take all permits first
    ways = (_small, _big, _message, _allocated, _discarded, _small)
    await asyncio.gather(*(ends(way(sender)) for way in ways))
    return outcomes


async def _small(sender: TensorSender) -> None:
    await sender.send(pattern(1, 3))


async def _big(sender: TensorSender) -> None:
    await sender.send(pattern(2, BIG))


async def _message(sender: TensorSender) -> None:
    async with sender.message() as message:
        await message.send(pattern(3, 3))
        await message.send(pattern(4, BIG))


async def _allocated(sender: TensorSender) -> None:
    tensor = await sender.allocate((BIG,), torch.int64)
    tensor.copy_(pattern(5, BIG))
    for _ in range(2):
        await sender.send(tensor)


async def _discarded(sender: TensorSender) -> None:
    sender.discard(await sender.send(pattern(6, BIG)))


async def _posted(sender: TensorSender) -> None:
    await sender.send(pattern(1, 3))  # which waits for a receiver, unlike `post`
    await sender.copied(sender.post(pattern(7, BIG)))


def is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor equals a tensor of `work`."""
    seed = int(tensor[0])
    return (
        1 <= seed <= 7 and tensor.numel() in (3, BIG) and torch.equal(tensor, pattern(seed, tensor.numel()))
    )


async def check_all_is_back(sender: TensorSender) -> None:
    """Wait until the sender has released all memory, and check that no block was released twice."""
    await until(lambda: sender.statistics().in_flight == 0 and sender.statistics().bytes_in_use == 0)
    grants = pipeline_of(sender).grants
    assert grants.permits.budget.in_use == 0
    assert grants.permits.budget.waiting == 0
    assert leases_of(sender) == 0
    blocks = blocks_of(sender)
    assert blocks.in_use == 0
    assert blocks.largest_free == blocks.size
    # The whole arena can be allocated again, and not a byte beyond it.
    async with asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(sender.allocate((ARENA_BYTES // 8,), torch.uint8)) for _ in range(8)]
    assert sender.statistics().bytes_in_use == ARENA_BYTES
    assert memory_of(sender).try_acquire(1) is None
    del held, tasks
    await until(lambda: sender.statistics().bytes_in_use == 0)
