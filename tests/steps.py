"""Counts of calls, for tests that cannot measure time."""

import sys
from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class Count:
    """A number that grows."""

    def __init__(self) -> None:
        self.number = 0


@contextmanager
def counted_calls() -> Iterator[Count]:
    """Count the calls of functions, written in Python or C, that this thread makes in a block."""
    count = Count()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        count.number += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        yield count
    finally:
        sys.setprofile(None)


class Resumed(Awaitable[T]):
    """Await a coroutine, and count how often it is resumed."""

    def __init__(self, coroutine: Awaitable[T], count: Count) -> None:
        self._coroutine = coroutine
        self._count = count

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._coroutine.__await__()
        while True:
            try:
                future = next(steps)
            except StopIteration as end:
                value: T = end.value
                return value
            yield future
            self._count.number += 1
