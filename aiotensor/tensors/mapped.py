"""A segment of a sender, mapped at its receiver."""

import fcntl
import math
import mmap
import os

import torch

from aiotensor.errors import ProtocolError
from aiotensor.protocol.pages import Range
from aiotensor.tensors.mapping import Mapping
from aiotensor.tensors.views import View, view_over

__all__ = ["MappedSegment", "open_segment"]


class MappedSegment:
    """A segment of the sender, mapped here.

    Args:
        mapping: the memory.
    """

    def __init__(self, mapping: Mapping) -> None:
        self.nbytes = len(mapping.view)
        self._mapping: Mapping | None = mapping

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> View:
        """Return a tensor over some of the memory.

        Raises:
            ProtocolError: the range is not within the segment.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self._mapping is None or not nbytes or offset % dtype.itemsize or offset + nbytes > self.nbytes:
            raise ProtocolError(
                f"the peer placed a tensor of {nbytes} bytes at byte {offset} of a segment of {self.nbytes}"
            )
        return view_over(self._mapping.view, offset, dtype, shape, nbytes)

    def remove(self, ranges: list[Range]) -> None:
        """Return the memory of ranges to the system, for every process that maps it. Not for the loop."""
        mapping = self._mapping
        if mapping is not None:
            for start, length in ranges:
                mapping.remove(start, length)

    def close(self) -> None:
        """Release the memory; the last view of it unmaps it."""
        self._mapping = None


def open_segment(descriptor: int, nbytes: int) -> MappedSegment:
    """Map a segment that was sent. The descriptor stays the caller's.

    Raises:
        ProtocolError: it is not a sealed memfd of this size.
        OSError: this process has no addresses left to map it.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0  # it is no memfd at all
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("the peer shared memory that could shrink while it is read")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        # There may be none left to fill a hole that the peer makes, and to read there is then SIGBUS.
        raise ProtocolError("the peer shared memory of huge pages, which are not to be had at any time")
    size = os.fstat(descriptor).st_size
    if size != nbytes or not nbytes:
        raise ProtocolError(f"the peer shared {size} bytes of memory and announced {nbytes}")
    return MappedSegment(Mapping(descriptor, nbytes))
