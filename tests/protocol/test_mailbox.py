"""The tensors that have arrived, compared with plain sets and lists, and the memory of senders."""

import pytest

from aiotensor.errors import (
    AlreadyTakenError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
)
from aiotensor.protocol.arrived import REMEMBERED_DISCARDS, Key
from aiotensor.protocol.mailbox import REMEMBERED_RANGES, REMEMBERED_SENDERS, Mailbox

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
