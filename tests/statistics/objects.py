"""Objects with given statistics, and loops in other threads, for tests of the registry."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.statistics.registry import Snapshot
from aiotensor.types import ClientStatistics, Statistics

__all__ = [
    "PATIENCE_S",
    "Counted",
    "answers_at",
    "close",
    "loop_in_a_thread",
    "open_counted",
    "present",
    "run_in",
]

PATIENCE_S = 20.0  # more than a loop needs to answer that is not blocked


class Counted:
    """An object with a given number of answers."""

    def __init__(self, answers: int, errors: dict[str, int] | None = None) -> None:
        self.answers = answers
        self.errors = errors or {}
        self.readers: list[int] = []  # the threads that have read the statistics

    def statistics(self) -> ClientStatistics:
        self.readers.append(threading.get_ident())
        return ClientStatistics(1, (1,), 0, 0, self.answers, 0, 0, 0, 0, self.errors)


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
