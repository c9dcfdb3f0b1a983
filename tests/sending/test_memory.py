"""The shared memory of a sender is returned to the system when no tensor uses it."""

import asyncio
import contextlib
import os
import resource
import threading

import pytest
import torch

from aiotensor.memory import memory as memory_module
from aiotensor.memory.mapping import new_token
from aiotensor.memory.memory import Memory
from aiotensor.statistics.counters import new_counts
from aiotensor.types import SenderStatistics
from tests.memory.segments import lowered
from verification.internals import is_trimming, worker_of
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

MIB = 1 << 20


def new_memory(nbytes: int, keep_warm_s: float | None = 0.01) -> Memory:
    return Memory(nbytes, keep_warm_s, new_counts(SenderStatistics))


@pytest.mark.promise(30)
async def test_idle_memory_is_returned_to_the_system_and_the_timer_ends() -> None:
    memory = new_memory(8 * MIB)
    block = await memory.acquire(8 * MIB)
    await memory.copy(torch.full((8 * MIB,), 7, dtype=torch.uint8), block, None)
    descriptor = block.place.segment.descriptor.number
    assert os.fstat(descriptor).st_blocks * 512 == memory.warm_bytes == 8 * MIB
    memory.unpin_owner(block)
    await until(lambda: os.fstat(descriptor).st_blocks == 0)
    assert memory.warm_bytes == 0
    assert not is_trimming(memory)
    await memory.aclose()


async def test_the_memory_of_a_cancelled_copy_is_returned_to_the_system() -> None:
    memory = new_memory(64 * MIB)
    block = await memory.acquire(64 * MIB)
    descriptor = block.place.segment.descriptor.number
    copying = asyncio.create_task(memory.copy(torch.zeros(64 * MIB, dtype=torch.uint8), block, None))
    await until(lambda: os.fstat(descriptor).st_blocks > 0)
    copying.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await copying
    await until(lambda: os.fstat(descriptor).st_blocks == 0)
    await worker_of(memory).settle()
    assert memory.warm_bytes == 0
    assert memory.gate.in_use == 0
    await memory.aclose()


async def test_memory_reused_before_a_queued_return_is_not_returned() -> None:
    memory = new_memory(MIB)
    go_on = threading.Event()
    block = memory.try_acquire(MIB, None)
    assert block is not None
    memory.copy_now(torch.full((MIB,), 7, dtype=torch.uint8), block)
    memory.unpin_owner(block)
    worker_of(memory).submit(go_on.wait)  # the worker is busy with another copy
    await until(lambda: memory.warm_bytes == 0)  # the giving back is queued behind it
    again = memory.try_acquire(MIB, None)
    assert again is not None
    memory.copy_now(torch.full((MIB,), 9, dtype=torch.uint8), again)
    go_on.set()
    await worker_of(memory).settle()
    assert set(bytes(again.place.view())) == {9}
    await memory.aclose()


@pytest.mark.promise(9, 14, 30)
async def test_the_bytes_of_blocks_of_a_lost_reader_that_lives_on_are_granted_at_other_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_module, "_GRACE_S", 0.01)
    memory = new_memory(4 * MIB)
    [shared, read_here] = [await memory.acquire(2 * MIB) for _ in range(2)]
    for block in (shared, read_here):
        await memory.copy(torch.full((2 * MIB,), 7, dtype=torch.uint8), block, None)
        memory.pin([block.number])
    memory.unpin_owner(shared)
    reading, token = new_token()
    memory.reader_lost([shared.number, read_here.number], {shared.place.segment.number: reading})
    await until(lambda: memory.gate.in_use == 2 * MIB)
    for _ in range(3):
        block = await memory.acquire(2 * MIB)
        await memory.copy(torch.full((2 * MIB,), 9, dtype=torch.uint8), block, None)
        assert block.place.offset not in (shared.place.offset, read_here.place.offset)
        memory.unpin_owner(block)
    memory.unpin_owner(read_here)
    assert memory.gate.in_use == 0
    assert {*bytes(shared.place.view()), *bytes(read_here.place.view())} == {7}

    token.close()  # as the end of the process of the reader
    await until(lambda: memory.warm_bytes == 0)
    assert memory.largest_free == 4 * MIB
    assert not memory.blocks
    await memory.aclose()


@pytest.mark.promise(9, 14)
async def test_the_bytes_of_blocks_of_lost_readers_stay_in_use_while_too_few_addresses_remain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_module, "_GRACE_S", 0.01)
    with lowered(resource.RLIMIT_FSIZE, 1 << 40):
        memory = new_memory(4 * MIB)
    tokens, blocks = [], []
    for number in range(2):
        block = await memory.acquire(4 * MIB)
        await memory.copy(torch.full((4 * MIB,), number, dtype=torch.uint8), block, None)
        memory.pin([block.number])
        memory.unpin_owner(block)
        reading, token = new_token()
        memory.reader_lost([block.number], {block.place.segment.number: reading})
        tokens.append(token)
        blocks.append(block)
    await until(lambda: blocks[1].lost == 1)
    waiting = asyncio.create_task(memory.acquire(4 * MIB))
    await until(lambda: memory.gate.waiting == 1)
    assert (memory.gate.in_use, memory.kept_bytes) == (4 * MIB, 4 * MIB)

    tokens[0].close()
    last = await waiting
    await memory.copy(torch.full((4 * MIB,), 2, dtype=torch.uint8), last, None)
    assert set(bytes(blocks[1].place.view())) == {1}
    assert (memory.gate.in_use, memory.kept_bytes) == (4 * MIB, 0)
    tokens[1].close()
    await until(lambda: not blocks[1].lost)
    memory.unpin_owner(last)
    assert memory.largest_free == 4 * MIB
    await memory.aclose()


async def test_a_segment_has_only_the_addresses_of_the_arena_where_no_more_can_be_mapped() -> None:
    with lowered(resource.RLIMIT_FSIZE, 5 * MIB):
        memory = new_memory(4 * MIB)
        small, large = await memory.acquire(4096), await memory.acquire(4 * MIB - 4096)
    assert small.place.segment is large.place.segment
    assert large.place.segment.nbytes == 4 * MIB
    for block in (small, large):
        await memory.copy(torch.full((block.place.nbytes,), 7, dtype=torch.uint8), block, None)
        assert set(bytes(block.place.view())) == {7}
        memory.unpin_owner(block)
    await memory.aclose()


class _NoThread(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


async def test_a_copy_that_cannot_start_a_thread_fails_and_never_runs_later(
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
        memory.unpin_owner(one)
    await memory.aclose()


async def test_a_large_copy_is_made_by_one_thread_if_no_second_one_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = new_memory(16 * MIB)
    warm = await memory.acquire(8 * MIB)
    await memory.copy(torch.zeros(2 * MIB, dtype=torch.uint8), warm, None)  # the first thread
    memory.unpin_owner(warm)
    block = await memory.acquire(8 * MIB)
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", _NoThread)
        await memory.copy(torch.full((8 * MIB,), 1, dtype=torch.uint8), block, None)
    assert bytes(block.place.view()) == b"\1" * 8 * MIB
    other = await memory.acquire(4 * MIB)
    await memory.copy(torch.full((4 * MIB,), 2, dtype=torch.uint8), other, None)
    assert bytes(block.place.view()) == b"\1" * 8 * MIB
    assert bytes(other.place.view()) == b"\2" * 4 * MIB
    for one in (block, other):
        memory.unpin_owner(one)
    await memory.aclose()
