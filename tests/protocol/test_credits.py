from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.protocol.credits import Budget, Ticket

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


TestAnyOrderOfRequestsAndReleases = BudgetMachine.TestCase
TestAnyOrderOfRequestsAndReleases.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_large_request_is_not_overtaken_by_smaller_requests() -> None:
    budget: Budget[None] = Budget(10)
    first = budget.request(6)
    big = budget.request(10)
    small = budget.request(1)

    assert not budget.try_request(1)
    assert not small.granted
    assert budget.release(first) == [big]
    assert budget.release(big) == [small]


def test_one_release_grants_all_that_fits_in_order() -> None:
    budget: Budget[None] = Budget(10)
    first = budget.request(10)
    waiting = [budget.request(amount) for amount in (4, 3, 4, 1)]

    assert budget.release(first) == waiting[:2]
    assert budget.in_use == 7


def test_releasing_the_first_waiting_ticket_grants_the_following_ones() -> None:
    budget: Budget[None] = Budget(10)
    budget.request(6)
    big = budget.request(10)
    small = budget.request(4)

    assert budget.release(big) == [small]


def test_releasing_a_later_waiting_ticket_grants_no_other() -> None:
    budget: Budget[None] = Budget(10)
    first = budget.request(6)
    big, middle, small = budget.request(10), budget.request(1), budget.request(4)

    assert budget.release(middle) == []
    assert budget.release(first) == [big]
    assert not small.granted


def test_releasing_a_granted_ticket_grants_the_next_request() -> None:
    budget: Budget[None] = Budget(10)
    ticket = budget.request(10, "a")
    waiting = budget.request(10, "b")

    assert budget.release(ticket) == [waiting]
    assert budget.in_use == 10


@pytest.mark.parametrize("waits", [False, True], ids=["granted", "waiting"])
def test_releasing_a_ticket_twice_raises_value_error(waits: bool) -> None:
    budget: Budget[None] = Budget(10)
    budget.request(5)
    ticket = budget.request(10 if waits else 5)
    budget.release(ticket)

    with pytest.raises(ValueError, match=r"not in deque"):
        budget.release(ticket)
    assert (budget.in_use, budget.waiting) == (5, 0)


@pytest.mark.parametrize("amount", [-1, 11])
def test_a_request_outside_the_limit_raises_value_error(amount: int) -> None:
    budget: Budget[None] = Budget(10)

    with pytest.raises(ValueError, match=f"between 0 and the limit of 10, got {amount}"):
        budget.request(amount)
    assert budget.waiting == 0


def test_a_failed_try_request_changes_nothing() -> None:
    space = Cells(10)
    budget = Budget(10, space)
    budget.request(6)

    assert budget.try_request(5) is None
    assert (budget.in_use, budget.peak, budget.waiting, space.taken) == (6, 6, 0, {0: 6})


def test_the_peak_is_kept_after_a_release() -> None:
    budget: Budget[None] = Budget(10)
    budget.release(budget.request(7))

    assert (budget.in_use, budget.peak) == (0, 7)


def test_a_release_frees_its_place_before_the_next_grant() -> None:
    space = Cells(10)
    budget = Budget(10, space)
    first = budget.request(10)
    waiting = [budget.request(4), budget.request(6)]

    assert budget.release(first) == waiting
    assert [ticket.place for ticket in waiting] == [0, 4]


def test_a_request_waits_while_free_space_is_fragmented_and_blocks_later_ones() -> None:
    space = Cells(10)
    budget = Budget(10, space)
    low, middle, high = budget.request(4), budget.request(2), budget.request(4)
    budget.release(low)
    budget.release(high)
    assert budget.in_use == 2  # eight of ten are free, but in two pieces

    big = budget.request(5)
    small = budget.request(1)
    assert (big.granted, small.granted) == (False, False)
    assert budget.try_request(1) is None

    assert budget.release(middle) == [big, small]
    assert [ticket.place for ticket in (big, small)] == [0, 5]


def test_releasing_a_request_that_waits_for_space_grants_the_following_one() -> None:
    budget = Budget(10, Cells(10))
    low, _, high = budget.request(4), budget.request(2), budget.request(4)
    budget.release(low)
    budget.release(high)
    big, small = budget.request(5), budget.request(4)

    assert budget.release(big) == [small]
    assert small.place == 0


def test_a_request_of_zero_is_granted_without_a_place() -> None:
    space = Cells(10)
    budget = Budget(10, space)
    budget.request(10)
    nothing = budget.request(0)

    assert nothing.granted
    assert nothing.place is None
    assert budget.release(nothing) == []
    assert space.taken == {0: 10}


def test_stuck_returns_the_latest_request_when_all_holders_wait() -> None:
    budget: Budget[None] = Budget(10)
    budget.request(5, "a")
    of_b = budget.request(5, "b")
    first = budget.request(5, "a")
    assert budget.stuck() is None  # b may still give its part back

    second = budget.request(5, "b")
    assert budget.stuck() is second
    budget.release(second)
    assert budget.stuck() is None
    assert budget.release(of_b) == [first]


def test_stuck_never_returns_a_request_of_an_owner_that_holds_nothing() -> None:
    budget: Budget[None] = Budget(10)
    budget.request(10, "a")
    greedy = budget.request(5, "a")
    budget.request(5, "new")

    assert budget.stuck() is greedy


def test_stuck_never_returns_a_request_of_an_owner_that_was_granted_zero() -> None:
    budget: Budget[None] = Budget(10)
    budget.request(10, "a")
    budget.request(0, "new")
    greedy = budget.request(5, "a")
    budget.request(5, "new")

    assert budget.stuck() is greedy


def test_a_budget_is_not_stuck_while_an_amount_in_use_will_be_released() -> None:
    budget: Budget[None] = Budget(10)
    budget.request(5, "a")
    budget.request(5)
    budget.request(6, "a")
    assert budget.stuck() is None

    budget = Budget(10)
    budget.request(5, "a")
    budget.request(5, "b")
    budget.settle("b")
    budget.request(5, "a")
    assert budget.stuck() is None


def test_a_budget_is_stuck_if_only_waiting_holders_could_close_a_gap() -> None:
    budget = Budget(10, Cells(10))
    low, of_a, high = budget.request(4), budget.request(2, "a"), budget.request(4)
    budget.release(low)
    budget.release(high)
    other = budget.request(5, "b")
    assert budget.stuck() is None

    more = budget.request(5, "a")
    assert budget.stuck() is more
    budget.release(more)
    assert budget.release(of_a) == [other]


def test_stuck_includes_amounts_that_are_held_elsewhere() -> None:
    budget: Budget[None] = Budget(10)
    budget.request(4)
    budget.request(6, "a")
    more = budget.request(1, "a")

    assert budget.stuck(elsewhere=3) is None
    assert budget.stuck(elsewhere=4) is more
