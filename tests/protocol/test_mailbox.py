"""The tensors that have arrived, compared with plain sets and lists, and the memory of senders."""

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiotensor.errors import (
    AioTensorError,
    AlreadyTakenError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
)
from aiotensor.protocol.arrived import REMEMBERED_DISCARDS
from aiotensor.protocol.mailbox import REMEMBERED_RANGES, REMEMBERED_SENDERS, Key, Mailbox
from tests.selection import COMPLETE

senders = st.sampled_from(["a", "b", "c"])
messages = st.integers(0, 6)
seldom = st.integers(0, 5).map(lambda number: number == 5)  # else every sender ends before much happens
tensors = st.integers(0, 2)
keys = st.builds(Key, senders, messages, tensors)


def message_of(key: Key) -> tuple[str, int]:
    return key.sender, key.message


def item_of(key: Key) -> str:
    return f"{key.sender}/{key.message}/{key.tensor}"


def size_of(key: Key) -> int:
    """Give each tensor of a sender a size that no others add up to."""
    return 1 << (3 * key.message + key.tensor)


class Known:
    """One message, as the model sees it."""

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.taken: set[int] = set()
        self.is_whole = False


class MailboxMachine(RuleBasedStateMachine):
    """Keep plain sets and lists beside a `Mailbox`.

    Senders send their frames in the order that `Connection` enforces.
    """

    @initialize()
    def begin(self) -> None:
        self.mailbox: Mailbox[str] = Mailbox()
        self.state = dict.fromkeys("abc", "unknown")
        self.first = dict.fromkeys("abc", 0)  # below it everything is lost
        self.next = dict.fromkeys("abc", 0)
        self.messages: dict[tuple[str, int], Known] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.whole: list[tuple[str, int]] = []  # in the order in which they are to be given
        self.held: dict[Key, bool] = {}  # and whether the message is still there
        self.claims: Counter[Key] = Counter()
        self.taken: set[Key] = set()
        self.discarded = 0
        self.join("a", 0)
        self.join("b", 0)

    # Expectations of the model

    def claimed(self, sender: str, number: int | None = None) -> set[Key]:
        return {key for key in +self.claims if key.sender == sender and number in (None, key.message)}

    def drop(self, sender: str, number: int) -> None:
        self.messages.pop((sender, number), None)
        self.ended[sender, number] = "discarded"
        self.whole = [message for message in self.whole if message != (sender, number)]
        self.held.update({key: False for key in self.held if message_of(key) == (sender, number)})

    @property
    def arrivals(self) -> list[Key]:
        """Return the tensors that can be taken, in their order of delivery."""
        return [
            Key(*message, tensor)
            for message in self.whole
            for tensor in sorted(self.messages[message].arrived - self.messages[message].taken)
            if Key(*message, tensor) not in self.held
        ]

    def of(self, sender: str) -> list[int]:
        return [number for owner, number in self.messages if owner == sender]

    def is_wanted(self, sender: str, number: int) -> bool:
        """Whether a tensor of a message that the sender may send is stored, and not dropped."""
        return (sender, number) not in self.ended

    def what_hold_finds(self, key: Key) -> type[AioTensorError] | str | None:
        known = self.messages.get(message_of(key))
        match self.state[key.sender], self.ended.get(message_of(key)):
            case _, "taken":
                return AlreadyTakenError
            case "lost", _:
                return PeerLostError
            case _ if key.message < self.first[key.sender]:
                return PeerLostError
            case _, "discarded":
                return DiscardedError
        if known is None or not known.is_whole:
            return DiscardedError if self.state[key.sender] == "left" else None
        if key.tensor in known.taken or key in self.held:
            return AlreadyTakenError
        return item_of(key) if key.tensor in known.arrived else DiscardedError

    # Operations of senders

    @rule(sender=senders, ahead=st.integers(-2, 2))
    def join(self, sender: str, ahead: int) -> None:
        first = max(0, self.next[sender] + ahead)
        if self.state[sender] in ("unknown", "lost") and first >= self.next[sender]:
            woken = self.mailbox.join(sender, 7, 3, first)
            self.state[sender] = "joined"
            self.first[sender] = self.next[sender] = first
            self.same_keys(woken, self.claimed(sender) if first else ())
            return
        with pytest.raises(ProtocolError, match="has already connected, or reuses numbers"):
            self.mailbox.join(sender, 7, 3, first)

    def put(self, key: Key) -> None:
        self.next[key.sender] = max(self.next[key.sender], key.message + 1)
        assert self.mailbox.wants(key.sender, key.message) == self.is_wanted(key.sender, key.message)
        if not self.is_wanted(key.sender, key.message):
            return
        self.mailbox.put(key, item_of(key), size_of(key))
        self.messages.setdefault(message_of(key), Known()).arrived.add(key.tensor)

    @rule(sender=senders, data=st.data())
    def put_next(self, sender: str, data: st.DataObject) -> None:
        """Put a tensor of the next message, or the next tensor of an unfinished message."""
        numbers = {self.next[sender]}
        numbers |= {number for number in self.of(sender) if not self.messages[sender, number].is_whole}
        if self.state[sender] == "joined":
            number = data.draw(st.sampled_from(sorted(numbers)))
            self.put(Key(sender, number, len(self.messages.get((sender, number), Known()).arrived)))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def put_what_has_ended(self, data: st.DataObject) -> None:
        """Continue a message that has ended here, which its sender does not know yet."""
        sender, number = data.draw(st.sampled_from(sorted(self.ended)))
        if self.state[sender] == "joined" and self.first[sender] <= number < self.next[sender]:
            self.put(Key(sender, number, 0))

    @rule(sender=senders, data=st.data())
    def end(self, sender: str, data: st.DataObject) -> None:
        """End a message that is not whole, or has ended here before."""
        numbers = [number for number in self.of(sender) if not self.messages[sender, number].is_whole]
        numbers += [number for owner, number in self.ended if owner == sender]
        if self.state[sender] != "joined" or not numbers:
            return
        number = data.draw(st.sampled_from(sorted(numbers)))
        woken = self.mailbox.end(sender, number)
        if (sender, number) in self.ended:
            assert woken == []
        else:
            self.became_whole(sender, number, woken)

    @rule(sender=senders, count=st.integers(1, 3), has_end=st.booleans())
    def put_a_whole_message(self, sender: str, count: int, has_end: bool) -> None:
        number = self.next[sender]
        if self.state[sender] != "joined" or not self.is_wanted(sender, number):
            return
        for tensor in range(count if has_end else count - 1):
            self.put(Key(sender, number, tensor))
        if has_end:
            self.became_whole(sender, number, self.mailbox.end(sender, number))
            return
        assert self.mailbox.wants(sender, number)
        self.next[sender] = number + 1
        key = Key(sender, number, count - 1)
        self.messages.setdefault((sender, number), Known()).arrived.add(key.tensor)
        self.became_whole(sender, number, self.mailbox.put(key, item_of(key), size_of(key), last=True))

    def became_whole(self, sender: str, number: int, woken: Sequence[Key]) -> None:
        known = self.messages[sender, number]
        known.is_whole = True
        new = [Key(sender, number, tensor) for tensor in sorted(known.arrived)]
        self.whole.append((sender, number))
        self.same_keys(woken, {*new, *self.claimed(sender, number)})

    @rule(sender=senders, is_meant=seldom)
    def leave(self, sender: str, is_meant: bool) -> None:
        if not is_meant or self.state[sender] != "joined":
            return
        for number in self.of(sender):
            if not self.messages[sender, number].is_whole:
                self.drop(sender, number)
                self.discarded += 1
        self.state[sender] = "left"
        self.same_keys(self.mailbox.leave(sender), self.claimed(sender))

    @rule(sender=senders, is_meant=seldom)
    def lose(self, sender: str, is_meant: bool) -> None:
        if not is_meant and self.state[sender] != "left":
            return
        woken = self.mailbox.lose(sender, PeerLostError("killed"))
        if self.state[sender] == "left":
            assert woken == []
            return
        for number in self.of(sender):
            self.drop(sender, number)
        self.state[sender] = "lost"
        self.same_keys(woken, self.claimed(sender))

    @rule(sender=senders, number=messages)
    def discard(self, sender: str, number: int) -> None:
        woken = self.mailbox.discard(sender, number)
        is_there = (sender, number) in self.messages
        may_come = self.state[sender] in ("unknown", "joined")
        may_come |= self.state[sender] == "lost" and number >= self.next[sender]
        if is_there or (may_come and (sender, number) not in self.ended):
            self.drop(sender, number)
            self.discarded += 1
            self.same_keys(woken, self.claimed(sender, number))
        else:
            assert woken == []

    @precondition(lambda self: self.messages)
    @rule(data=st.data())
    def discard_what_is_there(self, data: st.DataObject) -> None:
        self.discard(*data.draw(st.sampled_from(sorted(self.messages))))

    @rule(sender=senders, ahead=st.integers(0, 2))
    def discard_what_is_to_come(self, sender: str, ahead: int) -> None:
        self.discard(sender, self.next[sender] + ahead)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_all=seldom)
    def discard_what_is_held(self, data: st.DataObject, is_all: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        if is_all:
            self.lose(key.sender, is_meant=True)
        else:
            self.discard(key.sender, key.message)

    # Operations of takers

    @rule(key=keys)
    def claim(self, key: Key) -> None:
        self.mailbox.claims.add(key)
        self.claims[key] += 1

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), tensor=tensors)
    def claim_what_may_be_there(self, data: st.DataObject, tensor: int) -> None:
        self.claim(Key(*data.draw(st.sampled_from(sorted(self.messages))), tensor))

    @precondition(lambda self: +self.claims)
    @rule(data=st.data())
    def unclaim(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(+self.claims)))
        self.mailbox.claims.remove(key)
        self.claims[key] -= 1

    @rule(key=keys)
    def hold(self, key: Key) -> None:
        finds = self.what_hold_finds(key)
        if isinstance(finds, type):
            with pytest.raises(finds):
                self.mailbox.hold(key)
            return
        assert self.mailbox.hold(key) == finds
        if finds is not None:
            self.held[key] = True

    @precondition(lambda self: self.arrivals)
    @rule(data=st.data())
    def hold_what_is_there(self, data: st.DataObject) -> None:
        self.hold(data.draw(st.sampled_from(self.arrivals)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hold_what_is_held(self, data: st.DataObject) -> None:
        self.hold(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), tensor=tensors)
    def hold_what_has_ended(self, data: st.DataObject, tensor: int) -> None:
        self.hold(Key(*data.draw(st.sampled_from(sorted(self.ended))), tensor))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        is_last = False
        if self.held.pop(key):
            known = self.messages[message_of(key)]
            known.taken.add(key.tensor)
            if is_last := known.taken == known.arrived:
                del self.messages[message_of(key)]
                self.whole.remove(message_of(key))
                self.ended[message_of(key)] = "taken"
        assert self.mailbox.finish(key) == is_last
        assert key not in self.taken, "a tensor was taken twice"
        self.taken.add(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        is_there = self.held.pop(key)
        assert self.mailbox.put_back(key) == ([key] if is_there else [])

    @rule()
    def hold_next(self) -> None:
        unclaimed = [key for key in self.arrivals if not self.claims[key]]
        if not unclaimed:
            assert self.mailbox.hold_next() is None
            return
        [key, *_], message = unclaimed, message_of(unclaimed[0])
        assert self.mailbox.hold_next() == (key, item_of(key), len(self.messages[message].arrived))
        self.held[key] = True
        if len(self.messages[message].arrived) > 1:
            self.whole.remove(message)
            self.whole.insert(0, message)  # its other tensors come next

    # Invariants

    def same_keys(self, woken: Sequence[Key], expected: Iterable[Key]) -> None:
        assert sorted(woken) == sorted(expected)

    @invariant()
    def it_counts_the_messages_that_closed_senders_left(self) -> None:
        left = [sender for sender, _ in self.messages if self.state[sender] == "left"]
        assert self.mailbox.messages_left == len(left)

    @invariant()
    def it_counts_what_was_discarded(self) -> None:
        assert self.mailbox.messages_discarded == self.discarded

    @invariant()
    def it_counts_what_arrived_and_nobody_took(self) -> None:
        there = [
            Key(*message, tensor)
            for message, known in self.messages.items()
            for tensor in known.arrived - known.taken
        ]
        counts = self.mailbox.unclaimed_tensors, self.mailbox.unclaimed_bytes
        assert counts == (len(there), sum(map(size_of, there)))
        for sender in [name for name in "abc" if self.state[name] != "unknown"]:
            sizes = [size_of(key) for key in there if key.sender == sender]
            assert self.mailbox.unclaimed_of(sender) == (len(sizes), sum(sizes))


TestAnyOrderOfEvents = pytest.mark.promise(12, 13)(MailboxMachine.TestCase)
TestAnyOrderOfEvents.settings = settings(max_examples=200 if COMPLETE else 60, stateful_step_count=50)


# Errors, and forgotten senders


def joined(limit: int = 8) -> Mailbox[str]:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.join("s", 42, limit)
    return mailbox


def put(mailbox: Mailbox[str], number: int, tensor: int, item: str = "x", sender: str = "s") -> None:
    """Store a tensor as the receiver does: after checking that the message is wanted."""
    assert mailbox.wants(sender, number)
    mailbox.put(Key(sender, number, tensor), item, len(item))


def send(mailbox: Mailbox[str], number: int, count: int = 1) -> None:
    for tensor in range(count):
        put(mailbox, number, tensor, f"tensor {tensor}")
    mailbox.end("s", number)


def with_message(count: int = 1) -> Mailbox[str]:
    mailbox = joined()
    send(mailbox, 0, count)
    return mailbox


def test_errors_state_the_process_and_the_reason() -> None:
    mailbox = with_message()
    reason = ProtocolError("it broke the protocol")
    with pytest.raises(DiscardedError, match="was never sent: the message ended after 1 tensors"):
        mailbox.hold(Key("s", 0, -1))
    mailbox.lose("s", reason)
    mailbox.join("s", 43, 1, 1)
    put(mailbox, 1, 0)
    again = PeerLostError("killed again")
    mailbox.lose("s", again)
    for number in range(2):
        with pytest.raises(PeerLostError, match=r"pid 43\).*killed again") as caught:
            mailbox.hold(Key("s", number, 0))
        assert (caught.value.pid, caught.value.__cause__) == (43, again)
    mailbox.lose("s", RefusedError("max_senders=1"), 44)
    with pytest.raises(PeerLostError):  # it was sent on an earlier connection
        mailbox.hold(Key("s", 1, 0))
    with pytest.raises(RefusedError, match=r"s \(pid 44\) was refused: max_senders=1"):
        mailbox.hold(Key("s", 2, 0))

    mailbox.join("other", 42, 1)
    put(mailbox, 0, 0, sender="other")
    mailbox.leave("other")
    assert mailbox.lose("other", again) == [], "it has closed"
    with pytest.raises(DiscardedError, match="was discarded"):
        mailbox.hold(Key("other", 0, 0))
    with pytest.raises(DiscardedError, match=r"never sent: its sender \(pid 42\) closed"):
        mailbox.hold(Key("other", 1, 0))


@pytest.mark.parametrize("end", ["closed", "lost"])
def test_old_senders_are_forgotten_unless_their_tensors_can_still_be_taken_or_are_held(end: str) -> None:
    mailbox = with_message(count=3)
    for tensor in (1, 2):
        mailbox.hold(Key("s", 0, tensor))
    mailbox.join("connected", 1, 1)
    mailbox.lose("connected", PeerLostError("killed"))
    mailbox.join("connected", 1, 8, 1)
    for sender in ("s", *(f"other {number}" for number in range(REMEMBERED_SENDERS))):
        if sender != "s":
            mailbox.join(sender, 1, 1)
        if end == "closed":
            mailbox.leave(sender)
        else:
            mailbox.lose(sender, PeerLostError("killed"))

    with pytest.raises(DiscardedError if end == "closed" else PeerLostError):
        mailbox.hold(Key("other 9", 0, 0))
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("connected", 0, 0))
    if end == "closed":
        assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"
        assert mailbox.hold(Key("other 0", 0, 0)) is None, "a forgotten sender is like an unknown one"
    else:
        assert not mailbox.has_joined("s")
        assert not mailbox.finish(Key("s", 0, 1))
        assert mailbox.put_back(Key("s", 0, 2)) == []


def test_a_discard_before_its_sender_connects_is_remembered_while_others_are_forgotten() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.discard("never connects", 0)
    mailbox.discard("s", 0)
    mailbox.join("s", 42, 8)
    for number in range(REMEMBERED_SENDERS):
        mailbox.discard(f"other {number}", 0)

    assert not mailbox.wants("s", 0)
    assert mailbox.hold(Key("never connects", 0, 0)) is None, "a forgotten sender is like an unknown one"


def test_a_message_whose_discard_was_forgotten_is_never_awaited() -> None:
    mailbox = joined()
    for number in range(REMEMBERED_DISCARDS + 1):
        mailbox.discard("s", number)

    with pytest.raises(AlreadyTakenError):
        mailbox.hold(Key("s", 0, 0))
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 1, 0))


@pytest.mark.parametrize("is_connected", [True, False])
def test_the_number_of_remembered_early_discards_is_bounded(is_connected: bool) -> None:
    mailbox: Mailbox[str] = joined() if is_connected else Mailbox()
    discarded = range(500, 500 + 4 * REMEMBERED_RANGES, 2)
    for number in discarded:
        mailbox.discard("s", number)
    if not is_connected:
        mailbox.join("s", 42, 8)
    send(mailbox, 0)

    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"
    assert not mailbox.wants("s", discarded[0])
    assert mailbox.wants("s", discarded[-1]), "it is forgotten"


def test_the_number_of_remembered_messages_of_earlier_connections_is_bounded() -> None:
    mailbox = with_message()
    mailbox.hold(Key("s", 0, 0))
    mailbox.finish(Key("s", 0, 0))
    with pytest.raises(AlreadyTakenError):
        mailbox.hold(Key("s", 0, 0))
    for first in range(10, 10 * REMEMBERED_RANGES + 20, 10):  # each connection leaves a gap
        mailbox.lose("s", PeerLostError("killed"))
        mailbox.join("s", 1, 4, first)
        put(mailbox, first, 0)

    with pytest.raises(PeerLostError):
        mailbox.hold(Key("s", 0, 0))


def test_a_cleared_mailbox_has_no_tensor_and_pending_calls_can_end() -> None:
    mailbox = with_message(count=3)
    waiting, held, other = Key("s", 1, 0), Key("s", 0, 0), Key("s", 0, 1)
    mailbox.claims.add(waiting)
    mailbox.hold(held)
    mailbox.hold(other)
    mailbox.clear()

    assert (mailbox.unclaimed_tensors, mailbox.unclaimed_bytes) == (0, 0)
    assert mailbox.hold_next() is None
    assert not mailbox.finish(held)
    assert mailbox.put_back(other) == []
    assert mailbox.hold_next() is None
    mailbox.claims.remove(waiting)
