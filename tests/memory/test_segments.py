import errno
import fcntl
import os
import resource
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.memory import mapping
from aiotensor.memory.arena import Extent, Segment
from tests.memory.segments import MIB, chunk, filled, lowered, open_files, segment_of
from tests.selection import COMPLETE


def bytes_given(segment: Segment) -> int:
    """Return the memory of a segment in bytes, according to the kernel."""
    return os.fstat(segment.descriptor.number).st_blocks * 512


# A segment


def test_the_size_and_seals_of_a_segment_cannot_be_changed() -> None:
    with segment_of(MIB) as segment:
        for size in (0, MIB - 1, MIB + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.descriptor.number, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(segment.descriptor.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.fstat(segment.descriptor.number).st_size == MIB


def test_a_segment_has_no_name_and_no_child_inherits_it() -> None:
    with segment_of() as segment:
        assert os.readlink(f"/proc/self/fd/{segment.descriptor.number}").startswith("/memfd:")
        assert not os.get_inheritable(segment.descriptor.number)


def test_a_segment_takes_no_memory_until_it_is_filled() -> None:
    with segment_of(1 << 36) as segment:
        assert bytes_given(segment) == 0
        assert segment.warm.nbytes == 0
        assert not segment.warm.has(0, 1)
        assert not segment.has_idle


def test_returned_memory_is_freed_and_reads_as_zero_when_reused() -> None:
    with segment_of() as segment:
        filled(segment, chunk(0), chunk(1), chunk(2))
        segment.memory[: 3 * MIB] = b"x" * (3 * MIB)
        segment.take_idle(0)
        filled(segment, chunk(1))  # a block came to lie there before it was given back
        segment.memory[MIB : 2 * MIB] = b"y" * MIB
        segment.return_memory()

        assert bytes_given(segment) == segment.warm.nbytes == MIB
        filled(segment, chunk(0))
        assert bytes(segment.memory[:MIB]) == bytes(MIB)
        assert bytes(segment.memory[MIB : 2 * MIB]) == b"y" * MIB


sizes = st.one_of(st.integers(1, 4096), st.integers(MIB // 2, 3 * MIB))


@settings(max_examples=200 if COMPLETE else 50)
@given(
    nbytes=st.integers(MIB // 2, 12 * MIB),
    wanted=st.lists(st.tuples(sizes, st.booleans()), max_size=12),
    chunks=st.sets(st.integers(0, 11)),
)
def test_a_warm_chunk_is_idle_exactly_if_no_block_has_a_byte_in_it(
    nbytes: int, wanted: list[tuple[int, bool]], chunks: set[int]
) -> None:
    with segment_of(nbytes) as segment:
        blocks = {offset: size for size, _ in wanted if (offset := segment.blocks.allocate(size)) is not None}
        for offset, (_, is_freed) in zip(list(blocks), wanted, strict=False):
            if is_freed:
                segment.free(Extent(segment, offset, blocks.pop(offset)))
        warm_chunks = {number for number in chunks if number * MIB < segment.nbytes}
        all_warm = {number: chunk(number, min(MIB, segment.nbytes - number * MIB)) for number in warm_chunks}
        segment.filled([], list(all_warm.values()))
        touched = {
            number
            for offset in blocks
            for number in range(offset // MIB, (offset + segment.blocks.lengths[offset] - 1) // MIB + 1)
        }

        assert segment.has_idle == bool(warm_chunks - touched)
        assert segment.take_idle(0) == [all_warm[number] for number in sorted(warm_chunks - touched)]
        assert all(segment.warm.has(number * MIB, 1) for number in warm_chunks & touched)


def test_filling_returns_only_as_much_taken_memory_as_it_fills() -> None:
    with segment_of() as segment:
        filled(segment, *map(chunk, range(6)))
        segment.memory[: 6 * MIB] = b"x" * (6 * MIB)
        segment.take_free()
        filled(segment, chunk(2))
        assert bytes(segment.memory[2 * MIB : 3 * MIB]) == bytes(MIB)
        assert len(segment.taken) == 5
        filled(segment, chunk(7))
        assert len(segment.taken) == 4
        assert bytes_given(segment) == 6 * MIB
        segment.provide([chunk(0)], [], lambda: True)
        assert bytes_given(segment) == 6 * MIB, "it was abandoned"

        segment.return_memory()
        assert bytes_given(segment) == segment.warm.nbytes == 2 * MIB


# More addresses than memory


def test_idle_memory_is_returned_first_when_the_limit_would_be_exceeded() -> None:
    with segment_of(8 * MIB) as segment:
        first, second, third = (segment.blocks.allocate(MIB) for _ in range(3))
        assert (first, second, third) == (0, MIB, 2 * MIB)
        filled(segment, *map(chunk, range(3)))
        segment.free(Extent(segment, MIB, MIB))
        offset = segment.blocks.allocate(2 * MIB)  # the hole is too short
        assert offset == 3 * MIB
        cold = segment.prepare(offset, 2 * MIB, 4 * MIB)

        assert not segment.warm.has(*chunk(1))
        assert cold == [chunk(3), chunk(4)]
        segment.provide(cold, [])
        segment.filled(cold, cold)
        assert bytes_given(segment) == segment.warm.nbytes == 4 * MIB


def test_memory_being_filled_counts_against_the_limit() -> None:
    with segment_of(8 * MIB) as segment:
        filled(segment, chunk(7))
        offset = segment.blocks.allocate(MIB)
        assert offset == 0
        assert segment.prepare(0, MIB, 2 * MIB) == [chunk(0)]
        assert segment.warm.has(*chunk(7))
        other = segment.blocks.allocate(MIB)
        assert other == MIB
        assert segment.prepare(MIB, MIB, 2 * MIB) == [chunk(1)]
        assert not segment.warm.has(*chunk(7))


def test_memory_is_not_returned_from_a_chunk_being_filled() -> None:
    with segment_of(8 * MIB) as segment:
        cold = segment.prepare(0, 3 * MIB // 2, 8 * MIB)
        assert cold == [chunk(0), chunk(1)], "the second has room for other blocks"
        rest = (3 * MIB // 2, MIB // 2)
        filled(segment, rest, chunk(5))  # for other blocks, which have ended since
        segment.provide(cold, [])

        assert segment.blocks.allocate(3 * MIB // 2) == 0
        assert segment.take_free() == [chunk(5)]
        segment.filled(cold, cold)
        assert segment.warm.has(*rest)
        segment.memory[3 * MIB // 2 : 2 * MIB] = b"x" * (MIB // 2)  # of a block that has come since
        segment.return_memory()
        assert bytes(segment.memory[3 * MIB // 2 : 2 * MIB]) == b"x" * (MIB // 2)
        assert segment.take_free() == [rest]


def test_memory_is_mapped_on_first_write_without_madv_populate_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapping, "_MADV_POPULATE_WRITE", 9999)
    with segment_of() as segment:
        filled(segment, chunk(0))
        segment.memory[:5] = b"hello"

        assert bytes_given(segment) == MIB
        assert bytes(segment.memory[:6]) == b"hello\0"


# A machine that is short of something


def test_a_segment_beyond_a_limit_raises_os_error_without_leaks() -> None:
    before = open_files()
    next_free = os.dup(0)
    os.close(next_free)
    segment = Segment(0, 2 * MIB)
    with lowered(resource.RLIMIT_FSIZE, MIB), pytest.raises(OSError, match="File too large"):
        segment.open()
    with lowered(resource.RLIMIT_NOFILE, next_free), pytest.raises(OSError) as caught:  # noqa: PT011
        segment.open()
    assert caught.value.errno == errno.EMFILE
    for nbytes in (1 << 60, sys.maxsize):
        unaddressable = Segment(0, nbytes)
        with pytest.raises(OSError, match=f"Errno {errno.ENOMEM}"):
            unaddressable.open()
        assert not unaddressable.memory

    assert open_files() <= before
    segment.open()
    segment.close()


def test_a_failed_fill_raises_os_error_and_leaves_the_range_cold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(descriptor: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with segment_of() as segment:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OSError, match="No space left"):
            segment.provide([chunk(0)], [])

        assert not segment.warm.has(0, 1)
