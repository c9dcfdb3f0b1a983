"""How the bytes of one tensor travel. A new way is one file, one branch in `plan`, one row in `_OPENERS`.

The sender asks `plan` and gets a `Plan`: how many bytes of shared memory it needs, whether
placing may take long, and `place`, which returns the bytes and descriptors for the frame. The receiver
hands what arrived to `open_tensor`.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from aiotensor.descriptors import close_all
from aiotensor.errors import ProtocolError
from aiotensor.placements.dtypes import dtype_from_name, name_of_dtype
from aiotensor.placements.inline import MAX_INLINE_BYTES, bytes_of, open_inline
from aiotensor.placements.memfd import (
    Allocations,
    Block,
    CopyAbandonedError,
    Shared,
    copy_to_memfd,
    new_shared,
    open_memfd,
)
from aiotensor.placements.raw import copy_of, is_addressable, new_tensor
from aiotensor.placements.source import Sendable, as_tensor, check_dtype

__all__ = [
    "Allocations",
    "Block",
    "CopyAbandonedError",
    "Opened",
    "Placed",
    "Plan",
    "Sendable",
    "as_tensor",
    "check_dtype",
    "copy_of",
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
        return Plan(0, None, True, lambda _: Placed("inline", bytes_of(source), []))
    if block is not None:
        return Plan(0, block, True, lambda _: _placed(allocations.share(source)))
    return Plan(source.nbytes, None, False, lambda abandoned: _placed(copy_to_memfd(source, abandoned)))


def _placed(shared: Shared) -> Placed:
    return Placed("memfd", shared.payload, [shared.descriptor])


class Opened(NamedTuple):
    """A tensor that arrived, and the object whose end frees its block (None if it has no block)."""

    tensor: torch.Tensor
    owner: object | None


def _open_inline(
    payload: bytes, descriptors: Sequence[int], dtype: torch.dtype, shape: tuple[int, ...]
) -> Opened:
    close_all(descriptors)
    return Opened(open_inline(payload, dtype, shape), None)


def _open_memfd(
    payload: bytes, descriptors: Sequence[int], dtype: torch.dtype, shape: tuple[int, ...]
) -> Opened:
    return Opened(*open_memfd(payload, descriptors, dtype, shape))


_OPENERS: dict[str, Callable[[bytes, Sequence[int], torch.dtype, tuple[int, ...]], Opened]] = {
    "inline": _open_inline,
    "memfd": _open_memfd,
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
        if not is_addressable(shape, dtype.itemsize):
            raise ProtocolError(
                f"the peer sent a tensor of shape {shape}, which is more than can be addressed"
            )
    except ProtocolError:
        close_all(descriptors)
        raise
    return opener(payload, descriptors, dtype, shape)
