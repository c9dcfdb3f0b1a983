import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.protocol.credits import Budget, Ticket

LIMIT = 8
amounts = st.integers(0, LIMIT)
holders = st.sampled_from([None, "a", "b", "c"])


class Grant:
    """An amount that was granted, and whether its holder is known to give it back."""

    def __init__(self, amount: int, holder: str | None) -> None:
        self.amount = amount
        self.holder = holder
        self.will_come_back = holder is None


class BudgetMachine(RuleBasedStateMachine):
    """Keep a list of grants and a line of tickets, beside `Budget`."""

    @initialize()
    def begin(self) -> None:
        self.budget = Budget(LIMIT)
        self.grants: dict[Ticket, Grant] = {}
        self.line: list[tuple[Ticket, int, str | None]] = []
        self.peak = 0
        self.settled: set[str | None] = {None}
        self.came_again = False

    @property
    def in_use(self) -> int:
        return sum(grant.amount for grant in self.grants.values())

    def grant_in_order(self) -> list[Ticket]:
        granted = []
        while self.line and self.in_use + self.line[0][1] <= LIMIT:
            ticket, amount, holder = self.line.pop(0)
            self.note_grant(ticket, amount, holder)
            granted.append(ticket)
        self.peak = max(self.peak, self.in_use)
        return granted

    def note_grant(self, ticket: Ticket, amount: int, holder: str | None) -> None:
        self.grants[ticket] = Grant(amount, holder)
        self.came_again |= holder is not None and holder in self.settled

    @rule(amount=amounts, holder=holders)
    def request(self, amount: int, holder: str | None) -> None:
        ticket = self.budget.request(amount, holder)
        self.line.append((ticket, amount, holder))
        granted = self.grant_in_order()
        assert ticket.granted == (ticket in granted)

    @rule(amount=st.integers(0, LIMIT + 2), holder=holders)
    def try_request(self, amount: int, holder: str | None) -> None:
        expected = not self.line and self.in_use + amount <= LIMIT
        assert self.budget.try_request(amount, holder) == expected
        if expected:
            self.note_grant(Ticket(amount, holder), amount, holder)
            self.peak = max(self.peak, self.in_use)

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(list(self.grants)))
        grant = self.grants[ticket]
        part = data.draw(st.integers(0, grant.amount))
        grant.amount -= part
        if not grant.amount:
            del self.grants[ticket]
        assert self.budget.release(part, grant.holder) == self.grant_in_order()

    @precondition(lambda self: any(ticket.granted for ticket in self.grants))
    @rule(data=st.data())
    def withdraw_what_was_granted(self, data: st.DataObject) -> None:
        whole = [ticket for ticket, grant in self.grants.items() if ticket.granted]
        ticket = data.draw(st.sampled_from(whole))
        if self.grants[ticket].amount < ticket.amount:
            return  # part of it was released: it is no longer there to be withdrawn
        del self.grants[ticket]
        assert self.budget.withdraw(ticket) == self.grant_in_order()

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def withdraw_what_waits(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.line))
        self.line.remove(entry)
        assert self.budget.withdraw(entry[0]) == self.grant_in_order()
        assert not entry[0].granted

    @precondition(lambda self: any(grant.holder for grant in self.grants.values()))
    @rule(holder=holders)
    def settle(self, holder: str | None) -> None:
        self.budget.settle(holder)
        for grant in self.grants.values():
            grant.will_come_back |= grant.holder == holder
        self.settled.add(holder)

    @invariant()
    def it_counts_what_is_in_use_and_never_more_than_the_limit(self) -> None:
        assert self.budget.in_use == self.in_use <= LIMIT
        assert self.budget.peak == self.peak
        assert self.budget.waiting == len(self.line)
        assert not any(ticket.granted for ticket, _, _ in self.line)
        assert not self.line or self.in_use + self.line[0][1] > LIMIT, "the first in line would fit"

    @invariant()
    def it_is_stuck_only_if_all_in_use_belongs_to_those_who_wait(self) -> None:
        waiting = {holder for _, _, holder in self.line} - {None}
        kept = [
            grant for grant in self.grants.values() if grant.holder in waiting and not grant.will_come_back
        ]
        nobody_can_go_on = bool(self.line) and sum(grant.amount for grant in kept) == self.in_use
        ticket = self.budget.stuck()
        if ticket is not None:
            assert nobody_can_go_on
            assert ticket in [waiter for waiter, _, _ in self.line]
            assert any(grant.holder == ticket.holder and grant.amount for grant in kept)
        elif not self.came_again:  # what it then gets may be taken for what comes back
            assert not nobody_can_go_on


TestAnyOrderOfRequestsAndReleases = BudgetMachine.TestCase
TestAnyOrderOfRequestsAndReleases.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_big_request_is_not_overtaken_by_small_ones() -> None:
    budget = Budget(10)
    budget.request(6)
    big = budget.request(10)
    small = budget.request(1)

    assert not budget.try_request(1)
    assert not small.granted
    assert budget.release(6) == [big]
    assert budget.release(10) == [small]


def test_one_release_grants_all_that_fits_in_order() -> None:
    budget = Budget(10)
    budget.request(10)
    waiting = [budget.request(amount) for amount in (4, 3, 4, 1)]

    assert budget.release(10) == waiting[:2]
    assert budget.in_use == 7


def test_a_request_withdrawn_from_the_front_lets_those_behind_through() -> None:
    budget = Budget(10)
    budget.request(6)
    big = budget.request(10)
    small = budget.request(4)

    assert budget.withdraw(big) == [small]


def test_a_request_withdrawn_after_its_grant_gives_it_back() -> None:
    budget = Budget(10)
    ticket = budget.request(10, "a")
    waiting = budget.request(10, "b")

    assert budget.withdraw(ticket) == [waiting]
    assert budget.in_use == 10


@pytest.mark.parametrize("amount", [-1, 11])
def test_what_could_never_be_granted_is_refused_at_once(amount: int) -> None:
    budget = Budget(10)

    with pytest.raises(ValueError, match=f"between 0 and the limit of 10, got {amount}"):
        budget.request(amount)
    assert budget.waiting == 0


def test_the_peak_stays_when_everything_was_given_back() -> None:
    budget = Budget(10)
    budget.request(7)
    budget.release(7)

    assert (budget.in_use, budget.peak) == (0, 7)


def test_it_is_stuck_when_all_that_hold_wait_for_more_and_the_latest_gives_way() -> None:
    budget = Budget(10)
    budget.request(5, "a")
    budget.request(5, "b")
    first = budget.request(5, "a")
    assert budget.stuck() is None  # b may still give its part back

    second = budget.request(5, "b")
    assert budget.stuck() is second
    budget.withdraw(second)
    assert budget.stuck() is None
    assert budget.release(5, "b") == [first]


def test_one_that_holds_nothing_is_not_asked_to_give_way() -> None:
    budget = Budget(10)
    budget.request(10, "a")
    greedy = budget.request(5, "a")
    budget.request(5, "new")

    assert budget.stuck() is greedy


def test_it_is_not_stuck_while_something_in_use_will_come_back() -> None:
    budget = Budget(10)
    budget.request(5, "a")
    budget.request(5)
    budget.request(5, "a")
    assert budget.stuck() is None

    budget = Budget(10)
    budget.request(5, "a")
    budget.request(5, "b")
    budget.settle("b")
    budget.request(5, "a")
    assert budget.stuck() is None
