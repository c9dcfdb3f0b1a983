from collections.abc import Callable

import pytest

from aiotensor.errors import AlreadyTakenError, DiscardedError, PeerLostError, ProtocolError
from aiotensor.protocol.arrived import REMEMBERED_DISCARDS
from aiotensor.protocol.mailbox import REMEMBERED_RANGES, REMEMBERED_SENDERS, Key, Mailbox


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


def forget_oldest(mailbox: Mailbox[str]) -> None:
    """Let many senders connect and close, so that earlier ones without remaining tensors are forgotten."""
    for number in range(REMEMBERED_SENDERS):
        mailbox.join(f"other {number}", 1, 1)
        mailbox.leave(f"other {number}")


def lost(count: int = 1) -> Mailbox[str]:
    """Return a mailbox whose sender was lost after so many messages."""
    mailbox = joined()
    for number in range(count):
        send(mailbox, number)
    mailbox.lose("s", PeerLostError("killed"))
    return mailbox


def test_the_tensors_of_a_message_can_be_taken_once_it_is_whole() -> None:
    mailbox = joined()
    put(mailbox, 0, 0, "frames")
    put(mailbox, 0, 1, "times")
    assert mailbox.hold(Key("s", 0, 0)) is None
    assert mailbox.hold_next() is None

    assert mailbox.end("s", 0) == [Key("s", 0, 0), Key("s", 0, 1)]
    assert mailbox.hold(Key("s", 0, 1)) == "times"
    assert mailbox.hold(Key("s", 0, 0)) == "frames"
    assert not mailbox.finish(Key("s", 0, 1))
    assert mailbox.finish(Key("s", 0, 0))


def test_a_tensor_cannot_be_taken_again_while_others_of_its_message_are_left() -> None:
    mailbox = with_message(count=2)
    mailbox.hold(Key("s", 0, 0))
    with pytest.raises(AlreadyTakenError, match="already received"):
        mailbox.hold(Key("s", 0, 0))
    mailbox.finish(Key("s", 0, 0))
    with pytest.raises(AlreadyTakenError, match="already received"):
        mailbox.hold(Key("s", 0, 0))

    assert mailbox.hold(Key("s", 0, 1)) == "tensor 1"


def test_whole_messages_of_a_closed_sender_can_be_taken_or_discarded() -> None:
    mailbox = with_message()
    put(mailbox, 1, 0, "of another")
    mailbox.end("s", 1)
    mailbox.leave("s")

    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"
    assert mailbox.discard("s", 1) == []
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 1, 0))


def test_waits_for_incomplete_messages_fail_when_their_sender_closes() -> None:
    mailbox = with_message()
    put(mailbox, 1, 0, "half of it")
    mailbox.claims.add(Key("s", 1, 0))
    mailbox.claims.add(Key("s", 2, 0))

    assert sorted(mailbox.leave("s")) == [Key("s", 1, 0), Key("s", 2, 0)]
    with pytest.raises(DiscardedError, match="was discarded"):
        mailbox.hold(Key("s", 1, 0))
    with pytest.raises(DiscardedError, match=r"never sent: its sender \(pid 42\) closed"):
        mailbox.hold(Key("s", 2, 0))
    assert (mailbox.unclaimed_tensors, mailbox.unclaimed_bytes) == (1, len("tensor 0"))


def test_a_sender_that_closed_cannot_be_lost_any_more() -> None:
    mailbox = with_message()
    mailbox.claims.add(Key("s", 0, 0))
    mailbox.leave("s")

    assert mailbox.lose("s", PeerLostError("its process ended")) == []
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"


def test_a_sender_that_was_not_admitted_is_lost_until_it_connects() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.claims.add(Key("s", 1, 0))

    assert mailbox.lose("s", PeerLostError("refused")) == [Key("s", 1, 0)]
    with pytest.raises(PeerLostError, match="refused"):
        mailbox.hold(Key("s", 1, 0))
    mailbox.join("s", 42, 1)
    assert mailbox.hold(Key("s", 1, 0)) is None


def test_old_lost_senders_are_forgotten() -> None:
    mailbox = lost()
    mailbox.join("another", 43, 1)
    mailbox.lose("another", PeerLostError("killed"))
    for number in range(REMEMBERED_SENDERS - 1):
        mailbox.join(f"other {number}", 1, 1)
        mailbox.lose(f"other {number}", PeerLostError("killed"))

    assert mailbox.hold(Key("s", 0, 0)) is None, "a forgotten sender is like one that has not connected yet"
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("another", 0, 0))


def test_discarding_a_message_of_a_lost_sender_has_no_effect() -> None:
    mailbox = with_message()
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.claims.add(Key("s", 0, 0))

    assert mailbox.discard("s", 0) == []


def test_a_wait_for_a_tensor_beyond_the_end_of_its_message_ends_with_an_error() -> None:
    mailbox = joined()
    mailbox.claims.add(Key("s", 0, 5))
    put(mailbox, 0, 0, "only one")

    assert Key("s", 0, 5) in mailbox.end("s", 0)
    with pytest.raises(DiscardedError, match="ended after 1 tensors"):
        mailbox.hold(Key("s", 0, 5))


def test_a_tensor_with_a_negative_number_was_never_sent() -> None:
    mailbox = with_message()

    with pytest.raises(DiscardedError, match="was never sent"):
        mailbox.hold(Key("s", 0, -1))


def test_a_message_is_wanted_until_it_has_ended() -> None:
    mailbox = joined()
    put(mailbox, 0, 0)
    assert mailbox.wants("s", 0)
    mailbox.end("s", 0)
    mailbox.hold(Key("s", 0, 0))
    mailbox.finish(Key("s", 0, 0))
    assert not mailbox.wants("s", 0)

    put(mailbox, 1, 0)
    mailbox.discard("s", 1)
    assert not mailbox.wants("s", 1)
    assert mailbox.end("s", 1) == [], "its tensors are gone"


def test_peer_lost_error_states_the_pid_and_the_reason() -> None:
    mailbox = with_message()
    reason = ProtocolError("it broke the protocol")
    mailbox.lose("s", reason)

    with pytest.raises(PeerLostError, match=r"pid 42.*it broke the protocol") as caught:
        mailbox.hold(Key("s", 0, 0))
    assert caught.value.pid == 42
    assert caught.value.__cause__ is reason


def test_a_held_tensor_can_be_taken_after_its_sender_was_lost() -> None:
    mailbox = with_message()
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"
    mailbox.lose("s", PeerLostError("killed"))

    assert not mailbox.finish(Key("s", 0, 0))


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


def test_a_message_whose_discard_was_forgotten_is_never_awaited() -> None:
    mailbox = joined()
    for number in range(REMEMBERED_DISCARDS + 1):
        mailbox.discard("s", number)

    with pytest.raises(AlreadyTakenError):
        mailbox.hold(Key("s", 0, 0))
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 1, 0))


def test_old_senders_are_forgotten_unless_their_tensors_can_still_be_taken() -> None:
    mailbox = with_message()
    mailbox.join("a", 1, 1)
    mailbox.leave("a")
    mailbox.leave("s")
    forget_oldest(mailbox)

    assert mailbox.hold(Key("a", 0, 0)) is None, "a forgotten sender is like one that has not connected yet"
    with pytest.raises(DiscardedError):
        mailbox.hold(Key(f"other {REMEMBERED_SENDERS - 1}", 0, 0))
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"


@pytest.mark.parametrize("how", [Mailbox.finish, Mailbox.put_back])
def test_a_held_tensor_can_be_finished_after_its_sender_was_forgotten(
    how: Callable[[Mailbox[str], Key], object],
) -> None:
    mailbox = with_message()
    mailbox.hold(Key("s", 0, 0))
    mailbox.lose("s", PeerLostError("killed"))
    forget_oldest(mailbox)

    assert not mailbox.has_joined("s")
    assert not how(mailbox, Key("s", 0, 0))


# Messages that were discarded, and messages that grow


def test_a_message_that_was_discarded_before_it_arrived_is_not_stored() -> None:
    mailbox = joined()
    assert mailbox.discard("s", 0) == []

    assert not mailbox.wants("s", 0)
    assert not mailbox.wants("s", 0), "nor are its other tensors"
    assert mailbox.end("s", 0) == []
    send(mailbox, 1)


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


def test_a_message_may_grow_while_later_ones_arrive_and_are_taken() -> None:
    mailbox = joined()
    put(mailbox, 0, 0)
    send(mailbox, 1)
    mailbox.hold(Key("s", 1, 0))
    assert mailbox.finish(Key("s", 1, 0))
    put(mailbox, 0, 1)

    assert mailbox.end("s", 0) == [Key("s", 0, 0), Key("s", 0, 1)]


def test_discarding_a_message_wakes_the_calls_that_wait_for_it_once() -> None:
    mailbox = joined()
    put(mailbox, 0, 0)
    mailbox.claims.add(Key("s", 0, 0))

    assert mailbox.discard("s", 0) == [Key("s", 0, 0)]
    assert mailbox.discard("s", 0) == []
    assert mailbox.messages_discarded == 1
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 0, 0))


# A sender that is lost and reconnects


def test_a_lost_sender_reconnects_and_continues_its_numbers() -> None:
    mailbox = lost(2)
    mailbox.join("s", 43, 1, 2)
    send(mailbox, 2)

    assert mailbox.unclaimed_of("s")[0] == 1
    assert mailbox.hold(Key("s", 2, 0)) == "tensor 0"
    assert mailbox.finish(Key("s", 2, 0))


def test_messages_sent_before_a_loss_stay_lost_when_the_sender_reconnects() -> None:
    mailbox = lost(1)  # of which one had arrived, and two more were on their way
    mailbox.join("s", 43, 8, 3)

    for number in range(3):
        with pytest.raises(PeerLostError, match="killed"):
            mailbox.hold(Key("s", number, 0))
    assert mailbox.hold(Key("s", 3, 0)) is None


def test_a_tensor_taken_before_a_loss_stays_taken() -> None:
    mailbox = with_message()
    mailbox.hold(Key("s", 0, 0))
    mailbox.finish(Key("s", 0, 0))
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.join("s", 43, 8, 1)

    with pytest.raises(AlreadyTakenError):
        mailbox.hold(Key("s", 0, 0))


def test_waits_for_messages_of_an_earlier_connection_end_when_the_sender_reconnects() -> None:
    mailbox: Mailbox[str] = Mailbox()
    early, late, of_another = Key("s", 1, 0), Key("s", 2, 0), Key("another", 0, 0)
    for key in (early, late, of_another):
        mailbox.claims.add(key)

    assert sorted(mailbox.join("s", 42, 8, 2)) == [early, late]  # each call checks its own
    with pytest.raises(PeerLostError, match="another receiver"):
        mailbox.hold(early)
    assert mailbox.hold(late) is None


def test_the_first_connection_of_a_sender_wakes_no_call() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.claims.add(Key("s", 0, 0))

    assert mailbox.join("s", 42, 8) == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_sender_that_repeats_numbers_after_a_loss_is_refused(first: int) -> None:
    mailbox = lost(2)

    with pytest.raises(ProtocolError, match="has already connected, or reuses numbers"):
        mailbox.join("s", 43, 8, first)
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("s", 0, 0))
    mailbox.join("s", 43, 8, 2)


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("has_left", [False, True], ids=["is here", "left"])
def test_a_connected_or_closed_sender_cannot_connect_again(has_left: bool, first: int) -> None:
    mailbox = with_message()
    if has_left:
        mailbox.leave("s")

    with pytest.raises(ProtocolError, match="has already connected, or reuses numbers"):
        mailbox.join("s", 43, 8, first)
    assert mailbox.hold(Key("s", 0, 0)) == "tensor 0"


def test_errors_name_the_process_of_the_last_connection() -> None:
    mailbox = lost(1)
    mailbox.join("s", 43, 1, 1)
    put(mailbox, 1, 0)
    mailbox.lose("s", PeerLostError("killed again"))

    with pytest.raises(PeerLostError, match=r"pid 43\).*killed again") as caught:
        mailbox.hold(Key("s", 0, 0))
    assert caught.value.pid == 43


def test_a_message_discarded_before_a_loss_is_not_wanted_after_it() -> None:
    mailbox = joined()
    mailbox.discard("s", 1)
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.join("s", 43, 8, 1)

    assert not mailbox.wants("s", 1)
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 1, 0))


def test_a_message_discarded_while_its_sender_is_lost_is_not_wanted_after_it_reconnects() -> None:
    mailbox = lost(1)
    assert mailbox.discard("s", 2) == []
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("s", 2, 0))
    mailbox.join("s", 43, 8, 1)
    send(mailbox, 1)

    assert not mailbox.wants("s", 2)
    with pytest.raises(DiscardedError):
        mailbox.hold(Key("s", 2, 0))


def test_a_tensor_held_during_a_loss_is_taken_and_cannot_be_put_back() -> None:
    mailbox = with_message(count=2)
    mailbox.hold(Key("s", 0, 0))
    mailbox.hold(Key("s", 0, 1))
    mailbox.lose("s", PeerLostError("killed"))
    mailbox.join("s", 43, 8, 1)
    send(mailbox, 1)

    assert not mailbox.finish(Key("s", 0, 0))
    assert mailbox.put_back(Key("s", 0, 1)) == []
    assert mailbox.hold_next() == (Key("s", 1, 0), "tensor 0", 1)


def test_a_sender_that_has_reconnected_is_not_forgotten() -> None:
    mailbox = lost(1)
    mailbox.join("s", 43, 8, 1)
    forget_oldest(mailbox)

    send(mailbox, 1)
    with pytest.raises(PeerLostError):
        mailbox.hold(Key("s", 0, 0))


def test_a_discard_before_its_sender_connects_is_remembered_while_others_are_forgotten() -> None:
    mailbox: Mailbox[str] = Mailbox()
    mailbox.discard("never connects", 0)
    mailbox.discard("s", 0)
    mailbox.join("s", 42, 8)
    for number in range(REMEMBERED_SENDERS):
        mailbox.discard(f"other {number}", 0)

    assert not mailbox.wants("s", 0)
    assert mailbox.hold(Key("never connects", 0, 0)) is None, "a forgotten sender is like an unknown one"


def test_remaining_messages_of_closed_senders_are_counted_until_they_end() -> None:
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
