import asyncio
import gc

import pytest

from aiotensor.errors import AioTensorError, ClosedError, PeerLostError
from aiotensor.protocol.blocks import ALIGNMENT, Blocks
from aiotensor.protocol.credits import Ticket
from aiotensor.sending.gates import Gate, StuckError
from verification.waiting import until

Waiting = asyncio.Task[Ticket[None]]


def gate_of(limit: int) -> Gate[None]:
    return Gate(limit)


async def begin(gate: Gate[None], amount: int, holder: str | None = None) -> Waiting:
    """Begin to wait in a separate task, and return when it is in the queue."""
    waiting = gate.budget.waiting
    task = asyncio.create_task(gate.acquire(amount, holder))
    while gate.budget.waiting == waiting:
        assert not task.done()
        await asyncio.sleep(0)
    return task


async def test_acquire_does_not_yield_when_the_amount_is_free() -> None:
    gate = gate_of(10)
    others_ran: list[bool] = []
    asyncio.get_running_loop().call_soon(others_ran.append, True)
    await gate.acquire(10)

    assert not others_ran
    assert gate.budget.in_use == 10


async def test_waiters_are_granted_in_order_and_a_large_one_is_not_overtaken() -> None:
    gate = gate_of(10)
    most, rest = await gate.acquire(9), await gate.acquire(1)
    big, small = await begin(gate, 10), await begin(gate, 1)

    gate.release(most)
    assert not gate.budget.try_request(1)
    assert gate.budget.waiting == 2
    gate.release(rest)
    granted = await big
    assert not small.done()
    gate.release(granted)
    await small


async def test_try_acquire_succeeds_only_if_the_amount_is_free_and_nothing_waits() -> None:
    gate = gate_of(10)
    first = gate.budget.try_request(6)
    assert first is not None
    assert gate.budget.try_request(5) is None
    waiting = await begin(gate, 5)
    assert gate.budget.try_request(4) is None

    gate.release(first)
    await waiting
    assert gate.budget.try_request(5)


async def test_cancelling_a_waiter_grants_the_following_ones() -> None:
    gate = gate_of(10)
    await gate.acquire(6)
    big, small = await begin(gate, 10), await begin(gate, 4)

    big.cancel()
    await small

    assert big.cancelled()
    assert (gate.budget.in_use, gate.budget.waiting) == (10, 0)


@pytest.mark.parametrize("first", ["release", "cancel"])
async def test_a_waiter_cancelled_in_the_iteration_of_its_grant_releases_it(first: str) -> None:
    gate = gate_of(10)
    held = await gate.acquire(10)
    task, next_one = await begin(gate, 10), await begin(gate, 10)

    if first == "release":
        gate.release(held)
        task.cancel()
    else:
        task.cancel()
        gate.release(held)
    with pytest.raises(asyncio.CancelledError):
        await task
    await next_one

    assert (gate.budget.in_use, gate.budget.waiting) == (10, 0)


async def test_cancelling_some_of_many_waiters_leaves_nothing_in_use() -> None:
    gate = gate_of(7)
    most = 0

    async def work(number: int) -> None:
        nonlocal most
        amount = number % 7 + 1
        ticket = await gate.acquire(amount)
        try:
            most = max(most, gate.budget.in_use)
            for _ in range(number % 3):
                await asyncio.sleep(0)
        finally:
            gate.release(ticket)

    tasks = [asyncio.create_task(work(number)) for number in range(100)]
    for task in tasks[::4]:
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert most == gate.budget.peak == 7
    assert (gate.budget.in_use, gate.budget.waiting) == (0, 0)
    assert gate.longest_wait_s(asyncio.get_running_loop().time() + 9) == 0


async def test_an_amount_above_the_limit_raises_instead_of_waiting() -> None:
    gate = gate_of(10)

    with pytest.raises(ValueError, match="limit of 10"):
        await gate.acquire(11)
    assert not gate.budget.try_request(11)
    assert gate.budget.waiting == 0


async def test_fail_ends_present_and_future_waits_with_separate_errors() -> None:
    gate = gate_of(10)
    await gate.acquire(10)
    waiting = [await begin(gate, 1) for _ in range(3)]

    gate.fail(lambda: PeerLostError("gone", pid=42))
    errors = await asyncio.gather(*waiting, return_exceptions=True)
    with pytest.raises(PeerLostError) as caught:
        await gate.acquire(1)

    assert [type(error) for error in errors] == [PeerLostError] * 3
    assert len({id(error) for error in [*errors, caught.value]}) == 4
    assert (gate.budget.in_use, gate.budget.waiting) == (10, 0)


async def test_a_ticket_can_be_released_after_a_failure() -> None:
    gate = gate_of(10)
    held = await gate.acquire(10)
    waiting = await begin(gate, 10)
    gate.fail(lambda: ClosedError("closed"))
    gate.release(held)

    with pytest.raises(ClosedError):
        await waiting
    assert gate.budget.in_use == 0


async def test_a_grant_in_the_iteration_of_a_failure_is_released() -> None:
    gate = gate_of(10)
    held = await gate.acquire(10)
    waiting = await begin(gate, 10)

    gate.release(held)
    gate.fail(lambda: ClosedError("closed"))
    with pytest.raises(ClosedError):
        await waiting
    assert gate.budget.in_use == 0


async def test_a_waiter_cancelled_after_a_failure_leaves_no_unretrieved_exception() -> None:
    unseen: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    gate = gate_of(10)
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


async def test_the_latest_waiter_of_a_deadlock_is_refused() -> None:
    gate = gate_of(10)
    await gate.acquire(5, "a")
    of_b = await gate.acquire(5, "b")
    first = await begin(gate, 5, "a")

    with pytest.raises(StuckError, match="held by waiting calls"):
        await gate.acquire(5, "b")
    assert not first.done()
    gate.release(of_b)
    await first
    assert gate.budget.in_use == 10


async def test_an_earlier_waiter_is_refused_if_it_causes_the_deadlock() -> None:
    gate = gate_of(10)
    await gate.acquire(5, "a")
    other = await gate.acquire(5)
    greedy, patient = await begin(gate, 6, "a"), await begin(gate, 1, "new")

    gate.release(other)  # the first waiter owns all used bytes, and requests more
    with pytest.raises(StuckError):
        await greedy
    await patient
    assert gate.budget.in_use == 6


async def test_deadlocked_waiters_are_refused_one_by_one_from_the_latest() -> None:
    gate = gate_of(10)
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
    assert (gate.budget.in_use, gate.budget.waiting) == (0, 0)


async def test_a_refused_waiter_releases_a_grant_that_arrives_before_it_runs() -> None:
    gate = gate_of(10)
    held = await gate.acquire(10, "a")
    task = asyncio.create_task(gate.acquire(5, "a"))
    await asyncio.sleep(0)  # it is refused, and its task has not run yet
    gate.release(held)

    with pytest.raises(StuckError):
        await task
    assert (gate.budget.in_use, gate.budget.waiting) == (0, 0)


def test_being_stuck_is_an_aiotensor_error() -> None:
    assert issubclass(StuckError, AioTensorError)


# A failure that passes


async def test_fail_waiting_ends_present_waits_but_not_later_ones() -> None:
    gate = gate_of(10)
    held = await gate.acquire(10)
    waiting = [await begin(gate, 1) for _ in range(3)]

    gate.fail_waiting(lambda: PeerLostError("gone", pid=42))
    later = await begin(gate, 1)
    errors = await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(error) for error in errors] == [PeerLostError] * 3
    assert len({id(error) for error in errors}) == 3
    assert (gate.budget.in_use, gate.budget.waiting) == (10, 1)
    gate.release(held)
    await later
    assert gate.budget.in_use == 1


async def test_a_grant_in_the_iteration_of_fail_waiting_stays_granted() -> None:
    gate = gate_of(10)
    held = await gate.acquire(10)
    first, second = await begin(gate, 10), await begin(gate, 10)

    gate.release(held)
    gate.fail_waiting(lambda: PeerLostError("gone"))
    granted = await first
    with pytest.raises(PeerLostError):
        await second
    assert (gate.budget.in_use, gate.budget.waiting) == (10, 0)
    gate.release(granted)
    assert gate.budget.in_use == 0


async def test_a_release_in_the_iteration_of_fail_waiting_is_granted_to_later_waiters() -> None:
    gate = gate_of(10)
    held = await gate.acquire(10)
    failed = [await begin(gate, 10) for _ in range(3)]
    gate.fail_waiting(lambda: PeerLostError("gone"))
    gate.release(held)  # the failed waiters are granted it first, and release it
    later = asyncio.create_task(gate.acquire(10))

    errors = await asyncio.gather(*failed, return_exceptions=True)
    assert [type(error) for error in errors] == [PeerLostError] * 3
    await later
    assert (gate.budget.in_use, gate.budget.waiting) == (10, 0)


async def test_fail_waiting_without_waiters_has_no_effect() -> None:
    gate = gate_of(10)
    gate.fail_waiting(lambda: PeerLostError("gone"))

    await gate.acquire(10)


# A space


async def test_acquire_waits_while_the_free_space_is_fragmented() -> None:
    gate = Gate(4 * ALIGNMENT, space=Blocks(4 * ALIGNMENT))
    tickets = sorted([await gate.acquire(ALIGNMENT) for _ in range(4)], key=lambda ticket: ticket.place or 0)
    gate.release(tickets[0])
    gate.release(tickets[2])
    task = asyncio.create_task(gate.acquire(2 * ALIGNMENT))
    await asyncio.sleep(0)
    assert gate.budget.waiting == 1
    assert gate.budget.try_request(ALIGNMENT) is None

    gate.release(tickets[1])
    assert (await task).place == ALIGNMENT


async def test_a_waiter_cancelled_in_the_iteration_of_its_grant_releases_its_place() -> None:
    blocks = Blocks(ALIGNMENT)
    gate = Gate(ALIGNMENT, space=blocks)
    held = await gate.acquire(ALIGNMENT)
    task = asyncio.create_task(gate.acquire(ALIGNMENT))
    await asyncio.sleep(0)
    gate.release(held)
    assert blocks.in_use == ALIGNMENT
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert blocks.in_use == gate.budget.in_use == 0


# Long waits


class Alarms:
    """A gate that reports waits, and the list of its reports."""

    def __init__(self, long_wait_s: float | None) -> None:
        self.long_wait_s = long_wait_s
        self.amounts: list[int] = []
        self.gate: Gate[None] = Gate(10, long_wait_s=long_wait_s, on_long_wait=self.amounts.append)

    async def let_time_pass(self) -> None:
        await asyncio.sleep(0.02 + (self.long_wait_s or 0))


async def test_a_long_wait_is_reported_once_with_its_amount() -> None:
    alarms = Alarms(0.001)
    held = await alarms.gate.acquire(10)
    waiting = [await begin(alarms.gate, amount) for amount in (3, 4)]
    await alarms.let_time_pass()

    assert sorted(alarms.amounts) == [3, 4]
    assert alarms.gate.budget.waiting == 2, "it goes on"
    alarms.gate.release(held)
    await asyncio.gather(*waiting)
    await alarms.let_time_pass()
    assert sorted(alarms.amounts) == [3, 4]


@pytest.mark.parametrize("end", ["granted", "cancelled", "failed"])
async def test_a_wait_that_ends_in_time_is_not_reported(end: str) -> None:
    alarms = Alarms(0.1)
    held = await alarms.gate.acquire(10)

    def end_it() -> None:
        assert alarms.gate.budget.waiting == 1
        match end:
            case "granted":
                alarms.gate.release(held)
            case "cancelled":
                waiting.cancel()
            case _:
                alarms.gate.fail_waiting(lambda: PeerLostError("gone"))

    waiting = asyncio.create_task(alarms.gate.acquire(1))
    asyncio.get_running_loop().call_soon(end_it)  # in the turn in which it begins, whatever the clock says
    await asyncio.wait([waiting])
    assert end != "failed" or waiting.exception() is not None
    await alarms.let_time_pass()

    assert alarms.amounts == []


async def test_an_immediate_grant_is_not_reported() -> None:
    alarms = Alarms(0.001)
    await alarms.gate.acquire(10)
    await alarms.let_time_pass()

    assert alarms.amounts == []


async def test_no_wait_is_reported_without_long_wait_s() -> None:
    alarms = Alarms(None)
    await alarms.gate.acquire(10)
    waiting = await begin(alarms.gate, 1)
    await alarms.let_time_pass()

    assert alarms.amounts == []
    waiting.cancel()


async def test_every_overdue_wait_ends_with_an_error() -> None:
    amounts: list[int] = []
    gate: Gate[None] = Gate(
        10,
        long_wait_s=10,
        max_wait_s=0.02,
        overdue=lambda amount: PeerLostError(f"{amount} took too long"),
        on_long_wait=amounts.append,
    )
    held = await gate.acquire(10)
    for amount in (3, 4):
        with pytest.raises(PeerLostError, match=f"{amount} took too long"):
            await gate.acquire(amount)
    assert gate.budget.waiting == 0
    gate.release(held)
    await gate.acquire(10)
    assert amounts == []


async def test_a_second_long_wait_is_reported_before_the_first_one_is_overdue() -> None:
    amounts: list[int] = []
    gate: Gate[None] = Gate(10, long_wait_s=0.02, max_wait_s=60, on_long_wait=amounts.append)
    await gate.acquire(10)
    first = await begin(gate, 1)
    while amounts != [1]:
        await asyncio.sleep(0.01)
    second = await begin(gate, 2)
    while amounts != [1, 2]:
        await asyncio.sleep(0.01)
    for waiting in (first, second):
        waiting.cancel()
    await asyncio.wait([first, second])


async def test_an_error_while_reporting_does_not_disable_other_limits() -> None:
    def fail(amount: int) -> None:
        raise RuntimeError(f"cannot report {amount}")

    gate: Gate[None] = Gate(
        10, long_wait_s=0.01, max_wait_s=0.03, on_long_wait=fail, overdue=lambda _: PeerLostError("too long")
    )
    await gate.acquire(10)
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: errors.append(str(context["exception"]))
    )
    for amount in (1, 2):
        with pytest.raises(PeerLostError, match="too long"):
            await gate.acquire(amount)
    assert errors == ["cannot report 1", "cannot report 2"]


async def test_the_longest_of_the_present_waits_is_known() -> None:
    gate, now = gate_of(10), asyncio.get_running_loop().time
    assert gate.longest_wait_s(now()) == 0
    held = await gate.acquire(10)
    assert gate.longest_wait_s(now() + 9) == 0

    before = now()
    first = await begin(gate, 10)
    after = now()
    second = await begin(gate, 1)
    assert 9 - (after - before) <= gate.longest_wait_s(before + 9) <= 9
    first.cancel()
    await asyncio.wait([first])
    assert gate.longest_wait_s(after + 9) <= 9
    gate.release(held)
    await second
    assert gate.longest_wait_s(now() + 9) == 0


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a wait"])
async def test_a_ticket_records_when_it_was_granted(waits: bool) -> None:
    gate, now = gate_of(10), asyncio.get_running_loop().time
    before = now()
    ticket = await gate.acquire(10)
    if waits:
        waiting = await begin(gate, 10)
        before = now()
        gate.release(ticket)
        ticket = await waiting

    assert before <= ticket.since <= now()


async def test_a_wait_that_was_granted_does_not_hide_the_longest_one() -> None:
    gate, now = gate_of(1), asyncio.get_running_loop().time
    held = await gate.acquire(1)
    first, second = await begin(gate, 1), await begin(gate, 1)
    began = now()
    await until(lambda: now() > began + 0.01)

    gate.release(held)  # grants the first, whose task has not resumed yet
    assert gate.longest_wait_s(now()) > 0.01
    gate.release(await first)
    gate.release(await second)
