"""The open objects of a process are found by their endpoints, and their counts persist after closing."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from aiotensor import SenderStatistics, TensorSender
from aiotensor.errors import ClosedError
from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.statistics import registry
from aiotensor.statistics.registry import Snapshot
from aiotensor.types import ClientStatistics, Statistics
from tests.channel.parties import place
from tests.frames import NO_WAITS
from tests.runtime.test_affinity import forks, in_a_fork
from verification.patterns import pattern
from verification.waiting import until

PATIENCE_S = 20.0  # more than a loop needs to answer that is not blocked


class Counted:
    """An object with a given number of answers."""

    def __init__(self, answers: int, errors: dict[str, int] | None = None) -> None:
        self.answers = answers
        self.errors = errors or {}
        self.readers: list[int] = []  # the threads that have read the statistics

    def statistics(self) -> ClientStatistics:
        self.readers.append(threading.get_ident())
        fields: dict[str, Any] = dict.fromkeys(ClientStatistics.__struct_fields__, 0)
        fields |= {"holders": (), "engines": (), "permit_waits": NO_WAITS, "memory_waits": NO_WAITS}
        return ClientStatistics(**{**fields, "answers": self.answers, "errors": self.errors})


def open_counted(answers: int, at: str, errors: dict[str, int] | None = None) -> tuple[Counted, LoopAffinity]:
    """Open an object at an endpoint, in the running loop."""
    counted, affinity = Counted(answers, errors), LoopAffinity("Counted")
    affinity.enter()
    affinity.settle(counted, at)
    return counted, affinity


def close(affinity: LoopAffinity) -> None:
    """Close an object."""
    with affinity.leaving():
        affinity.close()


def answers_at(snapshot: Snapshot, at: str) -> float:
    """Return the answers that were counted at an endpoint."""
    return snapshot.counts[ClientStatistics, at]["answers", ""]


def present(snapshot: Snapshot, at: str) -> list[Statistics]:
    """Return the statistics of the open objects at an endpoint."""
    return [statistics for endpoint, statistics in snapshot.present if endpoint == at]


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Run a loop in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run_in(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> None:
    """Call a function in a loop of another thread, and wait for its end."""

    async def run() -> None:
        work()

    asyncio.run_coroutine_threadsafe(run(), loop).result(PATIENCE_S)


# Counts of closed objects


async def test_counts_include_the_waits_and_errors_of_calls_that_closing_fails(
    nothing_left_behind: None,
) -> None:
    with place() as here:
        async with TensorSender(here, 1) as sender:
            message = sender.message()
            await message.__aenter__()
            waiting = [asyncio.create_task(sender.send(pattern(0, 3))) for _ in range(3)]
            await until(lambda: sender.statistics().waiting == 3)
        await asyncio.wait(waiting)
        assert [type(task.exception()) for task in waiting] == [ClosedError] * 3
        counts = registry.collect(0.0).counts[SenderStatistics, here]
        waits = {bound: number for (name, bound), number in counts.items() if name == "permit_waits"}
        assert counts["errors", "ClosedError"] == 3
        assert sum(number for bound, number in waits.items() if bound != "total_us") == 3
        del waiting


async def test_the_100_endpoints_that_were_closed_last_are_remembered() -> None:
    at = f"place in {asyncio.get_running_loop()}"
    stays, stays_open = open_counted(1, f"{at} 0")
    for number in range(300):
        _, affinity = open_counted(1, f"{at} {number}")
        close(affinity)
        await asyncio.sleep(0)
    snapshot = registry.collect(0.0)
    in_use = {there for there, _ in snapshot.present}
    assert sum(there not in in_use for _, there in snapshot.counts) == 100
    assert answers_at(snapshot, f"{at} 299") == 1
    assert answers_at(snapshot, f"{at} 0") == 1 + stays.answers  # this object is still open
    assert (ClientStatistics, f"{at} 1") not in snapshot.counts
    close(stays_open)


# Forks


@forks
async def test_a_forked_child_finds_no_object_of_its_parent() -> None:
    at = f"parent in {asyncio.get_running_loop()}"
    counted, _ = open_counted(1, at)

    def fail_with_snapshot() -> None:
        raise RuntimeError(str(registry.collect(0.0)))

    assert in_a_fork(fail_with_snapshot) == f"RuntimeError: {Snapshot([], {}, 0)}"
    assert present(registry.collect(0.0), at) == [counted.statistics()]


# Threads: each loop reads its own objects


def test_a_loop_that_does_not_run_is_not_waited_for() -> None:
    loop = asyncio.new_event_loop()
    opened: list[tuple[Counted, LoopAffinity]] = []

    async def run() -> None:
        opened.append(open_counted(1, "stopped"))

    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(loop.run_until_complete, run()).result()
        snapshot = registry.collect(PATIENCE_S * 100)  # longer than this test may take
        assert not present(snapshot, "stopped")  # it was never read
        loop.close()
        assert registry.collect(PATIENCE_S * 100).timeouts == snapshot.timeouts


def test_loops_that_collect_at_the_same_time_do_not_wait_for_each_other() -> None:
    both = threading.Barrier(2)
    snapshots: list[Snapshot] = []

    async def run(number: int) -> None:
        counted, affinity = open_counted(0, "together")
        both.wait()
        counted.answers = number
        snapshots.append(registry.collect(PATIENCE_S * 100))  # longer than this test may take
        both.wait()  # the loop answers no thread until both have their snapshots
        close(affinity)

    threads = [threading.Thread(target=asyncio.run, args=(run(number),)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers_at(snapshot, "together") for snapshot in snapshots] == [3, 3]


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
