import os

from aiotensor.memory.arena import Arena
from tests.memory.segments import (
    MIB,
    open_files,
    place_in,
    warm,
)
from verification.processes import watch


def test_a_segment_is_unmapped_with_its_last_view() -> None:
    before = open_files()
    arena = Arena(4 * MIB)
    view = warm(place_in(arena, MIB)).view()
    view[:5] = b"hello"
    arena.close()
    arena.close()

    assert bytes(view[:5]) == b"hello"
    assert open_files() <= before
    assert watch.memfds(os.getpid()) == 1  # what the living view keeps
    del view
    assert watch.memfds(os.getpid()) == 0
