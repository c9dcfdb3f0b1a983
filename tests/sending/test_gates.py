"""Waits for permits and memory: grants in the iteration of another end, deadlocks, failures, long waits."""

import asyncio
import gc
from types import SimpleNamespace

import pytest

from aiotensor.errors import ClosedError
from aiotensor.memory import gates
from aiotensor.memory.gates import Gate, StuckError
from aiotensor.protocol.credits import Ticket

Waiting = asyncio.Task[Ticket[None]]


async def begin(gate: Gate[None], amount: int, holder: str | None = None) -> Waiting:
    """Begin to wait in a separate task, and return when it is in the queue."""
    waiting = gate.waiting
    task = asyncio.create_task(gate.acquire(amount, holder))
    while gate.waiting == waiting:
        assert not task.done()
        await asyncio.sleep(0)
    return task


async def test_a_waiter_cancelled_after_a_failure_leaves_no_unretrieved_exception() -> None:
    unseen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    gate: Gate[None] = Gate(10, stuck_elsewhere=int)
    await gate.acquire(10)
    waiting = await begin(gate, 1)

    gate.fail(lambda: ClosedError("closed"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del waiting
    gc.collect()

    assert unseen == []
    assert gate.waiting == 0


async def test_deadlocked_waiters_are_refused_one_by_one_from_the_latest() -> None:
    gate: Gate[None] = Gate(10, stuck_elsewhere=int)
    refused: list[str] = []

    async def want_too_much(holder: str) -> None:
        try:
            await gate.acquire(10, holder)
        except StuckError:
            refused.append(holder)
            gate.release(held[holder])

    held = {holder: await gate.acquire(2, holder) for holder in "abcde"}
    await asyncio.gather(*map(want_too_much, "abcde"))

    assert refused == ["e", "d", "c", "b", "a"]
    assert (gate.in_use, gate.waiting) == (0, 0)


async def test_a_refused_waiter_releases_a_grant_that_arrives_before_it_runs() -> None:
    gate: Gate[None] = Gate(10, stuck_elsewhere=int)
    held = await gate.acquire(10, "a")
    task = asyncio.create_task(gate.acquire(5, "a"))
    await asyncio.sleep(0)  # it is refused, and its task has not run yet
    gate.release(held)

    with pytest.raises(StuckError):
        await task
    assert (gate.in_use, gate.waiting) == (0, 0)


# Long waits


async def test_the_longest_of_the_present_waits_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(gates, "time", SimpleNamespace(monotonic=lambda: now))
    gate: Gate[None] = Gate(10, stuck_elsewhere=int)
    held = await gate.acquire(10)
    now += 9
    assert gate.longest_wait_s() == 0

    first = await begin(gate, 10)
    now += 1
    second = await begin(gate, 1)
    now += 9
    assert gate.longest_wait_s() == 10
    first.cancel()
    await asyncio.wait([first])
    assert gate.longest_wait_s() == 9
    gate.release(held)
    assert (await second).since == now
    assert gate.longest_wait_s() == 0
