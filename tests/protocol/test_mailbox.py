import tracemalloc

import pytest

from aiotensor.errors import AlreadyTakenError, DiscardedError, PeerLostError, ProtocolError
from aiotensor.protocol import mailbox as mailbox_module
from aiotensor.protocol import remembered
from aiotensor.protocol.mailbox import Key, Mailbox


def joined(limit: int = 8) -> Mailbox[str]:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.join("s", 42, limit)
    return mailbox


def put(mailbox: Mailbox[str], number: int, tensor: int, item: str = "x", sender: str = "s") -> None:
    """File a tensor as the receiver does: after asking whether it is expected."""
    assert mailbox.expects(sender, number)
    mailbox.put(Key(sender, number, tensor), item, len(item))


def send(mailbox: Mailbox[str], number: int, count: int = 1) -> None:
    for tensor in range(count):
        put(mailbox, number, tensor, f"tensor {tensor}")
    mailbox.end("s", number, count)


def with_message(count: int = 1) -> Mailbox[str]:
    mailbox = joined()
    send(mailbox, 0, count)
    return mailbox


def lost(count: int = 1) -> Mailbox[str]:
    """A mailbox whose sender was lost after so many messages."""
    mailbox = joined()
    for number in range(count):
        send(mailbox, number)
    mailbox.lose("s", PeerLostError("killed"))
    return mailbox


def test_the_tensors_of_a_message_can_be_taken_when_it_is_whole_and_not_before() -> None:
    mailbox = joined()
    put(mailbox, 0, 0, "frames")
    put(mailbox, 0, 1, "times")
    assert mailbox.hold(Key("s", 0, 0)) is None
    assert mailbox.next_unclaimed() is None

    assert mailbox.end("s", 0, 2) == [Key("s", 0, 0), Key("s", 0, 1)]
    assert mailbox.hold(Key("s", 0, 1)) == "times"
    assert mailbox.hold(Key("s", 0, 0)) == "frames"
    assert not mailbox.finish(Key("s", 0, 1))
    assert mailbox.finish(Key("s", 0, 0))


def test_a_tensor_cannot_be_taken_again_while_others_of_its_message_are_left() -> None:
    mailbox = with_message(count=2)
    mailbox.hold(Key("s", 0, 0))
    with pytest.raises(AlreadyTakenError, match="received before"):
        mailbox.hold(Key("s", 0, 0))
    mailbox.finish(Key("s", 0, 0))
    with pytest.raises(AlreadyTakenError, match="received before"):
        mailbox.hold(Key("s", 0, 0))

    assert mailbox.hold(Key("s", 0, 1)) == "tensor 1"


def test_what_a_closed_sender_left_behind_can_be_taken_or_discarded() -> None:
    mailbox = with_message()
    put(mailbox, 1, 0, "of another")
    mailbox.end("s", 1, 1)
    mailbox.leave("s")

    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"
    assert mailbox.discard("s", 1) == (True, [])
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 1, 0))


def test_who_waits_for_what_a_closed_sender_did_not_complete_is_told() -> None:
    mailbox = with_message()
    put(mailbox, 1, 0, "half of it")
    mailbox.claim(Key("s", 1, 0))
    mailbox.claim(Key("s", 2, 0))

    assert sorted(mailbox.leave("s")) == [Key("s", 1, 0), Key("s", 2, 0)]
    with pytest.raises(DiscardedError, match="was discarded"):
        mailbox.hold(Key("s", 1, 0))
    with pytest.raises(DiscardedError, match=r"never sent: its sender \(pid 42\) closed"):
        mailbox.hold(Key("s", 2, 0))
    assert (mailbox.unclaimed.tensors, mailbox.unclaimed.nbytes) == (1, len("tensor 0"))


def test_a_sender_that_closed_cannot_be_lost_any_more() -> None:
    mailbox = with_message()
    mailbox.claim(Key("s", 0, 0))
    mailbox.leave("s")

    assert mailbox.lose("s", PeerLostError("its process ended")) == []
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"


def test_a_sender_that_was_not_admitted_is_lost_until_it_comes() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.claim(Key("s", 1, 0))

    assert mailbox.lose("s", PeerLostError("refused")) == [Key("s", 1, 0)]
    with pytest.raises(PeerLostError, match="refused"):
        mailbox.hold(Key("s", 1, 0))
    mailbox.join("s", 42, 1)
    assert mailbox.hold(Key("s", 1, 0)) is None


def test_lost_senders_are_forgotten_as_those_that_closed_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "_REMEMBERED_SENDERS", 1)
    mailbox = lost(1)
    mailbox.join("another", 43, 1)
    mailbox.lose("another", PeerLostError("killed"))

    assert mailbox.hold(Key("s", 0, 0)) is None, "it is like one that has yet to come"
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("another", 0, 0))


def test_there_is_nothing_to_discard_of_a_lost_sender() -> None:
    mailbox = with_message()
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.claim(Key("s", 0, 0))

    assert mailbox.discard("s", 0) == (False, [])


def test_who_waits_for_a_tensor_beyond_the_end_is_told_that_it_will_never_come() -> None:
    mailbox = joined()
    mailbox.claim(Key("s", 0, 5))
    put(mailbox, 0, 0, "only one")

    assert Key("s", 0, 5) in mailbox.end("s", 0, 1)
    with pytest.raises(DiscardedError, match="ended after 1 tensors"):
        mailbox.hold(Key("s", 0, 5))


def test_a_number_that_no_tensor_can_have_is_one_that_was_never_sent() -> None:
    mailbox = with_message()

    with pytest.raises(DiscardedError, match="was never sent"):
        mailbox.hold(Key("s", 0, -1))


def test_each_offence_of_a_sender_is_named() -> None:
    mailbox = with_message()
    with pytest.raises(ProtocolError, match="before it introduced itself"):
        mailbox.expects("stranger", 0)
    with pytest.raises(ProtocolError, match="message 0, which was whole"):
        put(mailbox, 0, 1, "x")
    mailbox.hold(Key("s", 0, 0))
    mailbox.finish(Key("s", 0, 0))
    assert not mailbox.expects("s", 0)  # nor is it an offence: it may have been discarded long ago
    assert mailbox.end("s", 0, 1) == []
    with pytest.raises(ProtocolError, match="ended message 1 with a wrong count"):
        mailbox.end("s", 1, 0)
    put(mailbox, 1, 0, "x")
    with pytest.raises(ProtocolError, match="tensor 0 of message 1 out of turn"):
        put(mailbox, 1, 0, "x")
    with pytest.raises(ProtocolError, match="ended message 1 with a wrong count"):
        mailbox.end("s", 1, 2)
    with pytest.raises(ProtocolError, match="tensor 2 of message 1 out of turn"):
        put(mailbox, 1, 2, "x")
    mailbox.discard("s", 1)
    assert not mailbox.expects("s", 1)
    with pytest.raises(ProtocolError, match="message 3 before message 2"):
        mailbox.expects("s", 3)
    with pytest.raises(ProtocolError, match="discarded message 2, which it never sent"):
        mailbox.withdraw("s", 2)


def test_more_messages_than_a_sender_announced_are_an_offence() -> None:
    mailbox = joined(limit=2)
    put(mailbox, 0, 0, "x")
    put(mailbox, 1, 0, "x")
    with pytest.raises(ProtocolError, match="more than the 2 messages in flight"):
        put(mailbox, 2, 0, "x")

    put(mailbox, 1, 1, "another of a message that is counted")
    mailbox.discard("s", 0)
    put(mailbox, 3, 0, "there is room again")


def test_a_count_that_cannot_be_true_is_refused_without_counting_to_it() -> None:
    mailbox = joined()
    put(mailbox, 0, 0, "x")
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="wrong count"):
            mailbox.end("s", 0, 1_000_000)  # the wire allows 2 ** 63 - 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 1_000_000


def test_a_lost_sender_is_named_with_its_pid_and_with_the_reason() -> None:
    mailbox = with_message()
    reason = ProtocolError("it broke the protocol")
    mailbox.lose("s", reason)

    with pytest.raises(PeerLostError, match=r"pid 42.*it broke the protocol") as caught:
        mailbox.hold(Key("s", 0, 0))
    assert caught.value.pid == 42
    assert caught.value.__cause__ is reason


def test_a_tensor_that_is_being_taken_when_its_sender_dies_is_still_taken() -> None:
    mailbox = with_message()
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"
    mailbox.lose("s", PeerLostError("killed"))

    assert not mailbox.finish(Key("s", 0, 0))


def test_a_cleared_mailbox_holds_no_tensor_and_lets_takers_end_what_they_began() -> None:
    mailbox = with_message(count=3)
    waiting, held, other = Key("s", 1, 0), Key("s", 0, 0), Key("s", 0, 1)
    mailbox.claim(waiting)
    mailbox.hold(held)
    mailbox.hold(other)
    mailbox.clear()

    assert (mailbox.unclaimed.tensors, mailbox.unclaimed.nbytes) == (0, 0)
    assert mailbox.next_unclaimed() is None
    assert not mailbox.finish(held)
    assert mailbox.put_back(other) == []
    assert mailbox.next_unclaimed() is None
    mailbox.unclaim(waiting)


def test_old_discards_are_forgotten_but_never_taken_for_something_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remembered, "_REMEMBERED_DISCARDS", 2)
    mailbox = joined()
    for number in range(3):
        mailbox.discard("s", number)

    with pytest.raises(AlreadyTakenError):
        mailbox.hold(Key("s", 0, 0))
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 1, 0))


def test_old_senders_are_forgotten_but_not_those_that_left_something_to_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox_module, "_REMEMBERED_SENDERS", 2)
    mailbox = with_message()
    mailbox.leave("s")
    for name in ("a", "b"):
        mailbox.join(name, 1, 1)
        mailbox.leave(name)

    assert mailbox.hold(Key("a", 0, 0)) is None, "it is like one that has yet to come"
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("b", 0, 0))
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"


def test_a_sender_that_left_something_to_take_is_kept_even_if_there_is_room_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox_module, "_REMEMBERED_SENDERS", 0)
    mailbox = with_message()
    mailbox.leave("s")

    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"


@pytest.mark.parametrize("how", ["finish", "put_back"])
def test_a_tensor_that_is_being_taken_outlives_the_memory_of_its_sender(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "_REMEMBERED_SENDERS", 1)
    mailbox = with_message()
    mailbox.hold(Key("s", 0, 0))
    mailbox.join("another", 43, 1)
    for name in ("s", "another"):
        mailbox.lose(name, PeerLostError("killed"))

    assert not getattr(mailbox, how)(Key("s", 0, 0))


# Messages come in the order of their numbers


def test_a_message_that_was_discarded_before_it_came_counts_when_it_comes() -> None:
    mailbox = joined()
    assert mailbox.discard("s", 0) == (False, [])
    with pytest.raises(ProtocolError, match="message 1 before message 0"):
        mailbox.expects("s", 1)

    assert not mailbox.expects("s", 0)
    assert not mailbox.expects("s", 0)  # nor are its other tensors
    send(mailbox, 1)


@pytest.mark.parametrize("is_here", [True, False])
def test_discards_of_messages_that_never_come_take_no_memory_without_end(
    is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "_REMEMBERED_RANGES", 5)
    mailbox: Mailbox[str] = joined() if is_here else Mailbox()
    for number in range(0, 1000, 2):
        mailbox.discard("s", 500 + number)
    assert len(mailbox._senders["s"].ended.ranges()) <= 5 + 8
    if not is_here:
        mailbox.join("s", 42, 8)
    send(mailbox, 0)
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"


def test_a_message_cannot_be_begun_again_after_others() -> None:
    mailbox = joined()
    assert mailbox.expects("s", 0)  # and then no tensor of it could be opened
    put(mailbox, 1, 0)

    with pytest.raises(ProtocolError, match="went back to message 0"):
        mailbox.expects("s", 0)


def test_a_message_may_grow_while_later_ones_arrive_and_are_taken() -> None:
    mailbox = joined()
    put(mailbox, 0, 0)
    send(mailbox, 1)
    mailbox.hold(Key("s", 1, 0))
    assert mailbox.finish(Key("s", 1, 0))
    put(mailbox, 0, 1)

    assert mailbox.end("s", 0, 2) == [Key("s", 0, 0), Key("s", 0, 1)]


def test_a_message_has_no_more_tensors_than_a_message_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "MAX_TENSORS", 2)
    mailbox = joined()
    put(mailbox, 0, 0)
    put(mailbox, 0, 1)

    with pytest.raises(ProtocolError, match="tensor 2 of message 0 out of turn"):
        put(mailbox, 0, 2)


def test_a_message_that_its_sender_takes_back_is_discarded_and_who_waits_is_told() -> None:
    mailbox = joined()
    put(mailbox, 0, 0)
    mailbox.claim(Key("s", 0, 0))

    assert mailbox.withdraw("s", 0) == [Key("s", 0, 0)]
    assert mailbox.withdraw("s", 0) == []
    assert mailbox.messages_discarded == 1
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 0, 0))


# A sender that was lost and comes back


def test_a_lost_sender_comes_back_and_goes_on_where_it_was() -> None:
    mailbox = lost(2)
    mailbox.join("s", 43, 1, 2)
    send(mailbox, 2)

    assert mailbox.unclaimed_of("s").tensors == 1
    assert mailbox.next_unclaimed() == Key("s", 2, 0)
    assert mailbox.hold(Key("s", 2, 0)) == "tensor 0"
    assert mailbox.finish(Key("s", 2, 0))


def test_what_was_sent_before_a_loss_stays_lost_when_the_sender_is_back() -> None:
    mailbox = lost(1)  # of which one had arrived, and two more were on their way
    mailbox.join("s", 43, 8, 3)

    for number in range(3):
        with pytest.raises(PeerLostError, match="killed"):
            mailbox.hold(Key("s", number, 0))
    assert mailbox.hold(Key("s", 3, 0)) is None


def test_what_was_taken_before_a_loss_stays_taken() -> None:
    mailbox = with_message()
    mailbox.hold(Key("s", 0, 0))
    mailbox.finish(Key("s", 0, 0))
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.join("s", 43, 8, 1)

    with pytest.raises(AlreadyTakenError):
        mailbox.hold(Key("s", 0, 0))


def test_who_waits_for_what_was_sent_before_a_loss_is_told_when_the_sender_is_back() -> None:
    mailbox: Mailbox[str] = Mailbox()
    early, late, of_another = Key("s", 1, 0), Key("s", 2, 0), Key("another", 0, 0)
    for key in (early, late, of_another):
        mailbox.claim(key)

    assert sorted(mailbox.join("s", 42, 8, 2)) == [early, late]  # each looks for itself
    with pytest.raises(PeerLostError, match="another receiver"):
        mailbox.hold(early)
    assert mailbox.hold(late) is None


def test_nobody_is_woken_for_a_sender_that_comes_for_the_first_time() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.claim(Key("s", 0, 0))

    assert mailbox.join("s", 42, 8) == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_sender_that_comes_back_and_counts_anew_is_refused(first: int) -> None:
    mailbox = lost(2)

    with pytest.raises(ProtocolError, match="introduced itself twice"):
        mailbox.join("s", 43, 8, first)
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("s", 0, 0))
    mailbox.join("s", 43, 8, 2)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("has_left", [False, True], ids=["is here", "left"])
def test_a_sender_that_is_here_or_left_cannot_come_again(has_left: bool, first: int) -> None:
    mailbox = with_message()
    if has_left:
        mailbox.leave("s")

    with pytest.raises(ProtocolError, match="introduced itself twice"):
        mailbox.join("s", 43, 8, first)
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_sender_that_is_back_sends_from_its_first_message_on(number: int) -> None:
    mailbox = lost(1)
    mailbox.join("s", 43, 8, 3)

    if number < 1:  # it had ended: as with any that has
        assert not mailbox.expects("s", number)
    else:
        with pytest.raises(ProtocolError, match=r"went back to message 1|message 4 before message 3"):
            mailbox.expects("s", number)
    put(mailbox, 3, 0)


def test_a_sender_that_is_back_has_the_limit_and_the_pid_that_it_told_last() -> None:
    mailbox = lost(1)
    mailbox.join("s", 43, 1, 1)
    put(mailbox, 1, 0)

    with pytest.raises(ProtocolError, match="more than the 1 messages"):
        mailbox.expects("s", 2)
    mailbox.lose("s", PeerLostError("killed again"))
    with pytest.raises(PeerLostError, match=r"pid 43\).*killed again") as caught:
        mailbox.hold(Key("s", 0, 0))
    assert caught.value.pid == 43


def test_what_was_given_up_before_a_loss_is_not_expected_after_it() -> None:
    mailbox = joined()
    mailbox.discard("s", 1)
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.join("s", 43, 8, 1)

    assert not mailbox.expects("s", 1)
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 1, 0))


def test_what_is_given_up_while_its_sender_is_away_is_not_expected_when_it_is_back() -> None:
    mailbox = lost(1)
    assert mailbox.discard("s", 2) == (False, [])
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("s", 2, 0))
    mailbox.join("s", 43, 8, 1)
    send(mailbox, 1)

    assert not mailbox.expects("s", 2)
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 2, 0))


def test_a_tensor_held_through_a_loss_and_a_return_is_taken_and_cannot_be_put_back() -> None:
    mailbox = with_message(count=2)
    mailbox.hold(Key("s", 0, 0))
    mailbox.hold(Key("s", 0, 1))
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.join("s", 43, 8, 1)
    send(mailbox, 1)

    assert not mailbox.finish(Key("s", 0, 0))
    assert mailbox.put_back(Key("s", 0, 1)) == []
    assert mailbox.next_unclaimed() == Key("s", 1, 0)


def test_a_sender_that_is_back_is_not_among_those_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "_REMEMBERED_SENDERS", 1)
    mailbox = lost(1)
    mailbox.join("s", 43, 8, 1)
    for name in ("a", "b", "c"):
        mailbox.join(name, 1, 1)
        mailbox.lose(name, PeerLostError("killed"))

    send(mailbox, 1)
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("s", 0, 0))


def test_a_sender_of_which_only_a_discard_was_known_is_kept_once_it_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox_module, "_REMEMBERED_SENDERS", 1)
    mailbox: Mailbox[str] = Mailbox()
    mailbox.discard("s", 0)
    mailbox.join("s", 42, 8)
    for name in ("a", "b", "c"):
        mailbox.discard(name, 0)

    assert not mailbox.expects("s", 0)
    assert mailbox.hold(Key("a", 0, 0)) is None, "it is like one that was never heard of"


def test_messages_that_closed_senders_left_are_counted_until_nobody_can_take_them() -> None:
    mailbox = joined()
    send(mailbox, 0)
    send(mailbox, 1)
    put(mailbox, 2, 0)
    assert mailbox.messages_left == 0
    mailbox.leave("s")  # the third is not whole
    assert mailbox.messages_left == 2

    mailbox.hold(Key("s", 0, 0))
    mailbox.finish(Key("s", 0, 0))
    assert mailbox.messages_left == 1
    mailbox.discard("s", 1)
    assert mailbox.messages_left == 0


def test_a_sender_that_comes_back_for_ever_and_leaves_gaps_does_not_make_the_memory_of_it_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox_module, "_REMEMBERED_RANGES", 2)
    mailbox: Mailbox[str] = Mailbox()
    for first in range(0, 50, 10):
        mailbox.join("s", 1, 4, first)
        put(mailbox, first, 0)
        mailbox.lose("s", PeerLostError("killed"))

    assert mailbox._senders["s"].ended.ranges() == [(20, 21), (30, 31), (40, 41)]
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("s", 0, 0))
