from itertools import pairwise, permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiotensor.protocol.blocks import ALIGNMENT, LARGE_BYTES, Blocks

ROOM = 16 * LARGE_BYTES
lengths = st.one_of(st.integers(1, 4 * ALIGNMENT), st.integers(LARGE_BYTES // 2, 3 * LARGE_BYTES))


def handed_out(blocks: Blocks, nbytes: int) -> int:
    offset = blocks.allocate(nbytes)
    assert offset is not None
    return offset


def full(units: int) -> tuple[Blocks, list[int]]:
    """Blocks of one unit each that leave nothing free, and their offsets from low to high."""
    blocks = Blocks(units * ALIGNMENT)
    offsets = sorted(handed_out(blocks, ALIGNMENT) for _ in range(units))
    assert blocks.free_runs() == []
    return blocks, offsets


@given(wanted=st.lists(lengths, max_size=30))
def test_blocks_never_overlap_and_stay_within_the_size(wanted: list[int]) -> None:
    blocks = Blocks(ROOM)
    taken = []
    for nbytes in wanted:
        if (offset := blocks.allocate(nbytes)) is not None:
            taken.append((offset, offset + nbytes))

    taken.sort()
    assert all(stop <= start for (_, stop), (start, _) in pairwise(taken))
    assert all(start >= 0 and stop <= ROOM for start, stop in taken)


@given(wanted=st.lists(lengths, max_size=30))
def test_every_offset_and_length_is_aligned(wanted: list[int]) -> None:
    blocks = Blocks(ROOM)
    for nbytes in wanted:
        if (offset := blocks.allocate(nbytes)) is not None:
            assert offset % ALIGNMENT == 0
            assert blocks.lengths[offset] % ALIGNMENT == 0
            assert 0 <= blocks.lengths[offset] - nbytes < ALIGNMENT


@given(size=st.integers(ALIGNMENT, ROOM), wanted=st.lists(lengths, max_size=30), data=st.data())
def test_freeing_every_block_restores_one_free_run(size: int, wanted: list[int], data: st.DataObject) -> None:
    blocks = Blocks(size)
    taken = [offset for nbytes in wanted if (offset := blocks.allocate(nbytes)) is not None]

    for offset in data.draw(st.permutations(taken)):
        blocks.free(offset)

    assert blocks.free_runs() == [(0, blocks.size)]
    assert blocks.largest_free == blocks.size
    assert blocks.in_use == 0
    assert blocks.allocate(blocks.size) == 0


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_adjacent_free_runs_are_merged_in_any_order_of_freeing(order: tuple[int, ...]) -> None:
    blocks, offsets = full(4)
    for index in order:
        blocks.free(offsets[index])
        runs = blocks.free_runs()
        assert all(stop < start for (_, stop), (start, _) in pairwise(runs))

    assert blocks.free_runs() == [(0, 4 * ALIGNMENT)]


@pytest.mark.parametrize(("below", "above"), list(product([False, True], repeat=2)))
def test_a_freed_block_is_merged_only_with_adjacent_free_runs(below: bool, above: bool) -> None:
    blocks, offsets = full(7)
    blocks.free(offsets[0])
    blocks.free(offsets[6])
    for index in [2] * below + [4] * above:
        blocks.free(offsets[index])

    blocks.free(offsets[3])

    joined = (offsets[2 if below else 3], offsets[5 if above else 4])
    assert blocks.free_runs() == [(0, ALIGNMENT), joined, (6 * ALIGNMENT, 7 * ALIGNMENT)]
    assert blocks.largest_free == joined[1] - joined[0]


def test_a_freed_run_is_found_at_its_joined_length() -> None:
    blocks, offsets = full(5)
    for index in (1, 3, 2):
        blocks.free(offsets[index])

    assert blocks.allocate(3 * ALIGNMENT) == offsets[1]


def test_a_merged_run_is_not_found_at_its_former_length() -> None:
    blocks, offsets = full(6)
    for index in (0, 2, 4, 3):
        blocks.free(offsets[index])

    assert blocks.allocate(ALIGNMENT) == offsets[0]
    assert blocks.allocate(3 * ALIGNMENT) == offsets[2]
    assert blocks.allocate(1) is None


@pytest.mark.parametrize("unit", [ALIGNMENT, LARGE_BYTES])
def test_the_smallest_run_that_is_long_enough_is_used(unit: int) -> None:
    blocks = Blocks(10 * unit)
    taken = sorted(handed_out(blocks, unit) for _ in range(10))
    for index in (1, 2, 3, 5, 6, 8):  # runs of three, two and one
        blocks.free(taken[index])

    assert blocks.allocate(2 * unit) == taken[5]
    assert blocks.allocate(unit) == taken[8]
    assert blocks.allocate(3 * unit) == taken[1]
    assert blocks.allocate(1) is None


@pytest.mark.parametrize("unit", [ALIGNMENT, LARGE_BYTES])
def test_of_runs_of_one_length_the_lowest_is_used(unit: int) -> None:
    blocks = Blocks(6 * unit)
    taken = sorted(handed_out(blocks, unit) for _ in range(6))
    for index in (4, 0, 2):
        blocks.free(taken[index])

    assert [blocks.allocate(unit) for _ in range(3)] == [taken[0], taken[2], taken[4]]


def test_large_blocks_are_cut_from_the_low_end_and_small_ones_from_the_high_end() -> None:
    blocks = Blocks(ROOM)
    assert blocks.allocate(LARGE_BYTES) == 0
    assert blocks.allocate(LARGE_BYTES - ALIGNMENT) == ROOM - LARGE_BYTES + ALIGNMENT
    assert blocks.allocate(LARGE_BYTES) == LARGE_BYTES
    assert blocks.allocate(1) == ROOM - LARGE_BYTES


def test_a_block_that_is_large_once_rounded_up_is_large() -> None:
    blocks = Blocks(ROOM)
    blocks.allocate(ALIGNMENT)
    assert blocks.allocate(LARGE_BYTES - 1) == 0
    assert blocks.lengths[0] == LARGE_BYTES


def test_long_lived_small_blocks_do_not_fragment_the_space_for_large_ones() -> None:
    blocks = Blocks(4 * LARGE_BYTES)
    for _ in range(10):
        large = [handed_out(blocks, LARGE_BYTES) for _ in range(3)]
        handed_out(blocks, 1000)
        for offset in large:
            blocks.free(offset)

    assert blocks.free_runs() == [(0, 4 * LARGE_BYTES - 10 * 1024)]


def test_one_block_may_use_the_entire_size_and_no_more() -> None:
    blocks = Blocks(4 * ALIGNMENT)
    assert blocks.allocate(4 * ALIGNMENT + 1) is None
    assert blocks.allocate(4 * ALIGNMENT - 63) == 0
    assert (blocks.in_use, blocks.largest_free, blocks.free_runs()) == (4 * ALIGNMENT, 0, [])
    assert blocks.allocate(1) is None


def test_no_block_is_put_together_from_runs_that_do_not_touch() -> None:
    blocks, offsets = full(3)
    blocks.free(offsets[0])
    blocks.free(offsets[2])

    assert blocks.allocate(ALIGNMENT + 1) is None
    assert blocks.in_use == ALIGNMENT
    assert blocks.free_runs() == [(0, ALIGNMENT), (2 * ALIGNMENT, 3 * ALIGNMENT)]


def test_the_usable_size_is_rounded_down() -> None:
    blocks = Blocks(3 * ALIGNMENT - 1)
    assert blocks.size == 2 * ALIGNMENT
    assert blocks.free_runs() == [(0, 2 * ALIGNMENT)]


def test_in_use_counts_rounded_lengths() -> None:
    blocks = Blocks(ROOM)
    first = handed_out(blocks, 1)
    second = handed_out(blocks, ALIGNMENT + 1)
    assert (blocks.lengths[first], blocks.lengths[second]) == (ALIGNMENT, 2 * ALIGNMENT)
    assert blocks.in_use == 3 * ALIGNMENT

    blocks.free(first)
    assert blocks.in_use == 2 * ALIGNMENT


@pytest.mark.parametrize("size", [-ALIGNMENT, 0, 1, ALIGNMENT - 1])
def test_a_size_below_one_block_raises_value_error(size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 64 bytes, got {size}$"):
        Blocks(size)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_block_of_no_bytes_is_refused(nbytes: int) -> None:
    blocks = Blocks(ROOM)
    with pytest.raises(ValueError, match=f"at least 1 byte, got {nbytes}$"):
        blocks.allocate(nbytes)
    assert blocks.free_runs() == [(0, ROOM)]


def test_freeing_an_unallocated_offset_raises_and_changes_nothing() -> None:
    blocks = Blocks(8 * ALIGNMENT)
    offset = handed_out(blocks, 2 * ALIGNMENT)
    runs = blocks.free_runs()

    for wrong in (0, offset - ALIGNMENT, offset + 1, offset + ALIGNMENT, offset + 2 * ALIGNMENT, -ALIGNMENT):
        with pytest.raises(ValueError, match=f"no block is allocated at offset {wrong}$"):
            blocks.free(wrong)

    assert (blocks.free_runs(), blocks.in_use) == (runs, 2 * ALIGNMENT)


def test_freeing_a_block_twice_raises_value_error() -> None:
    blocks = Blocks(ROOM)
    offset = handed_out(blocks, 1)
    blocks.free(offset)
    with pytest.raises(ValueError, match="no block is allocated"):
        blocks.free(offset)
    assert not blocks.lengths
    assert (blocks.free_runs(), blocks.in_use) == ([(0, ROOM)], 0)
