"""The bookkeeping of permits and memory, compared with simple models: who gets what, and when it is free."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.memory.pages import CHUNK_BYTES, Range, WarmPages, gaps
from aiotensor.protocol.arrived import NumberSet
from aiotensor.protocol.blocks import Blocks
from aiotensor.protocol.credits import Budget, Ticket
from tests.selection import COMPLETE

# Permits, and bytes with their places


LIMIT = 8
amounts = st.integers(0, LIMIT)
holders = st.sampled_from([None, "a", "b", "c"])


class Cells:
    """A space of a few cells; a place is the first of the cells in it."""

    def __init__(self, cells: int = LIMIT) -> None:
        self.cells = cells
        self.taken: dict[int, int] = {}

    def first_fit(self, amount: int) -> int | None:
        for start in range(self.cells - amount + 1):
            stop = start + amount
            if all(stop <= other or other + length <= start for other, length in self.taken.items()):
                return start
        return None

    def allocate(self, amount: int) -> int | None:
        start = self.first_fit(amount)
        if start is not None:
            self.taken[start] = amount
        return start

    def free(self, place: int) -> None:
        del self.taken[place]


class BudgetMachine(RuleBasedStateMachine):
    """Compare `Budget` with a list of grants, a queue of tickets and an array of cells."""

    @initialize(has_space=st.booleans())
    def begin(self, has_space: bool) -> None:
        self.space = Cells() if has_space else None
        self.cells = Cells() if has_space else None  # as they should be
        self.budget: Budget[int] = Budget(LIMIT, self.space)
        self.grants: list[Ticket[int]] = []
        self.line: list[Ticket[int]] = []
        self.peak = 0
        self.held: Counter[object] = Counter()  # what will not come back while its holder waits

    @property
    def in_use(self) -> int:
        return sum(ticket.amount for ticket in self.grants)

    def fits(self, amount: int) -> bool:
        has_place = self.cells is None or not amount or self.cells.first_fit(amount) is not None
        return self.in_use + amount <= LIMIT and has_place

    def grant_in_order(self) -> list[Ticket[int]]:
        granted = []
        while self.line and self.fits(self.line[0].amount):
            ticket = self.line.pop(0)
            self.note_grant(ticket)
            granted.append(ticket)
        return granted

    def note_grant(self, ticket: Ticket[int]) -> None:
        place = self.cells.allocate(ticket.amount) if self.cells is not None and ticket.amount else None
        assert ticket.place == place
        self.grants.append(ticket)
        self.peak = max(self.peak, self.in_use)
        if ticket.holder is not None:
            self.held[ticket.holder] += ticket.amount

    def stuck(self, elsewhere: int) -> Ticket[int] | None:
        """Return the request to refuse if all waiting requests depend on each other."""
        waiting = [ticket for ticket in self.line if ticket.holder is not None]
        kept = sum(self.held[holder] for holder in {ticket.holder for ticket in waiting}) + elsewhere
        if not self.line or kept < self.in_use:
            return None
        having = [ticket for ticket in waiting if self.held[ticket.holder]]
        return next(reversed(having or waiting), None)

    @rule(amount=amounts, holder=holders)
    def request(self, amount: int, holder: str | None) -> None:
        ticket = self.budget.request(amount, holder)
        self.line.append(ticket)
        granted = self.grant_in_order()
        assert ticket.granted == (ticket in granted)
        assert (ticket.amount, ticket.holder) == (amount, holder)

    @rule(amount=st.sampled_from([-1, LIMIT + 1]))
    def ask_for_what_could_never_be_granted(self, amount: int) -> None:
        with pytest.raises(ValueError, match=f"between 0 and the limit of {LIMIT}, got {amount}"):
            self.budget.request(amount)
        if amount < 0:
            with pytest.raises(ValueError, match=f"not be negative, got {amount}"):
                self.budget.try_request(amount)

    @rule(amount=st.integers(0, LIMIT + 2), holder=holders)
    def try_request(self, amount: int, holder: str | None) -> None:
        expected = not self.line and self.fits(amount)
        ticket = self.budget.try_request(amount, holder)
        assert (ticket is not None) == expected
        if ticket is not None:
            assert ticket.granted
            self.note_grant(ticket)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def release_what_was_granted(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.grants))
        self.grants.remove(ticket)
        # The amounts of a holder before and after it was settled are counted together.
        self.held[ticket.holder] = max(0, self.held[ticket.holder] - ticket.amount)
        if self.cells is not None and ticket.place is not None:
            self.cells.free(ticket.place)
        assert self.budget.release(ticket) == self.grant_in_order()
        assert not ticket.granted
        with pytest.raises(ValueError, match="not in deque"):
            self.budget.release(ticket)

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def release_what_waits(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.line))
        self.line.remove(ticket)
        assert self.budget.release(ticket) == self.grant_in_order()
        assert not ticket.granted

    @rule(holder=holders)
    def settle(self, holder: str | None) -> None:
        self.budget.settle(holder)
        del self.held[holder]

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), holder=holders)
    def reassign(self, data: st.DataObject, holder: str | None) -> None:
        ticket = data.draw(st.sampled_from(self.grants))
        assert (ticket.holder in self.budget.held) == (
            ticket.holder is not None and self.held[ticket.holder] > 0
        )
        self.held[ticket.holder] = max(0, self.held[ticket.holder] - ticket.amount)
        self.held[holder] += ticket.amount
        self.budget.reassign(ticket, holder)
        assert ticket.holder == holder

    @precondition(lambda self: self.line)
    @rule(elsewhere=st.integers(1, LIMIT))
    def ask_whether_it_is_stuck(self, elsewhere: int) -> None:
        assert self.budget.stuck(elsewhere) is self.stuck(elsewhere)

    @invariant()
    def it_counts_what_is_in_use_and_never_more_than_the_limit(self) -> None:
        assert self.budget.in_use == self.in_use <= LIMIT
        assert self.budget.peak == self.peak
        assert self.budget.waiting == len(self.line)
        assert all(ticket.granted for ticket in self.grants)
        assert not any(ticket.granted for ticket in self.line)
        assert not self.line or not self.fits(self.line[0].amount), "the first in line would fit"

    @invariant()
    def places_are_taken_by_what_is_in_use_and_by_nothing_else(self) -> None:
        if self.space is not None and self.cells is not None:
            assert self.space.taken == self.cells.taken

    @invariant()
    def it_is_stuck_when_all_in_use_belongs_to_those_who_wait(self) -> None:
        assert self.budget.stuck() is self.stuck(0)


TestAnyOrderOfRequests = pytest.mark.promise(15)(BudgetMachine.TestCase)
TestAnyOrderOfRequests.settings = settings(max_examples=200 if COMPLETE else 40, stateful_step_count=40)


# Places of blocks in an arena

MIB = 1 << 20
few_units = st.integers(64, 24 * 64)
few_large = st.integers(3 * MIB, 8 * MIB)
smalls = st.one_of(st.integers(1, 5 * 64), st.integers(4000, 3 * 4096))
larges = st.one_of(st.sampled_from([MIB - 64, MIB - 63, MIB, 2 * MIB]), st.integers(MIB // 2, 3 * MIB))


class BlocksMachine(RuleBasedStateMachine):
    """Keep nothing but the blocks that are handed out, and look through all the gaps between them."""

    @initialize(size=st.one_of(few_units, few_large))
    def begin(self, size: int) -> None:
        self.blocks = Blocks(size)
        self.size = size // 64 * 64
        self.taken: dict[int, int] = {}  # rounded lengths by offset

    # The model

    def gaps(self) -> list[tuple[int, int]]:
        edges = [
            0,
            *(edge for offset in sorted(self.taken) for edge in (offset, offset + self.taken[offset])),
        ]
        pairs = zip(edges[::2], [*edges[1::2], self.size], strict=True)
        return [(start, stop) for start, stop in pairs if start != stop]

    def best_fit(self, length: int, alignment: int) -> int | None:
        fits: list[tuple[int, int]] = []  # sizes of gaps, and offsets in them
        for start, stop in self.gaps():
            first, last = start + -start % alignment, stop - length - (stop - length) % alignment
            if first <= last:
                fits.append((stop - start, first if length >= MIB else last))
        return min(fits)[1] if fits else None

    # What callers do

    @rule(size=st.integers(-64, 63))
    def make_blocks_without_room(self, size: int) -> None:
        with pytest.raises(ValueError, match=f"at least 64 bytes, got {size}$"):
            Blocks(size)

    def check_allocate(self, nbytes: int) -> None:
        alignment = 4096 if nbytes >= 4096 else 64
        length = nbytes + -nbytes % alignment
        expected = self.best_fit(length, alignment)
        assert self.blocks.allocate(nbytes) == expected
        if expected is not None:
            self.taken[expected] = length

    @rule(nbytes=smalls)
    def allocate_small(self, nbytes: int) -> None:
        self.check_allocate(nbytes)

    @rule(nbytes=larges)
    def allocate_large(self, nbytes: int) -> None:
        self.check_allocate(nbytes)

    @rule(nbytes=st.integers(-64, 0))
    def allocate_nothing(self, nbytes: int) -> None:
        with pytest.raises(ValueError, match=f"at least 1 byte, got {nbytes}"):
            self.blocks.allocate(nbytes)

    @rule(nbytes=smalls, count=st.integers(2, 8))
    def allocate_several(self, nbytes: int, count: int) -> None:
        for _ in range(count):
            self.check_allocate(nbytes)

    @precondition(lambda self: self.gaps())
    @rule(data=st.data(), more=st.integers(-64, 64))
    def allocate_what_fits_a_gap(self, data: st.DataObject, more: int) -> None:
        start, stop = data.draw(st.sampled_from(self.gaps()))
        self.check_allocate(max(1, stop - start + more))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        self.blocks.free(offset)
        del self.taken[offset]

    @precondition(lambda self: self.taken)
    @rule(keep=st.integers(0, 1))
    def free_every_other(self, keep: int) -> None:
        for offset in sorted(self.taken)[keep::2]:
            self.blocks.free(offset)
            del self.taken[offset]

    @rule(units=st.integers(-2, 26))
    def free_what_may_not_be_there(self, units: int) -> None:
        if units * 64 in self.taken:
            self.blocks.free(units * 64)
            del self.taken[units * 64]
            return
        with pytest.raises(ValueError, match="no block is allocated"):
            self.blocks.free(units * 64)

    # Invariants

    @invariant()
    def runs_and_blocks_tile_the_room(self) -> None:
        blocks = [(offset, offset + self.blocks.lengths[offset]) for offset in self.taken]
        tiles = sorted([*blocks, *self.blocks.free_runs()])
        assert [start for start, _ in tiles] == [0, *(stop for _, stop in tiles[:-1])]
        assert tiles[-1][1] == self.size == self.blocks.size

    @invariant()
    def the_free_runs_are_the_gaps(self) -> None:
        assert self.blocks.free_runs() == self.gaps()
        assert self.blocks.largest_free == max((stop - start for start, stop in self.gaps()), default=0)

    @invariant()
    def lengths_are_what_was_asked_for(self) -> None:
        assert {offset: self.blocks.lengths[offset] for offset in self.taken} == self.taken
        assert self.blocks.in_use == sum(self.taken.values())


TestAnyOrderOfBlocks = BlocksMachine.TestCase
TestAnyOrderOfBlocks.settings = settings(max_examples=200 if COMPLETE else 40, stateful_step_count=40)


# Pages that have memory

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
TestAnyOrderOfFillingAndTaking.settings = settings(
    max_examples=200 if COMPLETE else 25, stateful_step_count=30
)

ranges = st.tuples(st.integers(0, 399), st.integers(1, 60)).map(lambda one: (one[0], one[0] + one[1]))


@settings(max_examples=500 if COMPLETE else 60)
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


# Numbers of messages that have ended


@given(
    numbers=st.lists(st.integers(0, 40) | st.just(2**63 - 1), max_size=60),
    kept=st.integers(0, 6),
    first=st.booleans(),
)
def test_a_number_set_contains_the_numbers_in_as_few_ranges_as_possible(
    numbers: list[int], kept: int, first: bool
) -> None:
    found = NumberSet()
    for number in numbers:
        found.add(number)
    ranges = found.ranges()
    assert [number for number in (*range(-2, 43), 2**63 - 2, 2**63 - 1) if number in found] == sorted(
        set(numbers)
    )
    assert all(start < stop for start, stop in ranges)
    assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))
    if first:
        found.keep_first(kept)
        assert found.ranges() == ranges[:kept]
    else:
        found.keep_last(kept)
        assert found.ranges() == ranges[max(0, len(ranges) - kept) :]
