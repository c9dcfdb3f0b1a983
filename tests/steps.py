"""How much work a call is, for tests that may not measure time."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps_of(what: Callable[[], object]) -> int:
    """Count the instructions of Python that a call goes through; what C does in between is not seen."""
    steps = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()  # a collection is nobody's work, nor are those who are told of it
    sys.settrace(trace)
    try:
        what()
    finally:
        sys.settrace(before)
        gc.enable()
    return steps
