"""How the bytes of one tensor travel. A new way is one file, one branch in `plan`, one row in `_OPENERS`.

The sender asks `plan`, and gets what must be granted before the tensor can be placed. The receiver hands
what arrived to `open_tensor`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import torch

from aiotensor.errors import ProtocolError
from aiotensor.placements.allocations import Allocation, Allocations, Block
from aiotensor.placements.arena import Arena, Place, read_where, segment_bytes
from aiotensor.placements.buffers import buffer_of, open_buffer
from aiotensor.placements.copying import QUICK_BYTES, CopyAbandonedError, copy_in_threads, copy_now
from aiotensor.placements.dtypes import DTYPE_NAMES, dtype_from_name
from aiotensor.placements.gathering import as_tensor
from aiotensor.placements.inline import MAX_INLINE_BYTES, bytes_of, open_inline
from aiotensor.placements.leaves import as_leaf
from aiotensor.placements.mapped import MappedSegment, open_segment
from aiotensor.placements.raw import copy_of, is_addressable, new_tensor
from aiotensor.placements.segments import Segment, whole_pages
from aiotensor.placements.source import (
    ArraySource,
    Sendable,
    Source,
    SupportsDLPack,
    as_source,
    check_dtype,
    is_flat,
)
from aiotensor.placements.views import Owner, Watch, tensor_over, watch

__all__ = [
    "ARENA",
    "DTYPE_NAMES",
    "MAX_INLINE_BYTES",
    "QUICK_BYTES",
    "Allocation",
    "Allocations",
    "Arena",
    "ArraySource",
    "Block",
    "CopyAbandonedError",
    "MappedSegment",
    "Opened",
    "Owner",
    "Place",
    "Placed",
    "Plan",
    "Segment",
    "Sendable",
    "Source",
    "SupportsDLPack",
    "Watch",
    "as_leaf",
    "as_source",
    "as_tensor",
    "buffer_of",
    "bytes_of",
    "check_dtype",
    "copy_in_threads",
    "copy_now",
    "copy_of",
    "dtype_from_name",
    "is_addressable",
    "is_flat",
    "new_tensor",
    "open_buffer",
    "open_inline",
    "open_segment",
    "open_tensor",
    "place_allocated",
    "place_copy",
    "place_inline",
    "plan",
    "segment_bytes",
    "tensor_over",
    "watch",
    "whole_pages",
]

ARENA = "arena"
INLINE = "inline"


class Plan(NamedTuple):
    """How one tensor will travel.

    Attributes:
        new_bytes: bytes of shared memory that must be granted, to copy it into; 0 if none.
        allocation: the block that it lies in, or None; it is copied unless the block can carry it.
    """

    new_bytes: int
    allocation: Allocation | None


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Where a tensor's bytes are, for the frame."""

    placement: str
    payload: bytes


_INLINE = Plan(0, None)


def plan(source: Source, allocations: Allocations) -> Plan:
    """Choose how a tensor travels: in the frame if small, where it lies if allocated, else by a copy."""
    nbytes = source.nbytes
    if nbytes == 0:
        return _INLINE
    allocation = allocations.find(source)
    if allocation is not None and allocation.can_carry(source):
        return Plan(0, allocation)
    return _INLINE if nbytes <= MAX_INLINE_BYTES else Plan(nbytes, allocation)


def place_inline(source: Source) -> Placed:
    """Put the bytes of a small tensor into the frame."""
    return Placed(INLINE, bytes_of(source))


def place_allocated(source: Source, allocation: Allocation) -> Placed:
    """Name a tensor where it lies."""
    return Placed(ARENA, allocation.block.place.describe(source.data_ptr() - allocation.start))


def place_copy(place: Place) -> Placed:
    """Name a tensor where it was copied to."""
    return Placed(ARENA, place.describe(0))


class Opened(msgspec.Struct, frozen=True):
    """A tensor that arrived; if it lies in a segment, where, and the object whose end frees its block."""

    tensor: torch.Tensor
    segment: int | None = None
    owner: Owner | None = None
    offset: int = 0


Segments = Mapping[int, MappedSegment]


def _open_inline(payload: bytes, dtype: torch.dtype, shape: tuple[int, ...], segments: Segments) -> Opened:
    return Opened(open_inline(payload, dtype, shape))


def _open_in_arena(payload: bytes, dtype: torch.dtype, shape: tuple[int, ...], segments: Segments) -> Opened:
    number, offset = read_where(payload)
    segment = segments.get(number)
    if segment is None:
        raise ProtocolError(f"the peer placed a tensor in segment {number}, which it never attached")
    view = segment.tensor(offset, dtype, shape)
    return Opened(view.tensor, number, view.owner, offset)


_OPENERS: dict[str, Callable[[bytes, torch.dtype, tuple[int, ...], Segments], Opened]] = {
    INLINE: _open_inline,
    ARENA: _open_in_arena,
}


def open_tensor(
    placement: str, payload: bytes, dtype_name: str, shape: tuple[int, ...], segments: Segments
) -> Opened:
    """Open what the sender placed.

    Args:
        placement: who can open the payload.
        payload: from the frame.
        dtype_name: from the frame.
        shape: from the frame, in elements.
        segments: what the sender attached.

    Raises:
        ProtocolError: the peer described something that cannot be, or that is not known here.
    """
    opener = _OPENERS.get(placement)
    if opener is None:
        raise ProtocolError(f"the peer placed a tensor by {placement[:64]!r}, which is unknown here")
    return opener(payload, dtype_from_name(dtype_name), shape, segments)
