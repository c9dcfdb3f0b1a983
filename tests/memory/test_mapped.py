import fcntl
import os
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiotensor.errors import ProtocolError
from aiotensor.memory.arena import WHERE, Extent, Segment
from aiotensor.memory.mapping import open_segment
from tests.memory.segments import (
    MIB,
    chunk,
    filled,
    open_files,
    open_tensor,
    other_side_of,
    segment_of,
)
from tests.rogues import SEALS
from verification.processes import watch

# How a place is named


@given(segment=st.integers(0, 2**63 - 1), offset=st.integers(0, 2**40), inner=st.integers(0, 2**40))
def test_a_described_place_is_decoded_unchanged(segment: int, offset: int, inner: int) -> None:
    place = Extent(Segment(segment, MIB), offset, 64)

    assert WHERE.unpack(place.describe(inner)) == (segment, offset + inner)


# The other side


def test_a_mapping_lives_exactly_as_long_as_a_view_of_it() -> None:
    before = open_files()
    with segment_of() as segment:
        mapped = other_side_of(segment)
        filled(segment, chunk(0))
        segment.memory[:64] = b"\7" * 64
        tensor, owner = mapped.tensor(0, torch.uint8, (64,))
    gone: list[bool] = []
    weakref.finalize(owner, gone.append, True)
    mapped.close()
    mapped.close()
    view = tensor[5:6]
    del tensor, owner
    assert not gone
    assert view.tolist() == [7]
    assert open_files() == before
    assert watch.memfds(os.getpid()) == 1

    del view
    assert gone
    assert watch.memfds(os.getpid()) == 0


def test_nothing_is_opened_in_a_segment_that_was_closed() -> None:
    with segment_of() as segment:
        mapped = other_side_of(segment)
        mapped.close()

        with pytest.raises(ProtocolError):
            mapped.tensor(0, torch.uint8, (1,))


@pytest.mark.promise(25)
def test_a_tensor_outside_its_segment_or_off_its_grid_is_refused() -> None:
    with segment_of(4096) as segment:
        mapped = other_side_of(segment)
        for offset, shape in (
            (4096, (1,)),
            (4092, (2,)),
            (4096, (0,)),
            (0, (0,)),
            (0, (0, 1 << 30)),
            (2, (1,)),
            (1, (1,)),
            (0, (1025,)),
            (0, (1 << 50,)),
            (0, (2**63 - 1,) * 64),
            (2**64 - 4, (1,)),
            (2**64 - 4, (2,)),
            (8, (2, 512)),
        ):
            with pytest.raises(ProtocolError, match=f"at byte {offset} of a segment of 4096"):
                mapped.tensor(offset, torch.float32, shape)
            with pytest.raises(ProtocolError, match=f"at byte {offset} of a segment of 4096"):
                open_tensor("arena", struct.pack("<QQ", 3, offset), "float32", shape, {3: mapped})


def test_a_tensor_that_ends_where_its_segment_ends_is_opened() -> None:
    with segment_of(4096) as segment:
        mapped = other_side_of(segment)
        for offset, shape in ((0, (1024,)), (4092, (1,)), (4092, ()), (2048, (2, 256))):
            tensor, owner = mapped.tensor(offset, torch.float32, shape)
            assert tuple(tensor.shape) == shape
            assert owner.nbytes == tensor.nbytes


# Descriptors of broken peers


@contextmanager
def memfd(nbytes: int, seals: int = SEALS, flags: int = 0) -> Iterator[int]:
    descriptor = os.memfd_create("of a peer", os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.mark.promise(26)
def test_memory_that_could_shrink_while_it_is_read_is_refused() -> None:
    for seals in (0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL):
        with memfd(4096, seals) as descriptor, pytest.raises(ProtocolError, match="could shrink"):
            open_segment(descriptor, 4096)


def test_a_descriptor_that_is_not_a_memfd_is_refused() -> None:
    reading_end, writing_end = os.pipe()
    null, this_file = os.open(os.devnull, os.O_RDONLY), os.open(__file__, os.O_RDONLY)

    for descriptor in (reading_end, writing_end, null, this_file):
        with pytest.raises(ProtocolError, match="could shrink"):
            open_segment(descriptor, 4096)
        os.close(descriptor)


def test_memory_with_huge_pages_is_refused() -> None:
    nbytes = 2 << 20
    with (
        memfd(nbytes, flags=os.MFD_HUGETLB | os.MFD_HUGE_2MB) as descriptor,
        pytest.raises(ProtocolError, match="huge pages"),
    ):
        open_segment(descriptor, nbytes)


def test_a_segment_that_cannot_be_mapped_raises_os_error() -> None:
    before = open_files()
    with memfd(1 << 60) as descriptor, pytest.raises(OSError, match="bytes of addresses cannot be mapped"):
        open_segment(descriptor, 1 << 60)

    assert open_files() == before
