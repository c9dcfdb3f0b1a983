"""Measures of one iteration of the event loop: processor time, and changes of state."""

import abc
import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

_CALLS = 100_000
_ATTEMPTS = 5

Lengths = dict[str, float]  # of the longest iterations, as multiples of the one allowed


class _EachIteration(abc.ABC):
    """Call `_look` after each iteration of the running loop within a block."""

    def __enter__(self) -> Self:
        gc.disable()  # a collection is not part of any call
        self._loop = asyncio.get_running_loop()
        self._begin()
        self._next = self._loop.call_soon(self._turned)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._look()
        self._end()
        self._next.cancel()
        gc.enable()

    def _turned(self) -> None:
        self._look()
        self._next = self._loop.call_soon(self._turned)

    @abc.abstractmethod
    def _begin(self) -> None: ...

    @abc.abstractmethod
    def _look(self) -> None: ...

    def _end(self) -> None:  # noqa: B027 - optional
        pass


class Turns(_EachIteration):
    """Measure the longest iteration, in processor time of the loop's thread.

    The time includes the work of the kernel for that thread, such as mapping and unmapping memory. It is
    compared with that of a fixed workload on the same thread: a slower or busier machine takes longer for
    both.

    Attributes:
        longest_s: the processor time of the longest iteration, in seconds.
        allowed_s: the time of 100,000 calls of a Python function; 4 to 5 ms on the machine of the promises.
    """

    def _begin(self) -> None:
        self.longest_s = 0.0
        self._before_s = _fixed_workload_s()
        self._last = time.thread_time()

    def _look(self) -> None:
        now = time.thread_time()
        self.longest_s = max(self.longest_s, now - self._last)
        self._last = now

    def _end(self) -> None:
        self.allowed_s = max(self._before_s, _fixed_workload_s())

    @property
    def relative_length(self) -> float:
        """The longest iteration, as a multiple of the one allowed."""
        return self.longest_s / self.allowed_s


@contextmanager
def measured(what: str, into: Lengths) -> Iterator[None]:
    """Measure the longest iteration of the loop within a block, as a multiple of the one allowed."""
    with Turns() as turns:
        yield
    into[what] = turns.relative_length


async def some_turns() -> None:
    """Run the callbacks that threads have scheduled."""
    await asyncio.sleep(0.01)


async def too_long(measure: Callable[[], Awaitable[Lengths]]) -> Lengths:
    """Return the lengths that exceed 1 in each of several attempts.

    On a shared machine, a few milliseconds of other processes are sometimes attributed to this thread; and
    the first execution may take longer.
    """
    least = await measure()
    for _ in range(_ATTEMPTS - 1):
        if max(least.values()) <= 1:
            break
        again = await measure()
        least = {what: min(length, again[what]) for what, length in least.items()}
    assert all(length > 0 for length in least.values())
    return {what: length for what, length in least.items() if length > 1}


def _fixed_workload_s() -> float:
    return statistics.median(_time_calls() for _ in range(5))


def _time_calls() -> float:
    before = time.thread_time()
    for number in range(_CALLS):
        _called(number)
    return time.thread_time() - before


def _called(number: int) -> int:
    return number


class Changes(_EachIteration):
    """Measure the largest change of a number in one iteration.

    Args:
        number: returns the number.

    Attributes:
        most: the largest change, up or down.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self.most = 0

    def _begin(self) -> None:
        self._last = self._number()

    def _look(self) -> None:
        now = self._number()
        self.most = max(self.most, abs(now - self._last))
        self._last = now
