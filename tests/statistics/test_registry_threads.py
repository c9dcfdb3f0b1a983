"""Any thread collects the statistics of all loops; each loop reads its own objects."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.statistics import registry
from aiotensor.statistics.registry import Snapshot
from tests.statistics.objects import (
    PATIENCE_S,
    Counted,
    answers_at,
    close,
    loop_in_a_thread,
    open_counted,
    present,
    run_in,
)


@contextmanager
def blocked(loop: asyncio.AbstractEventLoop, first: Callable[[], object] = int) -> Iterator[None]:
    """Block a loop of another thread, after a first call in it."""
    is_blocked, go_on = threading.Event(), threading.Event()

    def block() -> None:
        first()
        is_blocked.set()
        go_on.wait()

    loop.call_soon_threadsafe(block)
    is_blocked.wait()
    try:
        yield
    finally:
        go_on.set()


def queried(loop: asyncio.AbstractEventLoop) -> threading.Event:
    """Return an event that is set once another thread has scheduled a call in a loop."""
    event, schedule = threading.Event(), loop.call_soon_threadsafe

    def call_soon_threadsafe(*args: Any, **options: Any) -> asyncio.Handle:
        handle = schedule(*args, **options)
        event.set()
        return handle

    loop.call_soon_threadsafe = call_soon_threadsafe  # type: ignore[method-assign,assignment]
    return event


def test_an_object_is_read_in_its_own_thread_only() -> None:
    with loop_in_a_thread() as loop:
        opened: list[tuple[Counted, LoopAffinity]] = []
        run_in(loop, lambda: opened.append(open_counted(1, "queried")))
        [(counted, affinity)] = opened
        snapshot = registry.collect(PATIENCE_S)
        assert (answers_at(snapshot, "queried"), snapshot.unanswered) == (1, 0)
        assert threading.get_ident() not in counted.readers
        run_in(loop, lambda: close(affinity))
        assert not present(registry.collect(PATIENCE_S), "queried")


def test_the_last_statistics_of_a_loop_that_does_not_answer_are_returned_again() -> None:
    with loop_in_a_thread() as loop:
        opened: list[tuple[Counted, LoopAffinity]] = []
        run_in(loop, lambda: opened.append(open_counted(3, "blocked")))
        assert answers_at(registry.collect(PATIENCE_S), "blocked") == 3
        with blocked(loop):
            opened[0][0].answers = 4
            snapshot = registry.collect(0.05)
        assert (answers_at(snapshot, "blocked"), snapshot.unanswered) == (3, 1)
        assert len(present(snapshot, "blocked")) == 1
        snapshot = registry.collect(PATIENCE_S)
        assert (answers_at(snapshot, "blocked"), snapshot.unanswered) == (4, 0)


def test_a_query_that_was_not_answered_in_time_is_withdrawn() -> None:
    with loop_in_a_thread() as loop:
        opened: list[tuple[Counted, LoopAffinity]] = []
        run_in(loop, lambda: opened.append(open_counted(3, "withdrawn")))
        counted = opened[0][0]
        with blocked(loop):
            assert registry.collect(0.0).unanswered == 1
        run_in(loop, lambda: None)  # after the call that the query has scheduled
        assert not counted.readers


def test_a_loop_that_does_not_run_is_not_waited_for() -> None:
    loop = asyncio.new_event_loop()
    opened: list[tuple[Counted, LoopAffinity]] = []

    async def run() -> None:
        opened.append(open_counted(1, "stopped"))

    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(loop.run_until_complete, run()).result()
        snapshot = registry.collect(PATIENCE_S * 100)  # longer than this test may take
        assert snapshot.unanswered == 0
        assert not present(snapshot, "stopped")  # it was never read
        loop.close()
        assert registry.collect(PATIENCE_S * 100).unanswered == 0


def collect_amid_end() -> tuple[Snapshot, weakref.ref[asyncio.AbstractEventLoop]]:
    """Query a loop that ends without answering, and return the snapshot and a reference to the loop."""
    is_open = threading.Event()
    opened: list[tuple[Counted, LoopAffinity]] = []
    loop = asyncio.new_event_loop()
    is_queried = queried(loop)

    async def run() -> None:
        opened.append(open_counted(1, "ends"))
        loop.stop()
        is_open.set()
        is_queried.wait()  # the loop has no further iteration for later calls

    def live() -> None:
        task = loop.create_task(run())
        loop.run_forever()
        loop.close()
        del task

    with ThreadPoolExecutor(1) as elsewhere:
        living = elsewhere.submit(live)
        is_open.wait()
        snapshot = registry.collect(PATIENCE_S * 100)  # longer than this test may take
        living.result(PATIENCE_S)
    return snapshot, weakref.ref(loop)


def test_a_loop_that_ends_with_a_pending_query_is_neither_waited_for_nor_kept() -> None:
    snapshot, loop = collect_amid_end()
    assert snapshot.unanswered == 0
    registry.collect(0.0)  # removes the entry of its object
    gc.collect()
    assert loop() is None


def test_counts_of_a_closed_object_do_not_change_any_more() -> None:
    with loop_in_a_thread() as loop:
        opened: list[tuple[Counted, LoopAffinity]] = []
        run_in(loop, lambda: opened.append(open_counted(1, "late")))
        [(counted, affinity)] = opened

        def close_and_count() -> None:
            close(affinity)
            loop.call_soon(lambda: setattr(counted, "answers", 100))  # after the object was removed

        with ThreadPoolExecutor(1) as elsewhere:
            with blocked(loop, close_and_count):
                is_queried = queried(loop)
                collecting = elsewhere.submit(registry.collect, PATIENCE_S)
                is_queried.wait()
            assert answers_at(collecting.result(), "late") == 1
        assert counted.answers == 100
        assert answers_at(registry.collect(PATIENCE_S), "late") == 1


def test_two_loops_that_query_each_other_both_get_an_answer() -> None:
    opened: list[tuple[Counted, LoopAffinity]] = []
    both = threading.Barrier(2)
    snapshots: list[Snapshot] = []

    def collect() -> None:
        both.wait()  # from here on each of the two loops is blocked
        snapshots.append(registry.collect(PATIENCE_S))

    with loop_in_a_thread() as one, loop_in_a_thread() as another:
        for loop in (one, another):
            run_in(loop, lambda: opened.append(open_counted(1, "mutual")))
        for loop in (one, another):
            loop.call_soon_threadsafe(collect)
        for loop in (one, another):
            run_in(loop, lambda: None)
    assert [snapshot.unanswered for snapshot in snapshots] == [0, 0]
    assert [answers_at(snapshot, "mutual") for snapshot in snapshots] == [2, 2]


def test_several_threads_may_collect_while_objects_open_and_close() -> None:
    end = threading.Event()
    seen: list[list[float]] = []

    def watch() -> None:
        mine: list[float] = []
        while not end.is_set():
            with suppress(KeyError):  # no object was open yet
                mine.append(answers_at(registry.collect(PATIENCE_S), "busy"))
        seen.append(mine)

    async def open_and_close() -> None:
        for _ in range(200):
            counted, affinity = open_counted(0, "busy")
            counted.answers += 1
            await asyncio.sleep(0)
            close(affinity)

    watchers = [threading.Thread(target=watch) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    with loop_in_a_thread() as loop:
        asyncio.run_coroutine_threadsafe(open_and_close(), loop).result(PATIENCE_S)
    end.set()
    for watcher in watchers:
        watcher.join()
    for mine in seen:
        assert mine == sorted(mine)  # counters never decrease
    assert answers_at(registry.collect(0.0), "busy") == 200


def test_a_snapshot_with_a_larger_number_has_all_counts_of_an_earlier_one() -> None:
    opened: list[tuple[Counted, LoopAffinity]] = []

    async def open_and_close() -> Snapshot:
        _, affinity = open_counted(7, "opened later")
        close(affinity)
        await asyncio.sleep(0)
        return registry.collect(0.0)

    with loop_in_a_thread() as loop, ThreadPoolExecutor(1) as elsewhere:
        run_in(loop, lambda: opened.append(open_counted(1, "opened earlier")))
        with blocked(loop):
            is_queried = queried(loop)
            collecting = elsewhere.submit(registry.collect, PATIENCE_S)
            is_queried.wait()
            with asyncio.Runner() as runner:
                earlier = runner.run(open_and_close())
        later = collecting.result()
        assert later.number > earlier.number
        assert answers_at(earlier, "opened later") == answers_at(later, "opened later") == 7
