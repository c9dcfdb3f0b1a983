import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.errors import ProtocolError
from aiotensor.protocol.leases import Freed, Leases


class LeasesMachine(RuleBasedStateMachine):
    """Count pins by hand, beside `Leases`."""

    @initialize()
    def begin(self) -> None:
        self.leases = Leases()
        self.pins: dict[int, int] = {}
        self.owned: set[int] = set()
        self.freed: dict[int, Freed] = {}  # what each living block has to give back one day
        self.used: set[int] = set()

    def new(self, number: int, freed: Freed) -> None:
        assert number not in self.used, "a number was given out twice"
        self.used.add(number)
        self.freed[number] = freed

    def expected(self, number: int) -> Freed | None:
        return None if self.pins[number] or number in self.owned else self.freed.pop(number)

    @rule(nbytes=st.integers(1, 100))
    def own(self, nbytes: int) -> None:
        number = self.leases.own(nbytes)
        self.new(number, Freed(nbytes, None))
        self.owned.add(number)
        self.pins[number] = 0

    @rule(nbytes=st.integers(1, 100), holder=st.sampled_from(["a", "b"]))
    def open(self, nbytes: int, holder: str) -> None:
        number = self.leases.open(nbytes, holder)
        self.new(number, Freed(nbytes, holder))
        self.pins[number] = 1

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.freed)))
        self.leases.pin(number)
        self.pins[number] += 1

    @rule(number=st.integers(0, 12))
    def unpin(self, number: int) -> None:
        if number not in self.freed or not self.pins[number]:
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
        expected = [self.freed[number] for number in sorted(self.freed) if number not in self.owned]
        self.pins = dict.fromkeys(self.pins, 0)
        self.freed = {number: freed for number, freed in self.freed.items() if number in self.owned}
        assert self.leases.unpin_all() == expected

    @invariant()
    def it_counts_the_blocks_that_are_not_free(self) -> None:
        assert len(self.leases) == len(self.freed)


TestAnyOrderOfPinsAndUnpins = LeasesMachine.TestCase
TestAnyOrderOfPinsAndUnpins.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_block_of_one_tensor_is_free_when_its_tensor_is_given_back() -> None:
    leases = Leases()
    number = leases.open(100, "message")

    assert leases.unpin(number) == Freed(100, "message")
    assert len(leases) == 0


def test_an_owned_block_outlives_the_tensors_sent_over_it() -> None:
    leases = Leases()
    number = leases.own(100)
    leases.pin(number)
    leases.pin(number)

    assert leases.unpin(number) is None
    assert leases.unpin(number) is None
    assert leases.disown(number) == Freed(100, None)


def test_a_block_that_is_still_being_read_outlives_its_owner() -> None:
    leases = Leases()
    number = leases.own(100)
    leases.pin(number)

    assert leases.disown(number) is None
    assert leases.unpin(number) == Freed(100, None)


def test_a_block_given_back_once_too_often_is_an_offence_of_the_peer() -> None:
    leases = Leases()
    number = leases.own(100)

    with pytest.raises(ProtocolError, match="once too often"):
        leases.unpin(number)
    with pytest.raises(ProtocolError, match="once too often"):
        leases.unpin(number + 1)
