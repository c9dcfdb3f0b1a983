"""Pages of a segment return to the system when no process uses them any more."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import given, settings
from hypothesis import strategies as st

from aiotensor.memory.mapping import Mapping, lock_all_pages, open_segment
from aiotensor.memory.pages import Range, gaps
from tests.rogues import SEALS
from tests.selection import COMPLETE

PAGE = mmap.PAGESIZE
PAGES = 32
NBYTES = PAGES * PAGE


@contextmanager
def segment() -> Iterator[int]:
    """Open a segment like a publisher, and write to all pages."""
    descriptor = os.memfd_create("pages", os.MFD_ALLOW_SEALING)
    try:
        os.write(descriptor, b"x" * NBYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        lock_all_pages(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def readers(count: int) -> Iterator[tuple[list[Mapping], int]]:
    """Return the mappings of some subscribers, whose publisher is gone, and a descriptor of the pages."""
    with segment() as descriptor:
        mappings = [open_segment(descriptor, NBYTES) for _ in range(count)]
        seen = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    try:
        yield mappings, seen
    finally:
        os.close(seen)


def present(descriptor: int) -> set[int]:
    """Return the numbers of the pages that have data."""
    data = os.pread(descriptor, NBYTES, 0)
    pages = {page for page in range(PAGES) if data[page * PAGE : (page + 1) * PAGE] == b"x" * PAGE}
    assert os.fstat(descriptor).st_blocks * 512 == len(pages) * PAGE
    return pages


def without(used: set[int]) -> list[Range]:
    """Return the ranges of all pages apart from some."""
    return gaps(0, NBYTES, [(page * PAGE, (page + 1) * PAGE) for page in used], PAGE)


@settings(max_examples=100 if COMPLETE else 40)
@given(st.lists(st.sets(st.integers(0, PAGES - 1)), min_size=1, max_size=4))
def test_pages_return_when_the_last_reader_does_not_use_them(used: list[set[int]]) -> None:
    with readers(len(used)) as (mappings, seen):
        for each, pages in zip(mappings[:-1], used, strict=False):
            each.remove(without(pages))
        assert present(seen) == set(range(PAGES))  # the last reader may still use all of them
        mappings[-1].remove(without(used[-1]))
        assert present(seen) == set.union(*used)
        for index, each in enumerate(mappings):
            used[index] = set()
            each.remove(without(set()))
            assert present(seen) == set.union(*used)


def test_the_locks_of_a_reader_last_as_long_as_its_mapping() -> None:
    with readers(2) as (mappings, seen):
        view = mappings[1].view
        del mappings[1]
        mappings[0].remove([(0, PAGE)])
        assert present(seen) == set(range(PAGES))
        del view
        mappings[0].remove([(0, PAGE)])
        assert present(seen) == set(range(1, PAGES))


def test_no_page_is_returned_while_a_publisher_descriptor_is_in_transit() -> None:
    with segment() as descriptor:
        sent = os.dup(descriptor)
        seen = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    early = open_segment(sent, NBYTES)
    early.remove([(0, NBYTES)])
    assert present(seen) == set(range(PAGES))
    late = open_segment(sent, NBYTES)
    os.close(sent)
    early.remove([(0, NBYTES)])
    assert present(seen) == set(range(PAGES))
    late.remove([(0, NBYTES - PAGE)])
    assert present(seen) == {PAGES - 1}
    os.close(seen)
