import errno
import fcntl
import mmap
import os
import resource
import struct
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor import placements
from aiotensor.errors import ProtocolError
from aiotensor.placements import Arena, open_segment, segment_bytes
from aiotensor.placements import arena as arena_module
from aiotensor.placements.arena import Segment, read_where
from aiotensor.placements.dtypes import DTYPES
from tests.placements.segments import (
    MIB,
    Clock,
    arena_of,
    bytes_of,
    open_files,
    other_side_of,
    place_in,
    random_tensor,
    segment_of,
    warm,
)


@contextmanager
def lowered(limit: int, value: int) -> Iterator[None]:
    """Lower a limit of this process."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def bytes_given(segment: Segment) -> int:
    """Ask the kernel how much memory a segment has."""
    return os.fstat(segment.descriptor).st_blocks * 512


def filled(segment: Segment, *chunks: int) -> None:
    segment.fill(list(chunks))
    segment.filled(list(chunks))


# A segment


def test_nobody_can_change_the_size_of_a_segment_or_take_its_seals_off() -> None:
    with segment_of(MIB) as segment:
        for size in (0, MIB - 1, MIB + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.descriptor, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.fstat(segment.descriptor).st_size == MIB


def test_a_segment_has_no_name_and_no_child_inherits_it() -> None:
    with segment_of() as segment:
        assert os.readlink(f"/proc/self/fd/{segment.descriptor}").startswith("/memfd:")
        assert not os.get_inheritable(segment.descriptor)


def test_a_segment_takes_no_memory_until_it_is_filled() -> None:
    with segment_of(1 << 36) as segment:
        assert bytes_given(segment) == 0
        assert segment.warm_bytes == 0
        assert not segment.is_warm(0, 1)
        assert not segment.has_idle


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE - 1, mmap.PAGESIZE, mmap.PAGESIZE + 1, 10 * MIB + 1])
def test_a_segment_is_whole_pages_and_holds_what_was_asked_for(nbytes: int) -> None:
    with segment_of(nbytes) as segment:
        assert segment.nbytes == segment_bytes(nbytes) == os.fstat(segment.descriptor).st_size
        assert nbytes <= segment.nbytes < nbytes + mmap.PAGESIZE
        assert segment.nbytes % mmap.PAGESIZE == 0
        assert segment.blocks.allocate(nbytes) is not None


def test_a_segment_that_is_open_stays_as_it_is() -> None:
    with segment_of() as segment:
        before, files = segment.descriptor, open_files()
        segment.open()

        assert segment.descriptor == before
        assert open_files() == files


def test_a_segment_that_was_never_opened_can_be_closed_and_so_can_a_closed_one() -> None:
    before = open_files()
    segment = Segment(0, MIB)
    segment.close()
    segment.open()
    segment.close()
    segment.close()

    assert open_files() == before


def test_a_range_is_warm_when_every_chunk_that_it_touches_is_noted_as_filled() -> None:
    with segment_of() as segment:
        assert segment.cold(MIB - 1, 2) == [0, 1]
        segment.fill([1, 2])
        assert not segment.is_warm(MIB, 1), "the worker fills, and only then the loop takes note"
        segment.filled([1, 2])

        assert segment.cold(MIB - 1, 2) == [0]
        assert segment.cold(0, 4 * MIB) == [0, 3]
        for offset, nbytes, expected in [
            (MIB, 2 * MIB, True),
            (MIB, 1, True),
            (3 * MIB - 1, 1, True),
            (MIB - 1, 2, False),
            (3 * MIB - 1, 2, False),
            (0, MIB, False),
        ]:
            assert segment.is_warm(offset, nbytes) == expected
        assert segment.warm_bytes == bytes_given(segment) == 2 * MIB


def test_the_last_chunk_ends_where_the_segment_ends() -> None:
    with segment_of(5 * MIB // 2) as segment:
        filled(segment, 0, 2)

        assert segment.warm_bytes == bytes_given(segment) == 3 * MIB // 2
        assert segment.has_idle
        assert segment.take_idle(0) == [0, 2]
        segment.give_back([0, 2])
        assert bytes_given(segment) == 0


def test_filling_what_holds_something_changes_nothing() -> None:
    with segment_of() as segment:
        filled(segment, 0)
        segment.view(0, 5)[:] = b"hello"
        filled(segment, 0, 1)

        assert bytes(segment.view(0, 5)) == b"hello"


def test_memory_that_is_given_back_is_free_and_reads_as_zero_when_it_comes_again() -> None:
    with segment_of() as segment:
        filled(segment, 0, 1, 2)
        segment.view(0, 3 * MIB)[:] = b"x" * (3 * MIB)
        segment.give_back([0, 2])

        assert bytes_given(segment) == MIB
        filled(segment, 0)
        assert bytes(segment.view(0, MIB)) == bytes(MIB)
        assert bytes(segment.view(MIB, MIB)) == b"x" * MIB


def test_only_chunks_that_no_block_touches_are_idle() -> None:
    with segment_of(8 * MIB) as segment:
        low, middle, high = (segment.blocks.allocate(nbytes) for nbytes in (2 * MIB, 3 * MIB // 2, 64))
        assert low is not None
        assert middle is not None
        assert high is not None
        assert (low, middle, high) == (0, 2 * MIB, 8 * MIB - 64)
        filled(segment, *range(8))

        assert segment.take_idle(0) == [4, 5, 6]
        assert segment.warm_bytes == 5 * MIB
        segment.blocks.free(middle)
        assert segment.take_idle(0) == [2, 3]
        segment.blocks.free(low)
        segment.blocks.free(high)
        assert segment.take_idle(0) == [0, 1, 7]


def test_there_is_something_idle_until_it_is_taken() -> None:
    with segment_of(2 * MIB) as segment:
        offset = segment.blocks.allocate(2 * MIB)
        assert offset is not None
        filled(segment, 0)
        seen = [segment.has_idle]
        segment.blocks.free(offset)
        seen.append(segment.has_idle)
        segment.take_idle(0)
        seen.append(segment.has_idle)

        assert seen == [False, True, False]


def test_what_is_taken_as_idle_counts_as_cold_and_is_taken_once() -> None:
    with segment_of(2 * MIB) as segment:
        filled(segment, 0, 1)

        assert segment.take_idle(0) == [0, 1]
        assert segment.take_idle(0) == []
        assert segment.cold(0, 2 * MIB) == [0, 1]
        assert segment.warm_bytes == 0


def test_a_chunk_is_idle_from_when_the_last_block_left_it() -> None:
    with segment_of(4 * MIB) as segment:
        filled(segment, 0, 1, 2, 3)
        segment.leave(0, 2 * MIB, now=10.0)
        segment.leave(MIB, MIB, now=20.0)

        assert segment.take_idle(9.9) == [2, 3]  # they never held anything
        assert segment.take_idle(10.0) == [0]
        assert segment.has_idle
        assert segment.take_idle(19.9) == []
        assert segment.take_idle(20.0) == [1]


sizes = st.one_of(st.integers(1, 4096), st.integers(MIB // 2, 3 * MIB))


@settings(max_examples=60, deadline=None)
@given(
    nbytes=st.integers(MIB // 2, 12 * MIB),
    wanted=st.lists(st.tuples(sizes, st.booleans()), max_size=12),
    chunks=st.sets(st.integers(0, 11)),
)
def test_a_warm_chunk_is_idle_exactly_if_no_block_has_a_byte_in_it(
    nbytes: int, wanted: list[tuple[int, bool]], chunks: set[int]
) -> None:
    segment = Segment(0, nbytes)  # never opened: this is arithmetic
    blocks = {offset: size for size, _ in wanted if (offset := segment.blocks.allocate(size)) is not None}
    for offset, (_, is_freed) in zip(list(blocks), wanted, strict=False):
        if is_freed:
            segment.blocks.free(offset)
            del blocks[offset]
    warm_chunks = {chunk for chunk in chunks if chunk * MIB < segment.nbytes}
    segment.filled(list(warm_chunks))
    touched = {
        chunk
        for offset in blocks
        for chunk in range(offset // MIB, (offset + segment.blocks.length_of(offset) - 1) // MIB + 1)
    }

    assert segment.has_idle == bool(warm_chunks - touched)
    assert segment.take_idle(0) == sorted(warm_chunks - touched)
    assert all(segment.is_warm(chunk * MIB, 1) for chunk in warm_chunks & touched)


def test_a_view_outlives_its_segment_and_nothing_is_given_back_under_it() -> None:
    with segment_of() as segment:
        filled(segment, 0)
        view = segment.view(0, 5)
        view[:] = b"hello"
    segment.give_back([0])

    assert bytes(view) == b"hello"


def test_memory_is_mapped_when_it_is_first_written_where_the_kernel_cannot_do_it_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    with segment_of() as segment:
        filled(segment, 0)
        segment.view(0, 5)[:] = b"hello"

        assert bytes_given(segment) == MIB
        assert bytes(segment.view(0, 6)) == b"hello\0"


# A machine that is short of something


def test_a_segment_for_which_there_is_no_room_says_so_and_leaves_nothing_behind() -> None:
    before = open_files()
    segment = Segment(0, 2 * MIB)
    with lowered(resource.RLIMIT_FSIZE, MIB), pytest.raises(OSError, match="File too large"):
        segment.open()

    assert open_files() == before
    segment.open()
    segment.close()


@pytest.mark.parametrize("spare", [0, 1])  # the descriptor, and the one that the mapping keeps
def test_a_segment_for_which_there_is_no_descriptor_says_so_and_leaves_nothing_behind(spare: int) -> None:
    before = open_files()
    next_free = os.dup(0)
    os.close(next_free)
    segment = Segment(0, MIB)
    with lowered(resource.RLIMIT_NOFILE, next_free + spare), pytest.raises(OSError) as caught:  # noqa: PT011
        segment.open()

    assert caught.value.errno == errno.EMFILE
    assert open_files() == before


def test_a_segment_that_has_no_room_for_its_addresses_says_so() -> None:
    before = open_files()
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Segment(0, 1 << 60).open()

    assert open_files() == before


def test_memory_that_the_machine_does_not_have_is_an_error_and_not_warm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with segment_of() as segment:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="No space left"):
            segment.fill([0])

        assert segment.cold(0, 1) == [0]


# The arena


def test_blocks_do_not_overlap_and_come_from_one_segment_until_it_is_full() -> None:
    with arena_of(4 * MIB) as arena:
        places = [place_in(arena, MIB) for _ in range(4)]
        assert arena.allocate(1) is None
        for number, place in enumerate(places):
            place.view()[:] = bytes([number]) * MIB

        assert [bytes(place.view()) for place in places] == [bytes([n]) * MIB for n in range(4)]
        assert len({id(place.segment) for place in places}) == 1
        arena.free(places[1])
        assert place_in(arena, MIB) == places[1]


def test_memory_stays_warm_for_the_next_block() -> None:
    with arena_of() as arena:
        place = place_in(arena, 2 * MIB)
        assert place.cold == [0, 1]
        warm(place)
        assert place.cold == []
        arena.free(place)

        assert place_in(arena, 2 * MIB).is_warm
        assert arena.warm_bytes == 2 * MIB


def test_a_block_counts_as_left_at_the_time_of_the_clock() -> None:
    clock = Clock()
    with arena_of(clock=clock) as arena:
        place = warm(place_in(arena, 2 * MIB))
        clock.now = 200.0
        arena.free(place)

        assert arena.take_idle(199.9) == (place.segment, [])
        assert arena.take_idle(200.0) == (place.segment, [0, 1])
        assert arena.warm_bytes == 0


def test_a_small_block_that_leaves_a_chunk_to_others_does_not_make_it_idle() -> None:
    with arena_of() as arena:
        first, second = warm(place_in(arena, 1000)), place_in(arena, 1000)
        assert second.is_warm
        arena.free(first)

        assert arena.take_idle(1e9)[1] == []
        arena.free(second)
        assert arena.take_idle(1e9)[1] == [7]


def test_the_other_side_may_leave_and_the_next_one_gets_the_same_segment() -> None:
    with arena_of() as arena:
        place = warm(place_in(arena, MIB))
        place.segment.is_attached = True
        arena.detach(retire=False)

        assert not place.segment.is_attached
        assert not place.segment.is_retired
        assert place_in(arena, MIB).segment is place.segment


def test_memory_that_may_still_be_read_somewhere_is_never_handed_out_again() -> None:
    with arena_of(4 * MIB) as arena:
        first, second = (warm(place_in(arena, 2 * MIB)) for _ in range(2))
        old = first.segment
        old.is_attached = True
        kept = other_side_of(old)
        view, _ = kept.tensor(0, torch.uint8, (2 * MIB,))
        view.fill_(7)
        arena.detach(retire=True)

        assert old.is_retired
        arena.free(first)
        for _ in range(2):
            place = warm(place_in(arena, 2 * MIB))
            assert place.segment is not old
            assert place.segment.number != old.number
            assert not place.segment.is_attached
            place.view()[:] = b"\1" * (2 * MIB)
        arena.free(second)

        assert bool((view == 7).all())


def test_a_retired_segment_is_closed_when_the_last_block_in_it_comes_back() -> None:
    with arena_of() as arena:
        before = open_files()
        first, second = (warm(place_in(arena, MIB)) for _ in range(2))
        arena.detach(retire=True)
        newer = warm(place_in(arena, MIB))
        assert arena.warm_bytes == 3 * MIB

        arena.free(first)
        assert bytes(first.view()[:1]) == b"\0", "others may still write there"
        arena.free(second)
        assert arena.warm_bytes == MIB
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(first.segment.descriptor)
        assert len(open_files() - before) == 2  # the newer segment, and its mapping
        arena.free(newer)
        assert place_in(arena, MIB) == newer


def test_a_segment_with_nothing_in_it_is_closed_as_soon_as_it_is_retired() -> None:
    with arena_of() as arena:
        before = open_files()
        arena.free(warm(place_in(arena, MIB)))
        arena.detach(retire=True)

        assert open_files() == before
        assert arena.warm_bytes == 0
        assert place_in(arena, MIB).segment.number == 1


def test_every_segment_has_a_number_of_its_own() -> None:
    with arena_of() as arena:
        numbers = []
        for _ in range(5):
            place = place_in(arena, 64)
            numbers.append(place.segment.number)
            arena.detach(retire=True)
            arena.free(place)

        assert numbers == list(range(5))


def test_idle_memory_is_looked_for_in_the_present_segment_alone() -> None:
    with arena_of() as arena:
        first, second = (warm(place_in(arena, MIB)) for _ in range(2))
        arena.free(second)
        arena.detach(retire=True)
        segment, chunks = arena.take_idle(1e9)

        assert segment is not first.segment
        assert chunks == []
        arena.free(first)


def test_closing_lets_go_of_every_segment_and_of_what_is_viewed_when_its_view_ends() -> None:
    before = open_files()
    arena = Arena(4 * MIB, Clock())
    old = warm(place_in(arena, MIB))
    arena.detach(retire=True)
    new = warm(place_in(arena, MIB))
    view = new.view()
    view[:5] = b"hello"
    arena.close()
    arena.close()

    assert bytes(view[:5]) == b"hello"
    assert len(open_files() - before) == 1  # what the living view keeps
    assert len(old.view()) == 0
    del view
    assert open_files() == before


# How a place is named


@given(segment=st.integers(0, 2**63 - 1), offset=st.integers(0, 2**40), inner=st.integers(0, 2**40))
def test_the_other_side_reads_the_place_that_was_named(segment: int, offset: int, inner: int) -> None:
    place = placements.Place(Segment(segment, MIB), offset, 64)

    assert read_where(place.describe(inner)) == (segment, offset + inner)


@pytest.mark.parametrize("payload", [b"", b"\0", bytes(15), bytes(17), bytes(1000)], ids=len)
def test_a_payload_that_names_no_place_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"by {len(payload)} bytes, which name no place"):
        read_where(payload)


# The other side


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("shape", [(1,), (), (3, 5), (2, 1, 3, 2)], ids=str)
def test_a_tensor_is_the_same_on_the_other_side(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = random_tensor(shape, dtype)
    with arena_of(MIB) as arena:
        place_in(arena, 100)
        place = warm(place_in(arena, source.nbytes))
        placements.copy_now(source, place)
        segments = {place.segment.number: other_side_of(place.segment)}
        placed = placements.place_copy(place)
        opened = placements.open_tensor(*placed, str(dtype)[6:], shape, segments)

        assert opened.segment is segments[0]
        assert opened.owner is not None
        assert opened.owner.nbytes == source.nbytes
        tensor = opened.tensor
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert bytes_of(tensor) == bytes_of(source)


def test_both_sides_see_what_either_writes() -> None:
    with segment_of() as segment:
        tensor, _ = other_side_of(segment).tensor(64, torch.int32, (2, 3))
        segment.view(64, 24)[:] = struct.pack("6i", *range(6))
        assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]

        tensor[1, 2] = -5
        assert bytes(segment.view(84, 4)) == struct.pack("i", -5)


def test_what_was_opened_stays_for_as_long_as_a_view_of_it_lives_and_no_longer() -> None:
    before = open_files()
    with segment_of() as segment:
        mapped = other_side_of(segment)
        filled(segment, 0)
        segment.view(0, 64)[:] = b"\7" * 64
        opened = mapped.tensor(0, torch.uint8, (64,))
    gone: list[bool] = []
    weakref.finalize(opened.owner, gone.append, True)
    mapped.close()
    mapped.close()
    view = opened.tensor[5:6]
    del opened
    assert not gone
    assert view.tolist() == [7]
    assert open_files() != before  # the mapping keeps a descriptor of its own

    del view
    assert gone
    assert open_files() == before


def test_the_end_of_one_tensor_is_not_the_end_of_another_in_the_same_segment() -> None:
    with segment_of() as segment:
        mapped = other_side_of(segment)
        tensors = [mapped.tensor(offset, torch.uint8, (64,)) for offset in (0, 64, 0)]
        gone: list[int] = []
        for number, (_, owner) in enumerate(tensors):
            weakref.finalize(owner, gone.append, number)
        del owner
        del tensors[1]

        assert gone == [1]
        assert tensors[1].tensor.tolist() == [0] * 64


def test_nothing_is_opened_in_a_segment_that_was_closed() -> None:
    with segment_of() as segment:
        mapped = other_side_of(segment)
        mapped.close()

        with pytest.raises(ProtocolError):
            mapped.tensor(0, torch.uint8, (1,))


@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        (4096, (1,)),
        (4092, (2,)),
        (4100, (1,)),
        (4096, (0,)),
        (0, (0,)),
        (0, (0, 1 << 30)),
        (2, (1,)),
        (1, (1,)),
        (0, (1025,)),
        (0, (1 << 50,)),
        (2**64 - 4, (1,)),
        (2**64 - 4, (2,)),
        (8, (2, 512)),
    ],
    ids=str,
)
def test_a_tensor_outside_its_segment_or_off_its_grid_is_refused(offset: int, shape: tuple[int, ...]) -> None:
    with segment_of(4096) as segment:
        mapped = other_side_of(segment)

        with pytest.raises(ProtocolError, match=f"at byte {offset} of a segment of 4096"):
            mapped.tensor(offset, torch.float32, shape)
        with pytest.raises(ProtocolError, match=f"at byte {offset} of a segment of 4096"):
            placements.open_tensor("arena", struct.pack("<QQ", 3, offset), "float32", shape, {3: mapped})


@pytest.mark.parametrize(
    ("offset", "shape"), [(0, (1024,)), (4092, (1,)), (4092, ()), (2048, (2, 256))], ids=str
)
def test_a_tensor_that_ends_where_its_segment_ends_is_opened(offset: int, shape: tuple[int, ...]) -> None:
    with segment_of(4096) as segment:
        tensor, owner = other_side_of(segment).tensor(offset, torch.float32, shape)

        assert tuple(tensor.shape) == shape
        assert owner.nbytes == tensor.nbytes


# What a broken peer may hand over


@contextmanager
def memfd(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> Iterator[int]:
    descriptor = os.memfd_create("of a peer", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_segment_is_opened_and_its_descriptor_stays_the_callers() -> None:
    with memfd(8192) as descriptor:
        mapped = open_segment(descriptor, 8192)

        assert mapped.nbytes == 8192
        assert os.fstat(descriptor).st_size == 8192


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_memory_that_could_shrink_while_it_is_read_is_refused(seals: int) -> None:
    with memfd(4096, seals) as descriptor, pytest.raises(ProtocolError, match="could shrink"):
        open_segment(descriptor, 4096)


def test_what_is_no_memory_at_all_is_refused() -> None:
    reading_end, writing_end = os.pipe()
    null, this_file = os.open(os.devnull, os.O_RDONLY), os.open(__file__, os.O_RDONLY)

    for descriptor in (reading_end, writing_end, null, this_file):
        with pytest.raises(ProtocolError, match="could shrink"):
            open_segment(descriptor, 4096)
        os.close(descriptor)


@pytest.mark.parametrize("announced", [0, 1, 4095, 4097, 8192, 2**63 - 1])
def test_another_size_than_was_announced_is_refused(announced: int) -> None:
    with (
        memfd(4096) as descriptor,
        pytest.raises(ProtocolError, match=f"4096 bytes .* announced {announced}$"),
    ):
        open_segment(descriptor, announced)


def test_a_segment_of_no_bytes_is_refused() -> None:
    with memfd(0) as descriptor, pytest.raises(ProtocolError, match="0 bytes of memory and announced 0"):
        open_segment(descriptor, 0)


def test_a_segment_that_cannot_be_mapped_is_no_offence_but_a_lack() -> None:
    before = open_files()
    with memfd(1 << 60) as descriptor, pytest.raises(OSError, match="Cannot allocate memory"):
        open_segment(descriptor, 1 << 60)

    assert open_files() == before
