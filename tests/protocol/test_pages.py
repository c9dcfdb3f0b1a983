"""The record of pages that have memory, compared with a plain set."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from aiotensor.protocol.pages import CHUNK_BYTES, Range, WarmPages, gaps

PAGE = CHUNK_BYTES // 8  # few pages, so that the drawn ranges often meet
CHUNKS = 4


def pages_of(ranges: list[Range]) -> set[int]:
    found: list[int] = []
    for start, length in ranges:
        assert start % PAGE == length % PAGE == 0
        assert length > 0
        assert start // CHUNK_BYTES == (start + length - 1) // CHUNK_BYTES
        found += range(start // PAGE, (start + length) // PAGE)
    assert len(found) == len(set(found))
    return set(found)


class PagesMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(1, 8 * CHUNKS))
    def make(self, pages: int) -> None:
        self.size = pages * PAGE
        self.pages = WarmPages(self.size, PAGE)
        self.warm: set[int] = set()

    def within(self, data: st.DataObject) -> tuple[int, int]:
        start = data.draw(st.integers(0, self.size - 1))
        return start, data.draw(st.integers(start + 1, self.size))

    @rule(data=st.data(), whole_chunks=st.booleans())
    def fill(self, data: st.DataObject, whole_chunks: bool) -> None:
        start, stop = self.within(data)
        needed = set(range(start // PAGE, (stop - 1) // PAGE + 1))
        missing = self.pages.missing(start, stop - start, whole_chunks=whole_chunks)
        assert pages_of(missing) >= needed - self.warm
        if not whole_chunks:
            assert pages_of(missing) <= needed
        assert self.pages.has(start, stop - start) == (needed <= self.warm) == (not missing)
        self.pages.add(missing)
        self.warm |= pages_of(missing)
        assert self.pages.has(start, stop - start)

    @rule(data=st.data(), is_bounded=st.booleans())
    def take(self, data: st.DataObject, is_bounded: bool) -> None:
        start, stop = self.within(data)
        most = data.draw(st.integers(1, self.size)) if is_bounded else None
        inside = {page for page in self.warm if start <= page * PAGE and (page + 1) * PAGE <= stop}
        before = self.pages.nbytes
        taken = pages_of(self.pages.take(start, stop, most)) & self.warm
        assert taken <= inside
        if most is None:
            assert taken == inside
        else:
            assert len(taken) * PAGE >= min(most, len(inside) * PAGE)
            assert len(taken) * PAGE < most + CHUNK_BYTES
        self.warm -= taken
        assert before - self.pages.nbytes == len(taken) * PAGE

    @invariant()
    def it_knows_the_pages_that_have_memory(self) -> None:
        assert self.pages.nbytes == len(self.warm) * PAGE
        assert [self.pages.has(page * PAGE, 1) for page in range(self.size // PAGE)] == [
            page in self.warm for page in range(self.size // PAGE)
        ]
        assert set(self.pages.chunks(0, CHUNKS)) == {page * PAGE // CHUNK_BYTES for page in self.warm}


TestAnyOrderOfFillingAndTaking = PagesMachine.TestCase
TestAnyOrderOfFillingAndTaking.settings = settings(max_examples=100, stateful_step_count=30)

ranges = st.tuples(st.integers(0, 399), st.integers(1, 60)).map(lambda one: (one[0], one[0] + one[1]))


@settings(max_examples=300)
@given(within=ranges, kept=st.lists(ranges, max_size=8))
def test_gaps_are_the_pages_that_no_kept_range_touches(
    within: tuple[int, int], kept: list[tuple[int, int]]
) -> None:
    def touched(start: int, stop: int) -> set[int]:
        return set(range(start // 10, (stop - 1) // 10 + 1))

    found = gaps(*within, kept, 10)
    pages = [page for start, length in found for page in range(start // 10, (start + length) // 10)]
    assert all(start % 10 == length % 10 == 0 for start, length in found)
    assert sorted(set(pages)) == pages
    assert set(pages) == touched(*within) - set().union(*(touched(*one) for one in kept))
