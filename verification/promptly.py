"""Promised durations, scaled on machines that are slower or busier than the promise assumes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_CALLS = 1_000_000
_USUAL_S = 0.05  # for these calls, on the machine of the promises


@contextmanager
def promptly(seconds: float = 1.0) -> Iterator[None]:
    """Fail if a block takes longer than promised.

    Args:
        seconds: the promised duration. On a machine where a fixed workload takes longer than usual, the block
            may take longer in proportion. The workload is measured only if the block exceeds the promise.
    """
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    if took >= seconds:
        allowed = allowed_s(seconds)
        assert took < allowed, f"it took {took:.2f} s, and {allowed:.2f} s are promised on this machine"


def allowed_s(seconds: float) -> float:
    """Return a promised duration, scaled to the current speed of this machine.

    Blocks for as long as a fixed workload takes: 50 ms, or longer on a machine that is slower or busier.
    """
    before = time.monotonic()
    for number in range(_CALLS):
        _called(number)
    return seconds * max(1.0, (time.monotonic() - before) / _USUAL_S)


def _called(number: int) -> int:
    return number
