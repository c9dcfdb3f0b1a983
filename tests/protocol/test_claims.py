from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiotensor.protocol.arrived import Claims, Key

SENDERS, MESSAGES, TENSORS = "ab", range(2), range(3)
keys = st.builds(Key, st.sampled_from(SENDERS), st.sampled_from(MESSAGES), st.sampled_from(TENSORS))


class ClaimsMachine(RuleBasedStateMachine):
    """Count claims in one flat table, beside `Claims`."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = Claims()
        self.counts: Counter[Key] = Counter()

    @rule(key=keys, times=st.integers(1, 2))
    def add(self, key: Key, times: int) -> None:
        for _ in range(times):
            self.claims.add(key)
        self.counts[key] += times

    @precondition(lambda self: +self.counts)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(+self.counts)))
        self.claims.remove(key)
        self.counts[key] -= 1

    @invariant()
    def it_knows_what_is_claimed_and_nothing_else(self) -> None:
        claimed = sorted(+self.counts)
        assert bool(self.claims.by_message) == bool(claimed)
        for sender in SENDERS:
            assert sorted(self.claims.of_sender(sender)) == [key for key in claimed if key.sender == sender]
            for number in MESSAGES:
                of_message = [key for key in claimed if (key.sender, key.message) == (sender, number)]
                assert sorted(self.claims.of_message(sender, number)) == of_message
                for tensor in TENSORS:
                    key = Key(sender, number, tensor)
                    assert (key in self.claims) == (key in of_message)


TestAnyOrderOfClaims = ClaimsMachine.TestCase
TestAnyOrderOfClaims.settings = settings(max_examples=50, stateful_step_count=30)
