"""The bytes of a tensor's values, exactly, in row-major order, and in pieces."""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["RawBytes", "copy_of", "flat_bytes", "is_addressable", "new_tensor", "pieces"]

RawBytes = npt.NDArray[np.uint8]

# Small enough that whoever stops between two pieces stops soon (writing one takes some milliseconds),
# large enough that the steps between them cost nothing.
_PIECE_BYTES = 8 << 20

_RAW_DTYPE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def flat_bytes(source: torch.Tensor) -> RawBytes | None:
    """Return all bytes of a dense tensor as they lie in memory, or None if they have to be gathered."""
    if not source.is_contiguous() or source.is_conj() or source.is_neg():
        return None
    return next(_as_bytes([source.detach()]))


def pieces(source: torch.Tensor) -> Iterator[RawBytes]:
    """Go through the bytes of a dense tensor, bit for bit; it is only read.

    A contiguous tensor is not copied. Of any other, conjugate and negative views included, one piece at a
    time is.
    """
    source = source.detach()
    if not source.is_conj() and not source.is_neg():
        # As whole numbers, since torch has no copy for its narrowest dtypes and warns of some others.
        source = source.view(_RAW_DTYPE[source.element_size()])
    yield from _as_bytes(_resolved(part).contiguous() for part in _cut(source))


def is_addressable(shape: Sequence[int], itemsize: int) -> bool:
    """Say whether torch can compute the strides of a tensor, which also an empty one has."""
    numel = math.prod(shape) or math.prod(size for size in shape if size)
    return numel * itemsize < 2**63


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous tensor on this thread alone; torch would start a team of threads for it."""
    copy = new_tensor(tuple(tensor.shape), tensor.dtype)
    raw = _RAW_DTYPE[tensor.element_size()]
    np.copyto(copy.view(raw).numpy(), tensor.detach().view(raw).numpy())
    return copy


def _as_bytes(parts: Iterable[torch.Tensor]) -> Iterator[RawBytes]:
    for part in parts:
        plain = part.view(_RAW_DTYPE[part.element_size()]) if not part.is_complex() else part
        # Not reshape: where there is one element, or none, it keeps strides that cannot be seen as bytes.
        yield plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()


def _resolved(part: torch.Tensor) -> torch.Tensor:
    """Carry out what a conjugate or negative view only notes."""
    if not part.is_complex():
        return part.resolve_neg()
    if not part.is_conj() and not part.is_neg():
        return part
    # By its real numbers, since torch makes a new tensor of the narrowest complex dtype only with a warning.
    values = torch.view_as_real(part.conj() if part.is_conj() else part).resolve_neg().clone()
    if part.is_conj():
        values[..., 1].neg_()
    return values


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make an uninitialized tensor, also of the dtypes that torch makes only with a warning."""
    return torch.empty(shape, dtype=_RAW_DTYPE[dtype.itemsize]).view(dtype)


def _cut(source: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut along the outermost dimension, and further in where one row is more than a piece."""
    rows = source.shape[0] if source.dim() else 0
    if source.nbytes <= _PIECE_BYTES or rows == 0:
        yield source
        return
    step = _PIECE_BYTES * rows // source.nbytes
    if step == 0:
        for row in source:
            yield from _cut(row)
        return
    for row in range(0, rows, step):
        yield source[row : row + step]
