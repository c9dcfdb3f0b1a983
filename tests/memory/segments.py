"""Blocks and random tensors for the tests of shared memory."""

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from aiotensor.memory.arena import Arena, Extent, Segment
from aiotensor.memory.mapping import Mapping, open_segment
from aiotensor.memory.mappings import LeasedSegment, Mappings, PeerMemory
from aiotensor.memory.pages import Range
from aiotensor.memory.tensors import RawBytes, new_tensor
from aiotensor.protocol.frames import Put

MIB = 1 << 20
PAGE = mmap.PAGESIZE


@contextmanager
def lowered(limit: int, value: int) -> Iterator[None]:
    """Lower a limit of this process."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


@contextmanager
def arena_of(nbytes: int = 8 * MIB) -> Iterator[Arena]:
    """Return an arena, and close it at the end."""
    arena = Arena(nbytes)
    try:
        yield arena
    finally:
        arena.close()


@contextmanager
def segment_of(nbytes: int = 8 * MIB) -> Iterator[Segment]:
    """Open a segment, and close it."""
    segment = Segment(3, nbytes)
    segment.open()
    try:
        yield segment
    finally:
        segment.close()


def place_in(arena: Arena, nbytes: int) -> Extent:
    """Allocate a block, in a segment that is open."""
    place = arena.allocate(nbytes)
    assert place is not None
    place.segment.open()
    return place


def chunk(number: int, nbytes: int = MIB) -> Range:
    """Return the range of a chunk; the last chunk of a segment may be shorter."""
    return number * MIB, nbytes


def filled(segment: Segment, *ranges: Range) -> None:
    """Get memory for ranges."""
    segment.provide(ranges, [])
    segment.filled([], list(ranges))


def warm(place: Extent) -> Extent:
    """Get memory for a block."""
    cold = place.segment.prepare(place.offset, place.nbytes, place.segment.nbytes)
    place.segment.provide(cold, [])
    place.segment.filled(cold, cold)
    return place


def open_tensor(
    placement: str, payload: bytes, dtype: str, shape: tuple[int, ...], segments: dict[int, Mapping]
) -> torch.Tensor:
    """Open a tensor as it arrives from a peer that has attached these segments."""
    memory = PeerMemory(1 << 30, None)
    memory.segments = {
        number: LeasedSegment(number, one, memory, 1 << 30) for number, one in segments.items()
    }
    return Mappings().open(memory, Put(0, 0, dtype, shape, "cpu", placement, payload, 0))


def other_side_of(segment: Segment) -> Mapping:
    """Map a segment once more, as the receiver does."""
    return open_segment(segment.descriptor.number, segment.nbytes)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    return tensor_of(np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8), dtype)


def tensor_of(array: RawBytes, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with the bytes of an array of (*shape, bytes of an element)."""
    tensor = new_tensor(array.shape[:-1], dtype)
    tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(array.reshape(-1).copy()))
    return tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def open_files() -> set[tuple[str, int, int]]:
    """Return the number, the device and the inode of each open descriptor.

    Compare the results with `<=`, because objects of earlier tests may be collected in between.
    """
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing
            status = os.fstat(int(name))
            files.add((name, status.st_dev, status.st_ino))
    return files
