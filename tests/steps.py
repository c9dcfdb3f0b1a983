"""Counts of calls, for tests that cannot measure time."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Count", "counted_calls"]


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
