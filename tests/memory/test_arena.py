import os
import resource
from pathlib import Path

import pytest

from aiotensor.memory.arena import Arena
from tests.memory.segments import MIB, lowered, open_files, place_in, warm
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


@pytest.mark.parametrize("others", [0, 1])
def test_an_arena_gets_fewer_addresses_only_while_a_single_block_has_a_place(others: int) -> None:
    arena = Arena(64 * MIB)
    for _ in range(others):
        arena.allocate(4096)  # for bytes that are in no block
    place = arena.allocate(MIB)
    assert place is not None
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with lowered(resource.RLIMIT_AS, mapped + 128 * MIB):
        if others:
            with pytest.raises(OSError, match="cannot be mapped"):
                arena.open_for(place)
        else:
            place = arena.open_for(place)
    assert arena.open_for(place) == place
    assert arena.nbytes == (256 if others else 64) * MIB
    arena.free(place)
    arena.close()
