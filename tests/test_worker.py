"""The thread for what takes long: what becomes of work that fails, or that nobody wants any more."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiotensor.worker import Worker
from tests.pairs import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@asynccontextmanager
async def worker_at_work() -> AsyncIterator[tuple[Worker, threading.Event]]:
    """Make a worker that has something to do until it is let go."""
    worker, go_on = Worker("worker under test"), threading.Event()
    begun = threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()

    first = worker.submit(work)
    await asyncio.to_thread(begun.wait)
    try:
        yield worker, go_on
    finally:
        go_on.set()
        await first
        await worker.settle()
        worker.close()


async def test_work_that_has_not_begun_is_taken_back_when_it_is_cancelled() -> None:
    ran: list[int] = []
    ended: list[int] = []
    async with worker_at_work() as (worker, _):
        second = worker.submit(lambda: ran.append(2), lambda: ended.append(2))
        second.cancel()
        await until(lambda: ended == [2])  # while the first still runs
    assert ran == []


async def test_work_that_has_begun_goes_on_when_it_is_cancelled_and_then_ends() -> None:
    ended: list[int] = []
    worker, begun, go_on = Worker("worker under test"), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()

    future = worker.submit(work, lambda: ended.append(1))
    await asyncio.to_thread(begun.wait)
    future.cancel()
    await asyncio.sleep(0)
    assert ended == []
    go_on.set()
    await worker.settle()
    assert ended == [1]
    worker.close()


async def test_an_error_of_the_callback_strands_nobody() -> None:
    worker = Worker("worker under test")
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    def fail() -> None:
        raise ZeroDivisionError

    assert await worker.submit(lambda: 7, fail) == 7
    await worker.settle()
    worker.close()
    assert len(errors) == 1


async def test_an_error_of_work_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("worker under test")

    def fail() -> None:
        raise OSError("the disk is on fire")

    worker.begin("tidying up", fail)
    await worker.settle()
    await until(lambda: bool(caplog.records))
    assert "tidying up failed" in caplog.text
    assert "the disk is on fire" in caplog.text
    worker.close()


async def test_work_that_runs_when_the_worker_is_closed_can_still_hand_over_a_part() -> None:
    worker, begun, go_on = Worker("worker under test"), threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        go_on.wait()
        return worker.helper.submit(lambda: 7).result()

    future = worker.submit(work)
    await asyncio.to_thread(begun.wait)
    worker.close()
    go_on.set()
    assert await future == 7
    worker.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker under test")]
