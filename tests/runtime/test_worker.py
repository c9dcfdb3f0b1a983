"""Worker threads: results, failures and abandoned work."""

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aiotensor.runtime.worker import Worker, in_thread
from verification.waiting import until

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@asynccontextmanager
async def worker_at_work() -> AsyncIterator[tuple[Worker, threading.Event]]:
    """Return a worker with work that runs until an event is set."""
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


async def test_cancelled_work_that_has_not_begun_never_runs() -> None:
    ran: list[int] = []
    ended: list[int] = []
    async with worker_at_work() as (worker, _):
        second = worker.submit(lambda: ran.append(2), lambda: ended.append(2))
        second.cancel()
        await until(lambda: ended == [2])  # while the first still runs
    assert ran == []


async def test_cancelled_work_that_has_begun_runs_to_its_end() -> None:
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


async def test_an_error_of_background_work_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("worker under test")

    def fail() -> None:
        raise OSError("the disk is on fire")

    worker.begin("tidying up", fail)
    await worker.settle()
    await until(lambda: bool(caplog.records))
    assert "tidying up failed" in caplog.text
    assert "the disk is on fire" in caplog.text
    worker.close()


async def test_work_that_takes_long_delays_no_other() -> None:
    worker, go_on = Worker("worker under test"), threading.Event()
    long = [worker.submit(go_on.wait, takes_long=True) for _ in range(2)]
    assert await worker.submit(lambda: 7) == 7
    assert not any(future.done() for future in long)
    go_on.set()
    assert await asyncio.gather(*long) == [True, True]
    worker.close()


async def test_work_that_runs_at_the_end_delays_no_close_and_leaves_no_thread() -> None:
    worker, begun, go_on = Worker("worker under test"), threading.Barrier(3), threading.Event()

    def work() -> int:
        begun.wait()
        go_on.wait()
        return 7

    futures = [worker.submit(work, takes_long=kind) for kind in (False, True)]
    await asyncio.to_thread(begun.wait)
    worker.close()
    go_on.set()
    assert await asyncio.gather(*futures) == [7, 7]
    worker.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("worker under test")]


# Threads of anyio


class Thing:
    """An object that must be freed with its last reference."""


@pytest.mark.promise(29)
@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_in_thread_raises_the_error_and_keeps_no_reference_to_arguments(
    error: type[BaseException],
) -> None:
    def fail(thing: Thing) -> None:
        raise error("on purpose")

    things: list[weakref.ref[Thing]] = []

    async def work() -> None:
        thing = Thing()
        things.append(weakref.ref(thing))
        await in_thread(fail, thing)

    with pytest.raises(error, match="on purpose") as caught:
        await work()
    del caught
    assert await in_thread(int, "7") == 7  # the thread has forgotten it by now
    assert things[0]() is None


@pytest.mark.usefixtures("no_collections")
async def test_a_cancelled_call_runs_to_its_end_and_then_frees_its_arguments() -> None:
    begun, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def work(thing: Thing) -> Thing:
        begun.set()
        go_on.wait()
        over.set()
        return thing

    thing = Thing()
    alive = weakref.ref(thing)
    calling = asyncio.ensure_future(in_thread(work, thing))
    del thing
    await asyncio.to_thread(begun.wait)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert alive() is not None
    go_on.set()
    await asyncio.to_thread(over.wait)
    await until(lambda: alive() is None)
