"""Counts of calls and instructions, for tests that cannot measure time."""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Count", "counted_calls", "steps_of"]


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


def steps_of(what: Callable[[], object]) -> int:
    """Count the bytecode instructions of a call; functions written in C count as one."""
    steps = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection, with its callbacks, is not part of the call
    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
        gc.enable()
    return steps
