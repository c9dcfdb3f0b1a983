"""How much work a call is, for tests that may not measure time."""

import gc
import sys
from collections.abc import Callable


def steps_of(what: Callable[[], object]) -> int:
    """Count the calls that a call makes, and the turns of the generators that it goes through."""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    gc.disable()  # a collection is nobody's work, nor are those who are told of it
    sys.setprofile(count)
    try:
        what()
    finally:
        sys.setprofile(None)
        gc.enable()
    return steps
