"""The audit of a broadcast finds every kind of violation in rounds written by hand."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from verification.chaos.audit import Account, Tally
from verification.chaos.broadcasts_audit import audit_broadcast
from verification.chaos.journal import (
    Admitted,
    Began,
    Broken,
    Counted,
    Disconnected,
    Ended,
    Event,
    Published,
    Received,
    Subscribed,
    Taken,
)
from verification.chaos.plan import (
    SLOTS,
    Fault,
    FaultKind,
    Order,
    PublisherPlan,
    Round,
    SenderPlan,
)
from verification.chaos.planning import plan_round

TAKER = plan_round(0, 0).taker
OPENED = Subscribed("s", 0.5)
END = Disconnected("")


def _published(count: int, *, at: float = 1.0) -> list[Event]:
    events: list[Event] = []
    for number in range(count):
        events += [Began(4 * number, 1), Published(4 * number, "p", number, at), Ended(4 * number, "whole")]
    return events


def _received(*numbers: int) -> list[Event]:
    """Receive publications, without those in between."""
    events: list[Event] = []
    expected = 0
    for number in numbers:
        events.append(Received(4 * number, "p", number, number - expected))
        expected = number + 1
    return events


def _ended(how: str) -> list[Event]:
    return [Began(0, 1), Ended(0, how)]


ADMITTED = Admitted("p", ("s",))


def _problems(
    published: Sequence[Event],
    received: Sequence[Event],
    *faults: Fault,
    order: Order | None = None,
    publisher_is_killed: bool = False,
    subscriber_is_killed: bool = False,
    others: Sequence[Event] = (),
    family: str = "subscriber",
    **options: Any,
) -> list[str]:
    limits = msgspec.structs.replace(PublisherPlan("wait", 4, None, 0, None), **options)
    orders = [order if order and order.key == key else _order(key) for key in range(0, 400, 4)]
    sender = SenderPlan(0, 0, 30.0, uvloop=False, width=1, parts=(tuple(orders), ()))
    plan = Round(0, family, (sender,), TAKER, faults, (TAKER,), limits)
    accounts = [
        Account("publisher", 0, publisher_is_killed, published),
        Account("subscriber", SLOTS, subscriber_is_killed, [OPENED, *received]),
        Account("another", SLOTS + 1, False, others),
    ]
    return audit_broadcast(plan, accounts, Tally())


def _order(key: int = 0, how: str = "publish", counts: tuple[int, ...] = (10,), fate: str = "") -> Order:
    return Order(key, how, counts, fate, 0.0)


def _fault(kind: FaultKind, target: int | None = 0, for_ms: float = 1.0) -> Fault:
    return Fault(kind, target, 0.0, for_ms)


@pytest.mark.parametrize(
    ("published", "received", "said"),
    [
        (_published(3), _received(0, 1, 1), "it cannot have missed so many"),
        (_published(3), [*_received(0, 1), Received(4, "p", 1, 0)], "the next number was 2"),
        (_published(3), _received(0, 2), "nothing explains that it missed any"),
        (_published(3), [*_received(0), Received(8, "p", 2, 0)], "the next number was 1"),
        (_published(3), _received(1, 2), "nothing explains that it missed any"),
        (_published(3), [Received(4, "p", 1, 0), Received(8, "p", 2, 0)], "before the first publication"),
        (_published(3), _received(0, 1), "it has not received publication 2 of p"),
        (_published(3), [], "it has not received publication 2 of p"),
        (_published(3), [*_received(0, 1), Received(4, "p", 2, 0)], "publication ('p', 2) is both 8 and 4"),
        (_published(1), _received(0, 1), "was received, and never published"),
        (_published(2), [*_received(0), END, Received(4, "p", 1, 0)], "nothing explains that the connection"),
        (_published(1), [*_received(0), Disconnected("ProtocolError", "x")], "nothing explains"),
        (_published(1), [*_received(0), Disconnected("RefusedError", "x")], "nothing explains"),
        (_published(1), [*_received(0), Disconnected("OSError", "x")], "nothing explains"),
        (_published(1), [*_received(0), Broken("a value")], "a value"),
        (_published(1), [*_received(0), Taken(0, "s", 0, 0)], "subscriber wrote"),
    ],
)
def test_impossible_outcomes_of_publications_are_found(
    published: Sequence[Event], received: Sequence[Event], said: str
) -> None:
    assert any(said in problem for problem in _problems([ADMITTED, *published], received))


@pytest.mark.parametrize(
    ("order", "events", "said"),
    [
        (_order(), [Began(0, 1)], "its call never ended"),
        (_order(), [Began(0, 1), Ended(0, "whole")], "it has no number"),
        (_order(), [*_published(1)[:2], Ended(0, "cancelled")], "and it was published"),
        (_order(), [Began(0, 1), Ended(0, "cancelled")], "nothing that happened"),
        (_order(), [Began(0, 1), Ended(0, "WouldBlockError")], "nothing that happened"),
        (_order(), [Began(0, 1), Ended(0, "TooLargeError")], "nothing that happened"),
        (_order(), [Began(0, 1), Ended(0, "ClosedError")], "nothing that happened"),
        (_order(), [Began(0, 1), Ended(0, "OSError")], "nothing that happened"),
        (_order(), [Began(0, 1), Ended(0, "PeerLostError")], "nothing that happened"),
    ],
)
def test_impossible_outcomes_of_publish_calls_are_found(
    order: Order, events: Sequence[Event], said: str
) -> None:
    assert any(said in problem for problem in _problems(events, _received(0)[:0], order=order))


def test_a_cancelled_call_publishes_nothing() -> None:
    events = _ended("cancelled")
    assert _problems(events, _received(0), order=_order(fate="cancel"))
    assert not _problems(events, [], order=_order(fate="cancel"))


@pytest.mark.parametrize(
    ("counted", "received", "is_right"),
    [
        (Counted("p", "s", 3, 0), _received(0, 1, 2), True),
        (Counted("p", "s", 1, 2), _received(2), True),
        (Counted("p", "s", 2, 1), _received(2), False),
        (Counted("p", "s", 2, 0), _received(0, 2), False),
    ],
)
def test_missed_publications_must_match_those_that_the_publisher_dropped(
    counted: Counted, received: Sequence[Event], *, is_right: bool
) -> None:
    problems = _problems([ADMITTED, *_published(3), counted], [*received, END], slow="drop")
    assert (not problems) == is_right
    if counted.dropped or not is_right:
        assert _problems([ADMITTED, *_published(3), counted], [*received, END])  # with any other policy


def test_a_publisher_counts_for_its_last_connection_only() -> None:
    second = [Published(4 * number, "q", number - 1, 1.0) for number in (1, 2, 3)]
    published = [ADMITTED, *_published(1), *second, Counted("q", "s", 1, 0)]
    received = [*_received(0), END, Received(12, "q", 2, 2), END]
    assert not _problems(published, received, _fault(FaultKind.NO_ADDRESSES, SLOTS))
    assert any("counted (1, 0)" in one for one in _problems(published, received))


def test_a_late_subscriber_receives_at_most_the_history() -> None:
    late = [Received(8, "p", 2, 0), Received(12, "p", 3, 0)]
    early, other = _published(4, at=0.1), [Subscribed("t", 0.0), *_received(0, 1, 2, 3)]
    assert _problems(early, late, others=other, history=1)
    assert not _problems(early, late, others=other, history=2)
    assert not _problems(_published(4), late, others=other)  # it may have connected in between


def test_subscribers_agree_on_the_numbers_of_publications_of_a_killed_publisher() -> None:
    killed = [ADMITTED, *_published(2)]
    more, same = Received(8, "p", 2, 0), [Subscribed("t", 0.0), *_received(0, 1, 2)]
    assert not _problems(killed, [*_received(0, 1), more], others=same, publisher_is_killed=True)
    wrong = [Subscribed("t", 0.0), *_received(0, 1), Received(12, "p", 2, 0)]
    assert _problems(killed, [*_received(0, 1), more], others=wrong, publisher_is_killed=True)


def test_a_change_of_the_publisher_needs_the_end_of_the_connection() -> None:
    killed: list[Event] = [ADMITTED, *_published(1)]
    other = Received(4, "q", 0, 0)
    assert _problems(killed, [*_received(0), other], publisher_is_killed=True)
    lost = Disconnected("PeerLostError")
    assert not _problems(killed, [*_received(0), lost, other], publisher_is_killed=True)
    back = [*_received(0), lost, other, lost, Received(4, "p", 1, 0)]
    assert any("it returned" in one for one in _problems(killed, back, publisher_is_killed=True))


@pytest.mark.parametrize(
    ("fault", "explains"),
    [
        (_fault(FaultKind.STOP, 0, 1700.0), True),
        (_fault(FaultKind.STOP, SLOTS, 1700.0), True),
        (_fault(FaultKind.PARTITION, None, 1000.0), True),
        (_fault(FaultKind.STOP, SLOTS, 500.0), False),
        (_fault(FaultKind.STOP, SLOTS + 1, 1700.0), False),  # another subscriber
        (_fault(FaultKind.PARTITION, None, 100.0), False),
    ],
)
def test_only_a_long_silence_between_hosts_ends_a_connection(fault: Fault, *, explains: bool) -> None:
    lost = Disconnected("PeerLostError")
    received = [*_received(0), lost, Received(8, "p", 2, 1), END]
    published = [ADMITTED, *_published(3)]
    assert bool(_problems(published, received, fault, family="remote subscriber")) != explains
    assert _problems(published, received, fault, family="tcp subscriber")
    assert _problems(published, [*_received(0), Received(8, "p", 2, 1)], fault, family="remote subscriber")


def test_outcomes_that_the_round_explains_are_not_problems() -> None:
    admitted = [ADMITTED, *_published(3)]
    again = [*_received(0), Disconnected("PeerLostError"), Received(8, "p", 2, 1), END]
    assert not _problems(admitted, _received(0, 1, 2))
    assert not _problems(admitted, _received(0), subscriber_is_killed=True)
    assert not _problems(admitted, _received(0, 2), slow="drop")
    assert not _problems(admitted, again, slow="disconnect")
    assert not _problems(admitted, again, _fault(FaultKind.NO_DESCRIPTORS, SLOTS))
    assert not _problems(admitted[:2], [], publisher_is_killed=True)
    for error, fault in (("ClosedError", FaultKind.CLOSE), ("OSError", FaultKind.NO_SPACE)):
        assert not _problems(_ended(error), [], _fault(fault))
    blocked = _ended("WouldBlockError")
    assert not _problems(blocked, [], max_wait_s=0.1)
    assert not _problems(blocked, [], order=_order(how="nowait"))
    too_large = _ended("TooLargeError")
    assert not _problems(too_large, [], order=_order(counts=(600_000, 600_000, 600_000, 600_000)))
    assert not _problems(too_large, [], order=_order(counts=(200_000,)), max_held_bytes=1 << 20)
    drained = [*_published(1)[:2], Ended(0, "cancelled")]
    assert not _problems(drained, _received(0), order=_order(how="drain", fate="cancel"))
