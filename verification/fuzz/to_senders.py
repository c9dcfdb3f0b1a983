"""Rogue receivers for senders, each followed by an honest one; every call of the senders must end."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable

import torch

from aiotensor import (
    DiscardedError,
    PeerLostError,
    RefusedError,
    TensorReceiver,
    TensorSender,
    UsageError,
    WouldBlockError,
)
from verification.fuzz.living import LiveConnector
from verification.internals import blocks_of, leases_of, memory_of, permits_of
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

_PERMITS = 4
_ARENA_BYTES = 4 << 20


async def _open(state: peers.State) -> None:
    state.senders[:] = [await TensorSender(state.endpoint, _PERMITS, _ARENA_BYTES).__aenter__()]


async def _work(state: peers.State) -> Counter[str]:
    """Send in every way, and count the outcomes; raise errors that no peer may cause."""
    sender, outcomes = state.sender, Counter[str]()

    async def posted() -> None:
        await sender.send(pattern(1, 3))  # which waits for a receiver, unlike `post`
        await sender.copied(sender.post(pattern(7, BIG)))

    async def message() -> None:
        async with sender.message() as message:
            await message.send(pattern(3, 3))
            await message.send(pattern(4, BIG))

    async def allocated() -> None:
        tensor = (await sender.allocate((BIG,), torch.int64)).copy_(pattern(5, BIG))
        for _ in range(2):
            await sender.send(tensor)

    async def discarded() -> None:
        sender.discard(await sender.send(pattern(6, BIG)))

    async def ends(sending: Awaitable[object]) -> None:
        try:
            await sending
        except (PeerLostError, RefusedError, DiscardedError, WouldBlockError, UsageError) as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["sent"] += 1

    await ends(posted())  # alone: the others would take all permits first
    plain = [sender.send(pattern(seed, count)) for seed, count in ((1, 3), (2, BIG), (1, 3))]
    await asyncio.gather(*map(ends, (*plain, message(), allocated(), discarded())))
    return outcomes


async def _check(state: peers.State) -> None:
    """Wait until the sender has released all memory, and check that no block was released twice."""
    sender = state.sender
    await until(lambda: sender.statistics().in_flight == 0 and sender.statistics().bytes_in_use == 0)
    budget, blocks = permits_of(sender), blocks_of(sender)
    assert (budget.in_use, budget.waiting, leases_of(sender), blocks.in_use) == (0, 0, 0, 0)
    assert blocks.largest_free == blocks.size
    # The whole arena can be allocated again, and not a byte beyond it.
    async with asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(sender.allocate((_ARENA_BYTES // 8,), torch.uint8)) for _ in range(8)]
    assert sender.statistics().bytes_in_use == _ARENA_BYTES
    assert memory_of(sender).try_acquire(1) is None
    del held, tasks
    await until(lambda: sender.statistics().bytes_in_use == 0)
    await sender.aclose()
    state.senders.clear()


class LiveSender(LiveConnector):
    """Senders, as seen by their receivers."""

    begin = staticmethod(_open)
    work = staticmethod(_work)

    @contextlib.asynccontextmanager
    async def honest(self) -> AsyncIterator[None]:
        """Receive every tensor."""
        async with TensorReceiver(self.address) as receiver:
            taking = asyncio.create_task(_take(receiver))
            yield
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await taking

    async def finish(self) -> None:
        """Send to the honest receiver, and check that everything is back."""
        await self.process.call(_work)
        await self.process.call(_check)


async def _take(receiver: TensorReceiver) -> None:
    async for delivery in receiver:
        tensor = delivery.tensor
        assert tensor.numel() in (3, BIG)
        assert torch.equal(tensor, pattern(int(tensor[0]), tensor.numel()))
        del tensor
        del delivery
