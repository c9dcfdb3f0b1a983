"""Copying a tensor's values into shared memory: at once if that is quick, else in threads."""

import contextlib
import ctypes
from collections.abc import Callable
from concurrent.futures import Executor, Future

import numpy as np
import torch

from aiotensor.placements.arena import Place
from aiotensor.placements.raw import RawBytes, flat_bytes, pieces

__all__ = ["QUICK_BYTES", "CopyAbandonedError", "copy_in_threads", "copy_now"]

# So much is copied into warm memory in less time than it takes to wake another thread and be woken by it. It
# is a twentieth of a millisecond, a tenth on a slow machine: the event loop can spare it.
QUICK_BYTES = 1 << 20

# From here on two threads are faster than one; below, the second comes too late to help.
_SHARED_COPY_BYTES = 4 << 20

# A copy goes in steps: small enough that whoever stops between two of them stops soon, and few, since after
# each one a thread waits for the interpreter. They get smaller, so that two threads end together.
_LONGEST_STEP_BYTES = 8 << 20
_SHORTEST_STEP_BYTES = 1 << 20


class CopyAbandonedError(Exception):
    """Nobody wants the copy any more."""


def copy_now(source: torch.Tensor, place: Place) -> None:
    """Copy a small tensor into warm memory, on this thread."""
    view, offset = place.view(), 0
    for piece in pieces(source):
        view[offset : offset + piece.nbytes] = piece.data
        offset += piece.nbytes


def copy_in_threads(
    source: torch.Tensor, place: Place, is_abandoned: Callable[[], bool], helper: Executor
) -> None:
    """Copy a tensor of any size on this thread and, if it is large, on a helper's too.

    Args:
        source: what to copy.
        place: where to; it has memory.
        is_abandoned: asked between steps of some megabytes.
        helper: what runs the other half.

    Raises:
        CopyAbandonedError: `is_abandoned` said so before the copy was complete.
    """
    target: RawBytes = np.frombuffer(place.view(), dtype=np.uint8)
    flat = flat_bytes(source)
    if flat is None:
        offset = 0
        for piece in pieces(source):
            if is_abandoned():
                raise CopyAbandonedError
            np.copyto(target[offset : offset + piece.nbytes], piece)
            offset += piece.nbytes
        return
    there, here = _address_of(target), _address_of(flat)
    steps = iter(_steps(flat.nbytes))  # the threads take turns at it

    def share() -> None:
        for start, length in steps:
            if is_abandoned():
                return
            ctypes.memmove(there + start, here + start, length)

    other: Future[None] | None = None
    if flat.nbytes >= _SHARED_COPY_BYTES:
        # If it cannot be started, it finds nothing left to do when it is, with the next copy.
        with contextlib.suppress(RuntimeError):
            other = helper.submit(share)
    try:
        share()
    finally:
        if other is not None:
            other.result()  # it has only addresses: while it runs, the memory under them must live
    if is_abandoned():
        raise CopyAbandonedError


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
