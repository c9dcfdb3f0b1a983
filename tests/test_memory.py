"""A sender's shared memory: what is given back to the system, and when."""

import asyncio
import contextlib
import os
import threading

import pytest
import torch

from aiotensor.gates import Gate
from aiotensor.memory import Memory
from tests.pairs import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 1 << 20


def new_memory(nbytes: int, keep_warm_s: float | None = 0.01) -> Memory:
    return Memory(nbytes, lambda arena: Gate(nbytes, space=arena), lambda number: None, keep_warm_s)


async def test_idle_memory_goes_back_to_the_system_after_a_while_and_then_nothing_is_scheduled() -> None:
    memory = new_memory(8 * MIB)
    block = await memory.acquire(8 * MIB)
    await memory.copy(torch.full((8 * MIB,), 7, dtype=torch.uint8), block, None)
    descriptor = block.place.segment.descriptor
    assert os.fstat(descriptor).st_blocks * 512 == memory.warm_bytes == 8 * MIB
    memory.unpin_owner(block.number)
    await until(lambda: os.fstat(descriptor).st_blocks == 0)
    assert memory.warm_bytes == 0
    assert memory._trimming is None
    await memory.aclose()


async def test_memory_stays_warm_for_ever_if_that_is_asked_for() -> None:
    memory = new_memory(MIB, None)
    block = await memory.acquire(MIB)
    await memory.copy(torch.full((MIB,), 7, dtype=torch.uint8), block, None)
    memory.unpin_owner(block.number)
    assert memory._trimming is None
    assert memory.warm_bytes == MIB
    await memory.aclose()


async def test_memory_of_a_copy_that_was_cancelled_while_it_was_filled_goes_back_too() -> None:
    memory = new_memory(64 * MIB)
    block = await memory.acquire(64 * MIB)
    descriptor = block.place.segment.descriptor
    copying = asyncio.create_task(memory.copy(torch.zeros(64 * MIB, dtype=torch.uint8), block, None))
    await until(lambda: os.fstat(descriptor).st_blocks > 0)
    copying.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await copying
    await until(lambda: os.fstat(descriptor).st_blocks == 0)
    await memory.settle()
    assert memory.warm_bytes == 0
    assert memory.gate.budget.in_use == 0
    await memory.aclose()


async def test_memory_that_was_filled_on_the_loop_is_not_given_back_by_an_earlier_look() -> None:
    memory = new_memory(MIB)
    go_on = threading.Event()
    block = memory.try_acquire(MIB, None)
    assert block is not None
    memory.copy_now(torch.full((MIB,), 7, dtype=torch.uint8), block)
    memory.unpin_owner(block.number)
    memory._worker.submit(go_on.wait)  # the worker is busy with somebody's copy
    await until(lambda: memory.warm_bytes == 0)  # the giving back is queued behind it
    again = memory.try_acquire(MIB, None)
    assert again is not None
    memory.copy_now(torch.full((MIB,), 9, dtype=torch.uint8), again)
    go_on.set()
    await memory.settle()
    assert set(bytes(again.place.view())) == {9}
    await memory.aclose()
