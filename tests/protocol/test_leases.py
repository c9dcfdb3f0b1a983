import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.errors import ProtocolError
from aiotensor.protocol.leases import Leases


class LeasesMachine(RuleBasedStateMachine):
    """Count pins by hand, beside `Leases`."""

    @initialize()
    def begin(self) -> None:
        self.leases: Leases[str] = Leases()
        self.pins: dict[int, int] = {}
        self.owned: set[int] = set()
        self.granted: dict[int, str] = {}  # what each living block has to give back one day
        self.used: set[int] = set()

    def expected(self, number: int) -> str | None:
        return None if self.pins[number] or number in self.owned else self.granted.pop(number)

    @rule()
    def own(self) -> None:
        grant = f"grant {len(self.used)}"
        number = self.leases.own(grant)
        assert number not in self.used, "a number was given out twice"
        self.used.add(number)
        self.granted[number] = grant
        self.owned.add(number)
        self.pins[number] = 0

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), times=st.integers(1, 3))
    def pin(self, data: st.DataObject, times: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.granted)))
        for _ in range(times):
            self.leases.pin(number)
        self.pins[number] += times

    @precondition(lambda self: any(self.pins[number] for number in self.granted))
    @rule(data=st.data())
    def unpin_one_that_is_pinned(self, data: st.DataObject) -> None:
        self.unpin(data.draw(st.sampled_from([number for number in self.granted if self.pins[number]])))

    @rule(number=st.integers(0, 12))
    def unpin(self, number: int) -> None:
        if number not in self.granted or not self.pins[number]:
            with pytest.raises(ProtocolError, match=rf"block {number} "):
                self.leases.unpin(number)
            return
        self.pins[number] -= 1
        assert self.leases.unpin(number) == self.expected(number)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def disown(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.owned)))
        self.owned.discard(number)
        assert self.leases.disown(number) == self.expected(number)

    @rule()
    def unpin_all(self) -> None:
        self.pins = dict.fromkeys(self.pins, 0)
        expected = [self.granted.pop(number) for number in sorted(self.granted) if number not in self.owned]
        assert self.leases.unpin_all() == expected

    @invariant()
    def it_knows_the_blocks_that_are_not_free_and_what_they_were_granted(self) -> None:
        assert len(self.leases) == len(self.granted)
        assert self.leases.grants() == self.granted
        assert all(self.leases.is_sent(number) == (self.pins[number] > 0) for number in self.granted)
        assert all(self.leases.grant_of(number) == grant for number, grant in self.granted.items())

    @invariant()
    def it_knows_which_the_other_side_has(self) -> None:
        expected = [grant for number, grant in self.granted.items() if self.pins[number]]
        assert self.leases.sent() == expected


TestAnyOrderOfPinsAndUnpins = LeasesMachine.TestCase
TestAnyOrderOfPinsAndUnpins.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_disowned_block_is_free_after_its_last_unpin() -> None:
    leases: Leases[str] = Leases()
    number = leases.own("a hundred bytes")
    leases.pin(number)
    assert leases.disown(number) is None

    assert leases.unpin(number) == "a hundred bytes"
    assert len(leases) == 0


def test_an_unpinned_block_is_free_when_it_is_disowned() -> None:
    leases: Leases[str] = Leases()

    assert leases.disown(leases.own("a hundred bytes")) == "a hundred bytes"
    assert leases.grants() == {}


def test_an_owned_block_stays_allocated_after_its_last_unpin() -> None:
    leases: Leases[str] = Leases()
    number = leases.own("a hundred bytes")
    leases.pin(number)
    leases.pin(number)

    assert leases.unpin(number) is None
    assert leases.unpin(number) is None
    assert leases.disown(number) == "a hundred bytes"


def test_a_pinned_block_stays_allocated_after_it_is_disowned() -> None:
    leases: Leases[str] = Leases()
    number = leases.own("a hundred bytes")
    leases.pin(number)

    assert leases.disown(number) is None
    assert leases.grant_of(number) == "a hundred bytes"
    assert leases.unpin(number) == "a hundred bytes"


def test_unpin_all_frees_only_blocks_without_an_owner() -> None:
    leases: Leases[str] = Leases()
    sent, written, unsent = leases.own("sent"), leases.own("being written"), leases.own("unsent")
    for number in (sent, written):
        leases.pin(number)
    leases.disown(sent)

    assert leases.unpin_all() == ["sent"]
    assert leases.unpin_all() == []
    assert leases.disown(written) == "being written"
    assert leases.disown(unsent) == "unsent"


def test_an_excess_unpin_raises_protocol_error() -> None:
    leases: Leases[str] = Leases()
    number = leases.own("a hundred bytes")

    with pytest.raises(ProtocolError, match="more often than it was announced"):
        leases.unpin(number)
    with pytest.raises(ProtocolError, match="more often than it was announced"):
        leases.unpin(number + 1)
    assert leases.disown(number) == "a hundred bytes"
