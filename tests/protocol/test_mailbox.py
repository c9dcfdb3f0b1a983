import tracemalloc

import pytest

from aiotensor.errors import AlreadyTakenError, DiscardedError, PeerLostError, ProtocolError
from aiotensor.protocol import mailbox as mailbox_module
from aiotensor.protocol.mailbox import Key, Mailbox


def joined(limit: int = 8) -> Mailbox[str]:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.join("s", 42, limit)
    return mailbox


def with_message(number: int = 0, count: int = 1) -> Mailbox[str]:
    mailbox = joined()
    for tensor in range(count):
        mailbox.put(Key("s", number, tensor), f"tensor {tensor}")
    mailbox.end("s", number, count)
    return mailbox


def test_the_tensors_of_a_message_can_be_taken_when_it_is_whole_and_not_before() -> None:
    mailbox = joined()
    mailbox.put(Key("s", 0, 0), "frames")
    mailbox.put(Key("s", 0, 1), "times")
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
    mailbox = with_message(0)
    mailbox.put(Key("s", 1, 0), "of another")
    mailbox.end("s", 1, 1)
    mailbox.leave("s")

    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"
    assert mailbox.discard("s", 1) == (True, [])
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 1, 0))


def test_who_waits_for_what_a_closed_sender_did_not_complete_is_told() -> None:
    mailbox = with_message()
    mailbox.put(Key("s", 1, 0), "half of it")
    mailbox.claim(Key("s", 1, 0))
    mailbox.claim(Key("s", 2, 0))

    assert sorted(mailbox.leave("s")) == [Key("s", 1, 0), Key("s", 2, 0)]
    with pytest.raises(DiscardedError, match="was discarded"):
        mailbox.hold(Key("s", 1, 0))
    with pytest.raises(DiscardedError, match=r"never sent: its sender \(pid 42\) closed"):
        mailbox.hold(Key("s", 2, 0))
    assert list(mailbox.unclaimed()) == ["tensor 0"]


def test_a_sender_that_closed_cannot_be_lost_any_more() -> None:
    mailbox = with_message()
    mailbox.claim(Key("s", 0, 0))
    mailbox.leave("s")

    assert mailbox.lose("s", PeerLostError("its process ended")) == []
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"


def test_there_is_nothing_to_discard_of_a_lost_sender() -> None:
    mailbox = with_message()
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.claim(Key("s", 1, 0))

    assert mailbox.discard("s", 1) == (False, [])


def test_who_waits_for_a_tensor_beyond_the_end_is_told_that_it_will_never_come() -> None:
    mailbox = joined()
    mailbox.claim(Key("s", 0, 5))
    mailbox.put(Key("s", 0, 0), "only one")

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
        mailbox.put(Key("stranger", 0, 0), "x")
    with pytest.raises(ProtocolError, match="message 0, which was whole"):
        mailbox.put(Key("s", 0, 1), "x")
    mailbox.hold(Key("s", 0, 0))
    mailbox.finish(Key("s", 0, 0))
    assert not mailbox.expects("s", 0)  # nor is it an offence: it may have been discarded long ago
    assert mailbox.end("s", 0, 1) == []
    with pytest.raises(ProtocolError, match="ended message 1 with a wrong count"):
        mailbox.end("s", 1, 0)
    mailbox.put(Key("s", 1, 0), "x")
    with pytest.raises(ProtocolError, match="tensor 0 of message 1 out of turn"):
        mailbox.put(Key("s", 1, 0), "x")
    with pytest.raises(ProtocolError, match="ended message 1 with a wrong count"):
        mailbox.end("s", 1, 2)
    mailbox.discard("s", 1)
    with pytest.raises(ProtocolError, match="message 1 of sender s has ended"):
        mailbox.put(Key("s", 1, 1), "x")


def test_more_messages_than_a_sender_announced_are_an_offence() -> None:
    mailbox = joined(limit=2)
    mailbox.put(Key("s", 0, 0), "x")
    mailbox.put(Key("s", 1, 0), "x")
    with pytest.raises(ProtocolError, match="more than the 2 messages in flight"):
        mailbox.put(Key("s", 2, 0), "x")

    mailbox.put(Key("s", 1, 1), "another of a message that is counted")
    mailbox.discard("s", 0)
    mailbox.put(Key("s", 2, 0), "there is room again")


def test_a_count_that_cannot_be_true_is_refused_without_counting_to_it() -> None:
    mailbox = joined()
    mailbox.put(Key("s", 0, 0), "x")
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

    assert list(mailbox.unclaimed()) == []
    assert mailbox.next_unclaimed() is None
    assert not mailbox.finish(held)
    assert mailbox.put_back(other) == []
    assert mailbox.next_unclaimed() is None
    mailbox.unclaim(waiting)


def test_old_discards_are_forgotten_but_never_taken_for_something_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mailbox_module, "_REMEMBERED_DISCARDS", 2)
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
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.lose("another", PeerLostError("killed"))

    assert not getattr(mailbox, how)(Key("s", 0, 0))
