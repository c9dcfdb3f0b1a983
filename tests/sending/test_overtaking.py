"""A long copy does not delay small ones, and no wait for a copy is hidden or unlimited."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from aiotensor import DiscardedError, TensorSender
from tests.pairs import pair
from verification.internals import worker_of
from verification.waiting import settled, until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 1 << 20
SMALL = torch.arange(2 * MIB, dtype=torch.uint8)
LARGE = torch.zeros(1, dtype=torch.uint8).expand(64 * MIB)  # which takes no memory here


@asynccontextmanager
async def busy_with_long_work(sender: TensorSender) -> AsyncIterator[None]:
    """Keep the worker of a sender busy for the length of the block."""
    worker, begun, go_on = worker_of(sender), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()

    working = worker.submit(work, takes_long=True)
    await asyncio.to_thread(begun.wait)
    try:
        yield
    finally:
        go_on.set()
        await working


async def test_small_tensors_and_allocated_memory_do_not_wait_for_long_work() -> None:
    async with pair() as (sender, receiver):
        async with busy_with_long_work(sender):
            for source in (SMALL, SMALL[::2], torch.zeros(1000, 1400)[:, ::2].t()):
                received = await receiver.receive(await sender.send(source))
                assert torch.equal(received, source)
                del received
            allocated = await sender.allocate((3 * MIB,), torch.uint8)
            del allocated
        await settled(sender)


@pytest.mark.promise(16)
async def test_discarding_a_message_ends_its_waiting_copy() -> None:
    async with pair() as (sender, _), busy_with_long_work(sender):
        with pytest.raises(DiscardedError):
            async with sender.message() as message:
                handle = await message.send(SMALL)
                sending = asyncio.create_task(message.send(LARGE))
                await until(lambda: sender.statistics().bytes_in_use >= LARGE.nbytes)
                sender.discard(handle)
                with pytest.raises(DiscardedError):
                    await sending
        await settled(sender)
