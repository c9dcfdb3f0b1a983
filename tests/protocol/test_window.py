"""A limited number of a client's messages may wait at its server, and the client always gets new credit."""

from collections import deque

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.errors import ProtocolError
from aiotensor.protocol.window import ReceiveWindow, SendWindow

MAX_BYTES = 100


class CreditMachine(RuleBasedStateMachine):
    """Both ends of a connection, and the messages in flight between them."""

    @initialize(messages=st.integers(1, 6), nbytes=st.integers(1, MAX_BYTES))
    def begin(self, messages: int, nbytes: int) -> None:
        self.limits = messages, nbytes
        self.window, self.received = SendWindow(*self.limits), ReceiveWindow(*self.limits)
        self.there: deque[int] = deque()  # messages, by their bytes
        self.waiting: list[int] = []
        self.back: deque[tuple[int, int]] = deque()  # what the server has taken, as it says

    @precondition(lambda self: self.window.credit > 0)
    @rule(nbytes=st.integers(0, MAX_BYTES))
    def send(self, nbytes: int) -> None:
        self.window.sent(nbytes)
        self.there.append(nbytes)

    @precondition(lambda self: self.there)
    @rule()
    def arrive(self) -> None:
        self.received.arrived(self.there[0])  # never refused, whatever the order of the rest
        self.waiting.append(self.there.popleft())

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.waiting) - 1))
        if self.received.take(self.waiting.pop(index)):
            self.report()

    @rule()
    def report(self) -> None:
        """Report the taken messages to the client, as an answer does."""
        self.back.append((self.received.taken, self.received.taken_bytes))
        self.received.reported(*self.back[-1])

    @precondition(lambda self: self.back)
    @rule()
    def learn(self) -> None:
        self.window.taken(*self.back.popleft())

    @rule(ahead=st.integers(1, 3))
    def learn_of_more_than_was_sent(self, ahead: int) -> None:
        sent = self.received.taken + len(self.waiting) + len(self.there)
        with pytest.raises(
            ProtocolError, match=f"it took {sent + ahead} messages with .* bytes, but {sent} "
        ):
            self.window.taken(sent + ahead, 0)

    @invariant()
    def no_more_waits_than_may(self) -> None:
        messages, nbytes = self.limits
        underway = [*self.waiting, *self.there]
        assert len(underway) <= messages
        assert sum(underway[:-1]) < nbytes or not underway

    @invariant()
    def the_window_opens_once_all_is_taken_and_reported(self) -> None:
        if not (self.there or self.waiting or self.back):
            assert self.window.credit > 0


TestAnyOrderOfSendingAndTaking = CreditMachine.TestCase


@pytest.mark.parametrize(("messages", "nbytes"), [(1, 1000), (1000, 1)])
def test_a_message_beyond_the_receive_window_is_a_violation(messages: int, nbytes: int) -> None:
    window = ReceiveWindow(messages, nbytes)
    window.arrived(5)
    with pytest.raises(
        ProtocolError, match="another message while 1 messages of 5 bytes were already waiting"
    ):
        window.arrived(5)
    window.take(5)
    window.arrived(5)


def test_decreasing_totals_of_taken_messages_are_a_violation() -> None:
    window = SendWindow(5, 100)
    window.sent(10)
    window.sent(10)
    window.taken(2, 20)
    for messages, nbytes in ((1, 20), (2, 10)):
        with pytest.raises(ProtocolError, match=f"it took {messages} messages with .* bytes, but 2 "):
            window.taken(messages, nbytes)


def test_the_last_message_of_a_window_may_exceed_its_byte_limit() -> None:
    window = SendWindow(5, 100)
    window.sent(99)
    opened = [window.credit > 0]
    window.sent(1 << 30)
    opened.append(window.credit > 0)
    for messages, nbytes in ((1, 99), (2, 99 + (1 << 30))):
        window.taken(messages, nbytes)
        opened.append(window.credit > 0)
    assert opened == [True, False, False, True]


def test_credit_is_reported_when_half_of_it_was_taken_and_no_sooner() -> None:
    window = ReceiveWindow(10, 1000)
    for number in range(1, 6):
        window.arrived(1)
        assert window.take(1) == (number == 5)
    window.reported(5, 5)
    window.reported(4, 4)  # an answer that was made before, and sent later
    window.arrived(1)
    assert not window.take(1)
    window.arrived(600)
    assert window.take(600)
