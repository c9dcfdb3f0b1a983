"""Copying a tensor's values into shared memory: at once if that is quick, else in threads."""

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

import numpy as np
import torch

from aiotensor.tensors.arena import Extent
from aiotensor.tensors.gathering import Gathering, gather
from aiotensor.tensors.raw import RawBytes
from aiotensor.tensors.source import Source, is_flat

__all__ = ["QUICK_BYTES", "CopyAbandonedError", "copy_in_threads", "copy_now"]

# So much is copied into warm memory in less time than it takes to wake another thread and be woken by it. It
# is a twentieth of a millisecond, a tenth on a slow machine: the event loop can spare it.
QUICK_BYTES = 1 << 20

# From here on two threads are faster than one; below, the second comes too late to help.
_SHARED_COPY_BYTES = 4 << 20

# A flat source is copied in steps: small enough that an abandoned copy stops soon, and few, since after each
# one a thread waits for the interpreter. They get smaller, so that two threads end together.
_LONGEST_STEP_BYTES = 8 << 20
_SHORTEST_STEP_BYTES = 1 << 20


class CopyAbandonedError(Exception):
    """Nobody wants the copy any more."""


def copy_now(source: Source, place: Extent) -> None:
    """Copy a small source into warm memory, on this thread."""
    target: RawBytes = np.frombuffer(place.view(), np.uint8)
    if is_flat(source):
        ctypes.memmove(_address_of(target), source.data_ptr(), source.nbytes)
    else:
        gather(source, target)


def copy_in_threads(
    source: Source, place: Extent, is_abandoned: Callable[[], bool], helper: Executor
) -> None:
    """Copy a source of any size on this thread and, if it is large, on a helper's too.

    Args:
        source: what to copy.
        place: where to; it has memory.
        is_abandoned: asked between steps of some megabytes.
        helper: what runs the other half.

    Raises:
        CopyAbandonedError: `is_abandoned` said so before the copy was complete.
    """
    steps = iter(_flat_steps(source, place) if is_flat(source) else _gathering_steps(source, place))

    def share() -> None:
        for step in steps:  # the threads take turns at it
            if is_abandoned():
                return
            step()

    other: Future[None] | None = None
    if source.nbytes >= _SHARED_COPY_BYTES:
        # If it cannot be started, it finds nothing left to do when it is, with the next copy.
        with contextlib.suppress(RuntimeError):
            other = helper.submit(share)
    try:
        share()
    finally:
        # One that has not begun is busy with another copy.
        if other is not None and not other.cancel():
            other.result()
        deque(steps, maxlen=0)  # a helper that could not be started keeps nothing of the source
    if is_abandoned():
        raise CopyAbandonedError


def _flat_steps(source: torch.Tensor, place: Extent) -> list[Callable[[], object]]:
    # These have only addresses: while they are used, the memory under them must live.
    there, here = _address_of(np.frombuffer(place.view(), np.uint8)), source.data_ptr()
    return [
        partial(ctypes.memmove, there + start, here + start, length)
        for start, length in _steps(source.nbytes)
    ]


def _gathering_steps(source: Source, place: Extent) -> list[Callable[[], object]]:
    gathering = Gathering(source, np.frombuffer(place.view(), np.uint8))
    return [partial(gathering.copy, box) for box in gathering.boxes]


def _address_of(array: RawBytes) -> int:
    # Not by its `ctypes`: made in a thread, that leaks some bytes now and then (numpy 2.4, Python 3.11).
    address: int = array.__array_interface__["data"][0]
    return address


def _steps(nbytes: int) -> list[tuple[int, int]]:
    """Cut a range into steps of (start, length), each at most a quarter of what is left."""
    steps, start = [], 0
    while start < nbytes:
        left = nbytes - start
        length = min(max(left // 4, _SHORTEST_STEP_BYTES), _LONGEST_STEP_BYTES, left)
        steps.append((start, length))
        start += length
    return steps
