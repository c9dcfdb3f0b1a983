"""How the bytes of one tensor travel. A new way is one file, one branch in `plan`, one row in `_OPENERS`.

The sender asks `Placements.plan` and gets a `Plan`: how many bytes of shared memory it needs, whether
placing may take long, and `place`, which returns the bytes and descriptors for the frame. The receiver
hands what arrived to `open_tensor`.
"""

import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from aiotensor.errors import ProtocolError
from aiotensor.placements.copying import CopyAbandonedError, new_tensor
from aiotensor.placements.descriptors import close
from aiotensor.placements.dtypes import dtype_from_name, name_of_dtype
from aiotensor.placements.inline import MAX_INLINE_BYTES, open_inline, place_inline
from aiotensor.placements.source import Sendable, as_tensor, check_dtype
from aiotensor.placements.torch_shared import (
    Allocations,
    copy_to_shared,
    name_shared,
    new_shared,
    open_shared,
)

__all__ = [
    "Allocations",
    "CopyAbandonedError",
    "Opened",
    "Placed",
    "Plan",
    "Sendable",
    "as_tensor",
    "check_dtype",
    "close",
    "dtype_from_name",
    "name_of_dtype",
    "new_shared",
    "new_tensor",
    "open_tensor",
    "plan",
]


class Placed(NamedTuple):
    """Where a tensor's bytes are: for the frame, and the descriptors that go beside it."""

    placement: str
    payload: bytes
    descriptors: list[int]


class Plan(NamedTuple):
    """How one tensor will travel.

    Attributes:
        new_bytes: bytes of shared memory that must be granted before `place`.
        block: the number of the block that holds the tensor already, or None.
        is_quick: whether `place` is quick enough for the event loop.
        place: write the bytes; gives up with `CopyAbandonedError` once the event is set.
    """

    new_bytes: int
    block: int | None
    is_quick: bool
    place: Callable[[threading.Event], Placed]


def plan(source: torch.Tensor, allocations: Allocations) -> Plan:
    """Choose how a tensor travels: in the frame if small, where it lies if allocated, else by a copy."""
    block = allocations.find(source)
    if source.nbytes == 0 or (source.nbytes <= MAX_INLINE_BYTES and block is None):
        return Plan(0, None, True, lambda _: Placed("inline", place_inline(source), []))
    if block is not None:
        return Plan(0, block, False, lambda _: Placed("shared", *name_shared(source)))

    def copy(abandoned: threading.Event) -> Placed:
        # The storage may go when this returns: the descriptor keeps the memory alive on its way.
        _storage, target = copy_to_shared(source, abandoned)
        return Placed("shared", *name_shared(target))

    return Plan(source.nbytes, None, False, copy)


class Opened(NamedTuple):
    """A tensor that arrived, and the object whose end frees its block (None if it has no block)."""

    tensor: torch.Tensor
    owner: object | None


def _open_inline(
    payload: bytes, descriptors: Sequence[int], dtype: torch.dtype, shape: tuple[int, ...]
) -> Opened:
    close(descriptors)
    return Opened(open_inline(payload, dtype, shape), None)


def _open_shared(
    payload: bytes, descriptors: Sequence[int], dtype: torch.dtype, shape: tuple[int, ...]
) -> Opened:
    return Opened(*open_shared(payload, descriptors, dtype, shape))


_OPENERS: dict[str, Callable[[bytes, Sequence[int], torch.dtype, tuple[int, ...]], Opened]] = {
    "inline": _open_inline,
    "shared": _open_shared,
}


def open_tensor(
    placement: str, payload: bytes, descriptors: Sequence[int], dtype_name: str, shape: tuple[int, ...]
) -> Opened:
    """Open what `Plan.place` placed; the descriptors are used up, whatever happens.

    Raises:
        ProtocolError: the peer described something that cannot be, or that is not known here.
        OSError: this process has no room or no descriptors left to open it.
    """
    opener = _OPENERS.get(placement)
    try:
        dtype = dtype_from_name(dtype_name)
        if opener is None:
            raise ProtocolError(f"the peer placed a tensor by {placement[:64]!r}, which is unknown here")
        if math.prod(size for size in shape if size) * dtype.itemsize >= 2**63:
            raise ProtocolError(
                f"the peer sent a tensor of shape {shape}, which is more than can be addressed"
            )
    except ProtocolError:
        close(descriptors)
        raise
    return opener(payload, descriptors, dtype, shape)
