"""Copy the values of a tensor into shared memory: at once if that is quick, otherwise in threads."""

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

import numpy as np
import torch

from aiotensor.memory.arena import Extent
from aiotensor.memory.gathering import Gathering, gather
from aiotensor.memory.raw import RawBytes
from aiotensor.memory.source import Source, is_flat

__all__ = ["QUICK_BYTES", "CopyAbandonedError", "copy_flat_now", "copy_in_threads", "copy_now"]

# Copying this much into warm memory takes less time than waking a thread and being woken by it: a twentieth
# of a millisecond, or a tenth on a slow machine, which is acceptable on the event loop.
QUICK_BYTES = 1 << 20

# From this size on, two threads are faster than one. Below it, the second thread starts too late to help.
_SHARED_COPY_BYTES = 4 << 20

# A flat source is copied in steps. They are small enough for an abandoned copy to stop soon, but few, since a
# thread waits for the interpreter lock after each of them. They get smaller towards the end, so that two
# threads finish at about the same time.
_LONGEST_STEP_BYTES = 8 << 20
_SHORTEST_STEP_BYTES = 1 << 20


class CopyAbandonedError(Exception):
    """The copy was stopped, because it is no longer needed."""


def copy_now(source: Source, place: Extent) -> None:
    """Copy a small source into warm memory, on this thread.

    Raises:
        CopyAbandonedError: the segment was closed.
    """
    if is_flat(source):
        copy_flat_now(source, place)
    elif not place.segment.memory:
        raise CopyAbandonedError
    else:
        gather(source, _target(source, place))


def copy_flat_now(source: torch.Tensor, place: Extent) -> None:
    """Do the same with a source for which `is_flat` is true."""
    memory = place.segment.memory  # keeps it mapped during the copy
    if not memory:
        raise CopyAbandonedError
    ctypes.memmove(place.segment.address + place.offset, source.data_ptr(), source.nbytes)


def copy_in_threads(
    source: Source, place: Extent, is_abandoned: Callable[[], bool], helper: Executor
) -> None:
    """Copy a source of any size on this thread and, if it is large, on another one, too.

    Args:
        source: the tensor or array.
        place: the block to copy to, which has memory.
        is_abandoned: returns whether to stop; called between steps of a few megabytes.
        helper: runs a part of the steps.

    Raises:
        CopyAbandonedError: the segment was closed, or `is_abandoned` has returned True before the copy was
            complete.
    """
    memory = place.segment.memory  # keeps it mapped during the copy
    if not memory:
        raise CopyAbandonedError
    steps = deque(_copy_steps(source, place))  # both threads take steps from it; `popleft` is thread-safe

    def share() -> None:
        while not is_abandoned():
            try:
                step = steps.popleft()
            except IndexError:
                return
            step()

    other: Future[None] | None = None
    if source.nbytes >= _SHARED_COPY_BYTES:
        # If no thread can be started, the queued call runs before the next copy, when no steps are left.
        with contextlib.suppress(RuntimeError):
            other = helper.submit(share)
    try:
        share()
    finally:
        # Cancelling succeeds if the helper is still busy with another copy.
        if other is not None and not other.cancel():
            other.result()
        steps.clear()  # a share that is still queued must not keep the source alive
    if is_abandoned():
        raise CopyAbandonedError


def _copy_steps(source: Source, place: Extent) -> list[Callable[[], object]]:
    if not is_flat(source):
        gathering = Gathering(source, _target(source, place))
        return [partial(gathering.copy, box) for box in gathering.boxes]
    # The steps have only addresses: the caller keeps the memory alive.
    there, here = place.segment.address + place.offset, source.data_ptr()
    return [
        partial(ctypes.memmove, there + start, here + start, length)
        for start, length in _steps(source.nbytes)
    ]


def _steps(nbytes: int) -> list[tuple[int, int]]:
    """Divide a range into steps of (start, length), each a quarter of the rest, within limits."""
    steps, start = [], 0
    while start < nbytes:
        left = nbytes - start
        length = min(max(left // 4, _SHORTEST_STEP_BYTES), _LONGEST_STEP_BYTES, left)
        steps.append((start, length))
        start += length
    return steps


def _target(source: Source, place: Extent) -> RawBytes:
    return np.frombuffer(place.view(), np.uint8, source.nbytes)  # blocks may be rounded up to pages
