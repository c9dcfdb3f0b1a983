import os
import time

import pytest
import torch

from aiotensor.memory.arena import Arena
from tests.memory.segments import (
    MIB,
    arena_of,
    chunk,
    open_files,
    other_side_of,
    place_in,
    warm,
)
from verification.processes import watch


def test_a_freed_block_becomes_idle_from_then_on() -> None:
    with arena_of() as arena:
        place = warm(place_in(arena, 2 * MIB))
        before = time.monotonic()
        arena.free(place)

        assert arena.take_idle(before) == (place.segment, [])
        assert arena.take_idle(time.monotonic()) == (place.segment, [chunk(0), chunk(1)])
        assert arena.warm_bytes == 0


def test_blocks_of_a_retired_segment_are_never_allocated_again() -> None:
    with arena_of(4 * MIB) as arena:
        first, second = (warm(place_in(arena, 2 * MIB)) for _ in range(2))
        old = first.segment
        kept = other_side_of(old)
        view = kept.tensor(0, torch.uint8, (2 * MIB,))[0]
        view.fill_(7)
        arena.retire(old)
        old.read_elsewhere([first.offset, second.offset])

        assert old.is_retired
        arena.free(first)
        for _ in range(2):
            place = warm(place_in(arena, 2 * MIB))
            assert place.segment is not old
            assert place.segment.number != old.number
            place.view()[:] = b"\1" * (2 * MIB)
        arena.free(second)

        assert bool((view == 7).all())


def test_a_retired_segment_is_closed_when_its_last_block_is_freed() -> None:
    with arena_of() as arena:
        before = open_files()
        first, second = (warm(place_in(arena, MIB)) for _ in range(2))
        arena.retire(first.segment)
        first.segment.read_elsewhere([first.offset])
        newer = warm(place_in(arena, MIB))
        assert arena.warm_bytes == 3 * MIB

        arena.free(first)
        assert bytes(first.view()[:1]) == b"\0", "others may still write there"
        arena.free(second)
        assert arena.warm_bytes == MIB
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(first.segment.descriptor.number)
        assert len(open_files() - before) == 1  # the newer segment
        arena.free(newer)
        assert place_in(arena, MIB) == newer


def test_all_unused_pages_of_a_retired_segment_are_free() -> None:
    with arena_of() as arena:
        ours, theirs, both = (warm(place_in(arena, MIB)) for _ in range(3))
        arena.free(warm(place_in(arena, 5 * MIB)))
        retired = ours.segment
        arena.retire(retired)
        retired.read_elsewhere([theirs.offset, both.offset])
        assert retired.is_retired
        arena.free(theirs)
        assert retired.take_free() == [chunk(number) for number in range(3, 8)]
        assert retired.take_free() == []

        retired.reader_ended([theirs.offset, both.offset])
        assert retired.take_free() == [chunk(1)]
        arena.free(ours)
        assert retired.take_free() == [chunk(0)]
        arena.free(both)
        assert not retired.memory


def test_closing_an_arena_releases_its_segments_with_their_last_views() -> None:
    before = open_files()
    arena = Arena(4 * MIB)
    old = warm(place_in(arena, MIB))
    arena.retire(old.segment)
    new = warm(place_in(arena, MIB))
    view = new.view()
    view[:5] = b"hello"
    arena.close()
    arena.close()

    assert bytes(view[:5]) == b"hello"
    assert open_files() <= before
    assert len(old.view()) == 0
    assert watch.memfds(os.getpid()) == 1  # what the living view keeps
    del view
    assert watch.memfds(os.getpid()) == 0
