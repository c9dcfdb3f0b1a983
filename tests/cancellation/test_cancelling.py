"""The helper that cancels everywhere: it reaches every suspension, and finds whatever is left behind."""

import asyncio
import io
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from aiotensor.protocol.mailbox import Key
from tests.cancelling import Attempt, Way, cancel_everywhere
from tests.pairs import Pair, pair
from verification.internals import drainers_of, memory_of, pipeline_of, senders_of
from verification.patterns import BIG, pattern
from verification.waiting import until

Seen = list[tuple[str, ...]]

_MORE_TURNS = 20  # than pass before anything is cancelled, however long they take


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _set_later(future: "asyncio.Future[None]", turns: int) -> None:
    if turns:
        asyncio.get_running_loop().call_soon(_set_later, future, turns - 1)
    else:
        _set(future)


async def _two_steps(seen: Seen) -> str:
    """Suspend without a future, then at one; and once more to clean up after the second."""
    steps: list[str] = []
    seen_before = len(seen)
    try:
        steps.append("turn")
        await asyncio.sleep(0)
        steps.append("future")
        future = asyncio.get_running_loop().create_future()
        _set_later(future, _MORE_TURNS)
        try:
            await future
        except asyncio.CancelledError:
            steps.append("cleaning, it was there" if not future.cancelled() else "cleaning")
            await asyncio.sleep(0)
            steps.append("clean")
            raise
    finally:
        assert len(seen) == seen_before
        seen.append(tuple(steps))
    return "done"


async def test_an_operation_is_cancelled_at_each_suspension_and_again_where_it_cleans_up() -> None:
    seen: Seen = []

    async def attempt(attempt: Attempt) -> None:
        running = attempt.start(_two_steps(seen))
        if await running.completed():
            assert running.value == "done"

    found = await cancel_everywhere(attempt)
    assert found == {Way.AT_ONCE: 2, Way.LATER: 1, Way.WITH_RESULT: 2}  # three turns are more than one
    everything, first = ("turn", "future"), ("turn",)
    second = (*everything, "cleaning", "clean"), (*everything, "cleaning")
    second_with_result = (
        (*everything, "cleaning, it was there", "clean"),
        (*everything, "cleaning, it was there"),
    )
    assert seen == [
        everything,
        *(first, *second, everything),
        *(everything, *second, everything),
        *(first, *second_with_result, everything),
    ]


async def test_results_arrive_after_the_cancellation_or_in_the_same_iteration() -> None:
    order: list[str] = []

    async def attempt(attempt: Attempt) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            try:
                await future
            except asyncio.CancelledError:
                order.append("cancelled")
                raise

        running = attempt.start(wait())

        def give() -> None:
            order.append(f"given to {'none' if future.done() else 'it'}")
            _set(future)

        if attempt.plan.at == 1:
            order.append(attempt.plan.way.name)
        await running.bring(give)
        await running.completed()

    found = await cancel_everywhere(attempt)
    assert found == dict.fromkeys(Way, 1) or found == dict.fromkeys(set(Way) - {Way.LATER}, 1)
    text = " ".join(order)
    assert "WHILE_WAITING cancelled given to none" in text
    assert "BEFORE_RESULT given to none cancelled" in text
    assert "WITH_RESULT given to it cancelled" in text


async def test_an_operation_that_never_suspends_is_never_cancelled() -> None:
    async def at_once() -> int:
        return 5

    async def attempt(attempt: Attempt) -> None:
        running = attempt.start(at_once())
        assert await running.completed()
        assert running.value == 5

    assert not await cancel_everywhere(attempt)


_kept: list[Any] = []


async def _keeps_a_permit(pair: Pair) -> None:
    ticket = await pipeline_of(pair.sender).grants.permits.acquire(1)
    await asyncio.sleep(0)  # no `try`
    pipeline_of(pair.sender).grants.permits.release(ticket)


async def _keeps_memory(pair: Pair) -> None:
    block = await memory_of(pair.sender).acquire(BIG)
    await asyncio.sleep(0)
    memory_of(pair.sender).unpin_owner(block.number)


async def _keeps_a_lease(pair: Pair) -> None:
    handle = await pair.sender.send(pattern(0, BIG))
    tensor = await pair.receiver.receive(handle)
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        _kept.append(tensor)
        raise


async def _keeps_a_tensor_unclaimed(pair: Pair) -> None:
    handle = await pair.sender.send(pattern(0, 3))
    await until(lambda: pair.receiver.statistics().unclaimed_tensors == 1)
    pair.receiver.receive_nowait(handle)


async def _keeps_a_claim(pair: Pair) -> None:
    handle = pair.sender.send_nowait(pattern(0, 3))
    key = Key(handle.sender, handle.message, handle.tensor)
    senders_of(pair.receiver).mailbox.claims.add(key)
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        await until(lambda: pair.receiver.statistics().unclaimed_tensors == 1)
        pair.receiver.receive_nowait(handle)
        raise
    senders_of(pair.receiver).mailbox.claims.remove(key)
    await pair.receiver.receive(handle)


async def _keeps_a_place_in_line(pair: Pair) -> None:
    drainers = drainers_of(pair.sender)
    future = asyncio.get_running_loop().create_future()
    drainers.append(future)
    await asyncio.sleep(0)
    drainers.remove(future)


async def _keeps_a_task(pair: Pair) -> None:
    task = asyncio.create_task(asyncio.Event().wait())
    _kept.append(task)
    await asyncio.sleep(0)
    task.cancel()


async def _keeps_a_descriptor(pair: Pair) -> None:
    file = os.fdopen(os.memfd_create("aiotensor"), "rb")
    _kept.append(file)
    await asyncio.sleep(0)
    file.close()


async def _keeps_a_thread(pair: Pair) -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, name="aiotensor-left", daemon=True)
    thread.start()
    _kept.append((go_on, thread))
    await asyncio.sleep(0)
    go_on.set()
    thread.join()  # otherwise it may still be running during the search for leaks


async def _hides_an_error(pair: Pair) -> None:
    future = asyncio.get_running_loop().create_future()
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        future.set_exception(ZeroDivisionError("nobody looks at it"))
        raise


async def _swallows_the_cancellation(pair: Pair) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(0)


LEAKS: dict[str, tuple[Callable[[Pair], Coroutine[Any, Any, None]], str]] = {
    "a permit": (_keeps_a_permit, "permits of TensorSender"),
    "memory": (_keeps_memory, "bytes of TensorSender"),
    "a lease": (_keeps_a_lease, "leases of TensorReceiver"),
    "a tensor that nobody takes": (_keeps_a_tensor_unclaimed, "unclaimed tensors of TensorReceiver"),
    "a claim": (_keeps_a_claim, "claims of TensorReceiver"),
    "a place in line": (_keeps_a_place_in_line, "drainers of TensorSender"),
    "a task": (_keeps_a_task, "tasks"),
    "a descriptor": (_keeps_a_descriptor, "descriptors"),
    "a thread": (_keeps_a_thread, "threads"),
    "an error that nobody sees": (_hides_an_error, "nobody looks at it"),
    "nothing, but continues": (_swallows_the_cancellation, "ignored its cancellation"),
}


@pytest.mark.parametrize(("operation", "found"), LEAKS.values(), ids=LEAKS)
async def test_resources_left_by_a_cancelled_operation_are_detected(
    operation: Callable[[Pair], Coroutine[Any, Any, None]], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.holdings._PATIENCE_S", 0.05)  # each run waits for all of it
    async with pair() as (sender, receiver):

        async def attempt(attempt: Attempt) -> None:
            await attempt.start(operation(Pair(sender, receiver))).completed()

        with pytest.raises(AssertionError, match=found) as caught:
            await cancel_everywhere(attempt, sender, receiver)
        assert any("cancelled at suspension" in note for note in caught.value.__notes__)
    for kept in _kept:
        match kept:
            case asyncio.Task():
                kept.cancel()
            case threading.Event() as go_on, threading.Thread() as thread:
                go_on.set()
                thread.join()
            case io.IOBase():
                kept.close()
    _kept.clear()
