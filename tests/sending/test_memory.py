"""The shared memory of a sender is returned to the system when no tensor uses it."""

import asyncio
import contextlib
import os
import threading

import pytest
import torch

from aiotensor.runtime.worker import Worker
from aiotensor.sending.gates import Gate
from aiotensor.sending.memory import Memory
from aiotensor.statistics.counters import new_counts
from aiotensor.types import SenderStatistics
from verification.internals import is_trimming, worker_of
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 1 << 20


def new_memory(nbytes: int, keep_warm_s: float | None = 0.01) -> Memory:
    return Memory(nbytes, lambda arena: Gate(nbytes, space=arena), keep_warm_s, new_counts(SenderStatistics))


async def test_idle_memory_goes_back_to_the_system_after_a_while_and_then_nothing_is_scheduled() -> None:
    memory = new_memory(8 * MIB)
    block = await memory.acquire(8 * MIB)
    await memory.copy(torch.full((8 * MIB,), 7, dtype=torch.uint8), block, None)
    descriptor = block.place.segment.descriptor
    assert os.fstat(descriptor).st_blocks * 512 == memory.warm_bytes == 8 * MIB
    memory.unpin_owner(block.number)
    await until(lambda: os.fstat(descriptor).st_blocks == 0)
    assert memory.warm_bytes == 0
    assert not is_trimming(memory)
    await memory.aclose()


async def test_memory_stays_warm_for_ever_if_that_is_asked_for() -> None:
    memory = new_memory(MIB, None)
    block = await memory.acquire(MIB)
    await memory.copy(torch.full((MIB,), 7, dtype=torch.uint8), block, None)
    memory.unpin_owner(block.number)
    assert not is_trimming(memory)
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
    worker_of(memory).submit(go_on.wait)  # the worker is busy with another copy
    await until(lambda: memory.warm_bytes == 0)  # the giving back is queued behind it
    again = memory.try_acquire(MIB, None)
    assert again is not None
    memory.copy_now(torch.full((MIB,), 9, dtype=torch.uint8), again)
    go_on.set()
    await memory.settle()
    assert set(bytes(again.place.view())) == {9}
    await memory.aclose()


class _NoThread(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


async def test_a_copy_for_which_no_thread_could_be_started_is_never_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = new_memory(8 * MIB)
    block = await memory.acquire(MIB)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", _NoThread)
        with pytest.raises(OSError, match="no thread"):
            await memory.copy(torch.full((MIB,), 1, dtype=torch.uint8), block, None)
    there = await memory.acquire(MIB)
    assert there.place.offset == block.place.offset
    memory.copy_now(torch.full((MIB,), 2, dtype=torch.uint8), there)
    other = await memory.acquire(2 * MIB)
    await memory.copy(torch.full((2 * MIB,), 3, dtype=torch.uint8), other, None)  # now there is a thread
    assert bytes(there.place.view()) == b"\2" * MIB
    for one in (there, other):
        memory.unpin_owner(one.number)
    await memory.aclose()


@pytest.mark.parametrize("mib", [4, 8])
async def test_a_large_copy_is_made_by_one_thread_if_no_second_one_can_be_started(
    mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = new_memory(16 * MIB)
    warm = await memory.acquire(8 * MIB)
    await memory.copy(torch.zeros(2 * MIB, dtype=torch.uint8), warm, None)  # the first thread
    memory.unpin_owner(warm.number)
    block = await memory.acquire(mib * MIB)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", _NoThread)
        await memory.copy(torch.full((mib * MIB,), 1, dtype=torch.uint8), block, None)
    assert bytes(block.place.view()) == b"\1" * mib * MIB
    other = await memory.acquire(4 * MIB)
    await memory.copy(torch.full((4 * MIB,), 2, dtype=torch.uint8), other, None)
    assert bytes(block.place.view()) == b"\1" * mib * MIB
    assert bytes(other.place.view()) == b"\2" * 4 * MIB
    for one in (block, other):
        memory.unpin_owner(one.number)
    await memory.aclose()


async def test_work_that_nobody_waits_for_is_done_on_the_loop_if_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, done = Worker("worker under test"), list[int]()
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", _NoThread)
        worker.begin("something", lambda: done.append(1))
        assert done == [1]
    worker.begin("something", lambda: done.append(2))
    await worker.settle()
    assert done == [1, 2]
    worker.close()
