"""Copying a tensor's values into shared memory: at once if that is quick, else in threads."""

from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
import torch

from aiotensor.placements.arena import Place
from aiotensor.placements.raw import RawBytes, flat_bytes, pieces

__all__ = ["QUICK_BYTES", "CopyAbandonedError", "copy_in_threads", "copy_now"]

# So much is copied into warm memory in less time than it takes to wake another thread.
QUICK_BYTES = 256 << 10

# From here on two threads are faster than one; below, the second comes too late to help.
_SHARED_COPY_BYTES = 2 << 20

# Small enough that whoever stops between two steps stops soon, and that two threads end together.
_STEP_BYTES = 1 << 20


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
        is_abandoned: asked between steps of a megabyte or so.
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
    starts = iter(range(0, flat.nbytes, _STEP_BYTES))  # the threads take turns at it

    def share() -> None:
        for start in starts:
            if is_abandoned():
                return
            stop = start + _STEP_BYTES
            np.copyto(target[start:stop], flat[start:stop])

    if flat.nbytes >= _SHARED_COPY_BYTES:
        other = helper.submit(share)
        share()
        other.result()
    else:
        share()
    if is_abandoned():
        raise CopyAbandonedError
