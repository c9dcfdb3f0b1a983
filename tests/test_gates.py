import asyncio
import gc

import pytest

from aiotensor.errors import AioTensorError, ClosedError, PeerLostError
from aiotensor.gates import Gate, StuckError


async def begin(gate: Gate, amount: int, holder: str | None = None) -> "asyncio.Task[None]":
    """Begin to wait in a task of its own, and return when it is in line."""
    waiting = gate.budget.waiting
    task = asyncio.create_task(gate.acquire(amount, holder))
    while gate.budget.waiting == waiting:
        assert not task.done()
        await asyncio.sleep(0)
    return task


async def test_what_is_free_is_granted_without_giving_way_to_others() -> None:
    gate = Gate(10)
    others_ran: list[bool] = []
    asyncio.get_running_loop().call_soon(others_ran.append, True)
    await gate.acquire(10)

    assert not others_ran
    assert gate.budget.in_use == 10


async def test_waiters_are_served_in_order_and_a_big_one_is_not_overtaken() -> None:
    gate = Gate(10)
    await gate.acquire(10)
    big, small = await begin(gate, 10), await begin(gate, 1)

    gate.release(9)
    assert not gate.try_acquire(1)
    assert gate.budget.waiting == 2
    gate.release(1)
    await big
    assert not small.done()
    gate.release(10)
    await small


async def test_an_amount_that_is_free_is_taken_without_waiting_unless_others_wait() -> None:
    gate = Gate(10)
    assert gate.try_acquire(6)
    assert not gate.try_acquire(5)
    waiting = await begin(gate, 5)
    assert not gate.try_acquire(4)

    gate.release(6)
    await waiting
    assert gate.try_acquire(5)


async def test_a_cancelled_waiter_leaves_the_line_and_lets_those_behind_through() -> None:
    gate = Gate(10)
    await gate.acquire(6)
    big, small = await begin(gate, 10), await begin(gate, 4)

    big.cancel()
    await small

    assert big.cancelled()
    assert (gate.budget.in_use, gate.budget.waiting) == (10, 0)


@pytest.mark.parametrize("first", ["release", "cancel"])
async def test_a_waiter_cancelled_in_the_turn_of_its_grant_gives_it_back(first: str) -> None:
    gate = Gate(10)
    await gate.acquire(10)
    task, next_one = await begin(gate, 10), await begin(gate, 10)

    if first == "release":
        gate.release(10)
        task.cancel()
    else:
        task.cancel()
        gate.release(10)
    with pytest.raises(asyncio.CancelledError):
        await task
    await next_one

    assert (gate.budget.in_use, gate.budget.waiting) == (10, 0)


async def test_a_hundred_waiters_of_whom_some_are_cancelled_leave_nothing_in_use() -> None:
    gate = Gate(7)
    most = 0

    async def work(number: int) -> None:
        nonlocal most
        amount = number % 7 + 1
        await gate.acquire(amount)
        try:
            most = max(most, gate.budget.in_use)
            for _ in range(number % 3):
                await asyncio.sleep(0)
        finally:
            gate.release(amount)

    tasks = [asyncio.create_task(work(number)) for number in range(100)]
    for task in tasks[::4]:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert most == gate.budget.peak == 7
    assert (gate.budget.in_use, gate.budget.waiting) == (0, 0)
    assert not gate._futures


async def test_what_could_never_be_granted_does_not_wait() -> None:
    gate = Gate(10)

    with pytest.raises(ValueError, match="limit of 10"):
        await gate.acquire(11)
    assert not gate.try_acquire(11)
    assert gate.budget.waiting == 0


async def test_a_failure_ends_every_wait_with_an_error_of_its_own_and_those_to_come() -> None:
    gate = Gate(10)
    await gate.acquire(10)
    waiting = [await begin(gate, 1) for _ in range(3)]

    gate.fail(lambda: PeerLostError("gone", pid=42))
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    with pytest.raises(PeerLostError) as caught:
        await gate.acquire(1)

    assert [type(error) for error in errors] == [PeerLostError] * 3
    assert len({id(error) for error in [*errors, caught.value]}) == 4
    assert (gate.budget.in_use, gate.budget.waiting) == (10, 0)


async def test_what_was_held_before_a_failure_can_be_given_back_after_it() -> None:
    gate = Gate(10)
    await gate.acquire(10)
    waiting = await begin(gate, 10)
    gate.fail(lambda: ClosedError("closed"))
    gate.release(10)

    with pytest.raises(ClosedError):
        await waiting
    assert gate.budget.in_use == 0


async def test_a_grant_in_the_turn_of_a_failure_is_given_back() -> None:
    gate = Gate(10)
    await gate.acquire(10)
    waiting = await begin(gate, 10)

    gate.release(10)
    gate.fail(lambda: ClosedError("closed"))
    with pytest.raises(ClosedError):
        await waiting
    assert gate.budget.in_use == 0


async def test_a_waiter_that_is_cancelled_and_failed_at_once_leaves_no_error_unseen() -> None:
    unseen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    gate = Gate(10)
    await gate.acquire(10)
    waiting = await begin(gate, 1)

    gate.fail(lambda: ClosedError("closed"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del waiting
    gc.collect()

    assert unseen == []
    assert gate.budget.waiting == 0


async def test_when_all_that_hold_wait_for_more_the_latest_is_refused_and_the_others_go_on() -> None:
    gate = Gate(10)
    await gate.acquire(5, "a")
    await gate.acquire(5, "b")
    first = await begin(gate, 5, "a")

    with pytest.raises(StuckError, match="held by those who wait"):
        await gate.acquire(5, "b")
    assert not first.done()
    gate.release(5, "b")
    await first
    assert gate.budget.in_use == 10


async def test_it_may_be_an_earlier_waiter_that_is_refused() -> None:
    gate = Gate(10)
    await gate.acquire(5, "a")
    await gate.acquire(5)
    greedy, patient = await begin(gate, 6, "a"), await begin(gate, 1, "new")

    gate.release(5)  # all that is in use belongs to the first in line now, and it wants more
    with pytest.raises(StuckError):
        await greedy
    await patient
    assert gate.budget.in_use == 6


async def test_all_who_are_stuck_are_refused_one_after_the_other_the_latest_first() -> None:
    gate = Gate(10)
    refused: list[str] = []

    async def want_too_much(holder: str) -> None:
        try:
            await gate.acquire(10, holder)
        except StuckError:
            refused.append(holder)
            gate.release(2, holder)

    for holder in "abcde":
        await gate.acquire(2, holder)
    await asyncio.gather(*map(want_too_much, "abcde"))

    assert refused == ["e", "d", "c", "b", "a"]
    assert (gate.budget.in_use, gate.budget.waiting) == (0, 0)


async def test_a_refused_waiter_whose_turn_comes_all_the_same_gives_the_grant_back() -> None:
    gate = Gate(10)
    await gate.acquire(10, "a")
    task = asyncio.create_task(gate.acquire(5, "a"))
    await asyncio.sleep(0)  # it is refused, and has not heard of it
    gate.release(10, "a")

    with pytest.raises(StuckError):
        await task
    assert (gate.budget.in_use, gate.budget.waiting) == (0, 0)


def test_being_stuck_is_an_aiotensor_error() -> None:
    assert issubclass(StuckError, AioTensorError)
