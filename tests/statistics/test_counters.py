import asyncio
import itertools
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiotensor import errors
from aiotensor.protocol.credits import Ticket
from aiotensor.sending.gates import Gate
from aiotensor.statistics.counters import ERROR_NAMES, ErrorCounter, WaitCounter, new_counts, snapshot
from aiotensor.types import ClientStatistics, ServerStatistics, Waits


@given(st.lists(st.one_of(st.floats(0, 100), st.sampled_from(WaitCounter().waits().bounds_s)), max_size=50))
def test_each_wait_is_counted_by_the_first_bound_that_it_did_not_exceed(lasted: list[float]) -> None:
    tally = WaitCounter()
    for seconds in lasted:
        tally.add(seconds)
    waits = tally.waits()

    assert len(waits.counts) == len(waits.bounds_s) + 1
    for bound, below in zip(waits.bounds_s, itertools.accumulate(waits.counts), strict=False):
        assert below == sum(seconds <= bound for seconds in lasted)
    assert sum(waits.counts) == len(lasted)
    assert waits.total_s == pytest.approx(sum(lasted))


def test_the_bounds_of_waits_range_from_a_millisecond_to_a_minute() -> None:
    bounds = WaitCounter().waits().bounds_s

    assert (bounds[0], bounds[-1]) == (0.001, 60.0)
    assert list(bounds) == sorted(set(bounds))


def _waits(gate: Gate[None]) -> int:
    return sum(gate.waited.waits().counts)


async def _begin(gate: Gate[None]) -> "asyncio.Task[Ticket[None]]":
    waiting = gate.budget.waiting
    task = asyncio.create_task(gate.acquire(1))
    while gate.budget.waiting == waiting:
        await asyncio.sleep(0)
    return task


async def test_waits_are_counted_when_granted_cancelled_or_failed() -> None:
    gate: Gate[None] = Gate(1)
    first = await gate.acquire(1)
    assert _waits(gate) == 0  # it did not wait

    granted, cancelled, failed = [await _begin(gate) for _ in range(3)]
    assert _waits(gate) == 0  # they have not ended
    gate.release(first)
    ticket = await granted
    assert _waits(gate) == 1
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert _waits(gate) == 2
    gate.fail(lambda: errors.ClosedError("closed"))
    await asyncio.wait([failed])
    assert isinstance(failed.exception(), errors.ClosedError)
    assert _waits(gate) == 3
    with pytest.raises(errors.ClosedError):
        await gate.acquire(1)  # refused at once
    assert _waits(gate) == 3
    gate.release(ticket)


async def test_an_immediate_acquire_is_not_counted_as_a_wait() -> None:
    gate: Gate[None] = Gate(2)
    assert gate.budget.try_request(1) is not None
    await gate.acquire(1)
    assert gate.budget.try_request(1) is None

    assert gate.waited.waits() == Waits(gate.waited.waits().bounds_s, (0,) * 16, 0.0)


class _Theirs(errors.PeerLostError):
    """An error derived from one of the library."""


class _Namesake(Exception):  # noqa: N818 - it is called like one of ours
    """An error of another library."""


_Namesake.__name__ = "ClosedError"

COUNTED = {
    errors.ClosedError("closed"): "ClosedError",
    errors.UnsupportedTensorError("sparse"): "UnsupportedTensorError",
    errors.UsageError("in a thread"): "UsageError",
    _Theirs("lost"): "PeerLostError",
    errors.AioTensorError("another"): "AioTensorError",
    OSError(12, "no memory"): "OSError",
    ConnectionResetError(104, "reset"): "OSError",
    TimeoutError(): "OSError",
    ValueError("negative"): "other",
    TypeError("no tensor"): "other",
    _Namesake(): "other",
}


@pytest.mark.parametrize("error", COUNTED, ids=lambda error: type(error).__qualname__)
def test_errors_are_counted_under_a_fixed_set_of_names(error: Exception) -> None:
    tally = ErrorCounter()
    for _ in range(2):
        with pytest.raises(type(error)), tally:
            raise error
    tally.add(error)

    assert tally.counts() == {COUNTED[error]: 3}
    assert COUNTED[error] in ERROR_NAMES
    error.__traceback__ = None


def test_every_error_of_the_library_has_its_name() -> None:
    for name in errors.__all__:
        tally = ErrorCounter()
        tally.add(getattr(errors, name)("an error"))
        assert tally.counts() == {name: 1}


def test_neither_success_nor_being_cancelled_is_an_error() -> None:
    tally = ErrorCounter()
    with tally:
        pass
    for ending in (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(ending), tally:
            raise ending

    assert tally.counts() == {}


def test_an_error_that_was_counted_is_not_kept() -> None:
    tally = ErrorCounter()
    error = _Theirs("lost")
    gone = weakref.ref(error)
    tally.add(error)
    del error

    assert gone() is None


def test_counts_returns_a_copy() -> None:
    tally = ErrorCounter()
    tally.add(ValueError())
    tally.counts()["other"] = 100

    assert tally.counts() == {"other": 1}


def test_new_counts_are_zeros_for_the_declared_counters_that_are_plain_numbers() -> None:
    assert new_counts(ClientStatistics) == dict.fromkeys(
        ("messages_sent", "answers", "failures", "cancelled", "servers_lost", "retries"), 0
    )
    assert new_counts(ClientStatistics) is not new_counts(ClientStatistics)
    with pytest.raises(KeyError):
        new_counts(ServerStatistics)["message_received"] += 1  # not declared


def test_a_snapshot_has_the_counts_of_its_moment_and_all_other_fields() -> None:
    counts = new_counts(ClientStatistics)
    counts["answers"] += 2
    taken = snapshot(
        ClientStatistics, counts, servers=1, in_flight=(3,), waiting=0, servers_lost=4, errors={}
    )
    counts["answers"] += 1

    assert taken == ClientStatistics(1, (3,), 0, 0, 2, 0, 0, 4, 0, {})
    with pytest.raises(TypeError, match="servers"):
        snapshot(ClientStatistics, counts, in_flight=(3,), waiting=0, errors={})
