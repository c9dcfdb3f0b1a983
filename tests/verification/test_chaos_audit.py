"""The audit finds the problems in rounds written by hand."""

from collections.abc import Sequence

import msgspec
import pytest

from verification.chaos.audit import Account, Tally, audit
from verification.chaos.journal import (
    Answered,
    Began,
    Broken,
    Dropped,
    Ended,
    Event,
    Heard,
    Replied,
    Sent,
    Taken,
    Withdrawn,
)
from verification.chaos.plan import Fault, FaultKind, Order, Round
from verification.chaos.planning import plan_round
from verification.chaos.questions_audit import audit_questions

QUIET = Round(0, "engine", plan_round(0, 0).senders, plan_round(0, 0).taker, ())
SENT: list[Event] = [Began(8, 1), Sent(8, "s", 0, 0, 0), Ended(8, "whole")]
TAKEN = Taken(8, "s", 0, 0)
ANSWER = Answered("s", 0, 0, "AlreadyTakenError")


def _problems(
    sent: Sequence[Event],
    received: Sequence[Event],
    *faults: Fault,
    is_killed: bool = False,
    losses: int = 0,
    family: str = "engine",
    paused_s: float = 0.0,
) -> list[str]:
    plan = Round(0, family, QUIET.senders, QUIET.taker, faults)
    accounts = [
        Account("sender", 0, is_killed, sent, losses),
        Account("receiver", None, False, received, paused_s=paused_s),
    ]
    return audit(plan, accounts, set(), Tally())


def _fault(kind: FaultKind, target: int | None = 0, for_ms: float = 1.0) -> Fault:
    return Fault(kind, target, 0.0, for_ms)


@pytest.mark.parametrize(
    ("sent", "received", "said"),
    [
        (SENT, [TAKEN, TAKEN], "taken 2 times"),
        (SENT, [], "no connection ended"),
        (SENT, [Answered("s", 0, 0, "PeerLostError")], "no connection ended"),
        (SENT, [Taken(8, "s", 1, 0)], "sent as"),
        (SENT, [TAKEN, Answered("s", 0, 0, "DiscardedError")], "asking again"),
        ([*SENT, Withdrawn(8)], [Answered("s", 0, 0, "AlreadyTakenError")], "asking for it raised"),
        (SENT[:2], [TAKEN], "never ended"),
        ([Began(8, 1), Ended(8, "PeerLostError")], [], "nothing that happened"),
        ([Began(8, 1), Ended(8, "OSError")], [], "nothing that happened"),
        ([Began(8, 1), Ended(8, "ValueError")], [], "nothing that happened"),
        ([Began(8, 1), Ended(8, "given up")], [TAKEN], "and it was taken"),
        ([Began(8, 2), SENT[1], SENT[2]], [TAKEN], "without a handle"),
        ([], [TAKEN], "never sent"),
        ([Broken("a bound")], [], "a bound"),
    ],
)
def test_impossible_outcomes_of_messages_are_found(
    sent: Sequence[Event], received: Sequence[Event], said: str
) -> None:
    [problem] = _problems(sent, received)
    assert said in problem


def test_outcomes_that_the_round_explains_are_not_problems() -> None:
    asked = Answered("s", 0, 0, "PeerLostError")
    assert not _problems(SENT, [TAKEN, ANSWER])
    assert not _problems(SENT, [asked], _fault(FaultKind.KILL, None), losses=1)
    assert not _problems(SENT[:1], [], is_killed=True)
    assert not _problems(SENT[:1], [TAKEN], is_killed=True)
    assert not _problems(SENT, [Dropped("s", 0), Answered("s", 0, 0, "DiscardedError")])
    assert not _problems([*SENT, Withdrawn(8)], [TAKEN, ANSWER])
    assert not _problems([Began(8, 1), Ended(8, "OSError")], [], _fault(FaultKind.NO_SPACE))
    assert not _problems([Began(8, 1), Ended(8, "ClosedError")], [], _fault(FaultKind.CLOSE))
    assert not _problems([Began(8, 1), Ended(8, "PeerLostError")], [], _fault(FaultKind.KILL, None))
    assert not _problems([Began(8, 1), Ended(8, "cancelled")], [TAKEN, ANSWER])


LOST = Answered("s", 0, 0, "PeerLostError")
UNSENT: list[Event] = [Began(8, 1), Ended(8, "PeerLostError")]
SILENCES = [
    _fault(FaultKind.STOP, 0, 1700.0),
    _fault(FaultKind.STOP, None, 1700.0),
    _fault(FaultKind.PARTITION, None, 1000.0),
]


@pytest.mark.parametrize("fault", SILENCES)
def test_a_long_silence_between_hosts_explains_a_loss(fault: Fault) -> None:
    assert not _problems(SENT, [LOST], fault, losses=1, family="remote server")
    assert not _problems(UNSENT, [], fault, family="remote server")
    assert _problems(SENT, [TAKEN, TAKEN], fault, losses=1, family="remote server")
    assert _problems(SENT, [LOST], fault, family="remote server")  # the sender was not notified


def test_a_sender_that_is_closed_during_a_partition_may_lose_messages_uncounted() -> None:
    faults = _fault(FaultKind.CLOSE), _fault(FaultKind.PARTITION, None, 800.0)

    assert not _problems(SENT, [LOST], *faults, family="remote server")
    assert _problems(SENT, [LOST], *faults[:1], family="remote server")


def test_a_paused_process_explains_a_loss_between_hosts() -> None:
    assert not _problems(UNSENT, [], family="remote server", paused_s=1.1)
    assert _problems(UNSENT, [], family="remote server", paused_s=0.6)


@pytest.mark.parametrize(
    ("fault", "family"),
    [
        (_fault(FaultKind.STOP, 0, 500.0), "remote server"),
        (_fault(FaultKind.STOP, None, 500.0), "remote server"),
        (_fault(FaultKind.STOP, 1, 1700.0), "remote server"),  # another sender
        (_fault(FaultKind.PARTITION, None, 100.0), "remote server"),
        *((fault, family) for fault in SILENCES for family in ("tcp engine", "engine")),  # without heartbeats
    ],
)
def test_a_loss_that_no_silence_explains_is_found(fault: Fault, family: str) -> None:
    [problem] = _problems(SENT, [LOST], fault, losses=1, family=family)
    assert "is lost" in problem
    [problem] = _problems(UNSENT, [], fault, family=family)
    assert "nothing that happened" in problem


ASKED: list[Event] = [Began(8, 1), Ended(8, "whole")]
DROPPED = Ended(8, "PeerLostError", "... UsageError: it was dropped without a reply")


def _problems_of_question(
    order: Order, asked: Sequence[Event], served: Sequence[Event], *faults: Fault, is_killed: bool = False
) -> list[str]:
    sender = msgspec.structs.replace(QUIET.senders[0], parts=((order,),))
    plan = Round(0, "asking", (sender,), QUIET.taker, faults)
    accounts = [Account("client", 0, is_killed, asked), Account("server", None, False, served)]
    return audit_questions(plan, accounts, Tally())


def _question(how: str = "request", wish: str = "answer", fate: str = "") -> Order:
    return Order(8, how, (10,), fate, 0.0, wish, (10,))


@pytest.mark.parametrize(
    ("order", "asked", "served", "said"),
    [
        (_question(), ASKED, [Heard(8), Heard(8)], "heard 2 times"),
        (_question(), ASKED, [Heard(8), Replied(8), Replied(8)], "answered 2 times"),
        (_question(), [*ASKED, ASKED[1]], [Heard(8)], "ended as"),
        (_question(), ASKED, [], "no server received it"),
        (_question(), ASKED[:1], [Heard(8)], "never ended"),
        (_question(), [], [Heard(8)], "never asked"),
        (_question(wish="raise"), ASKED, [Heard(8)], "had to raise"),
        (_question("one-way"), ASKED, [], "no process was lost"),
        (_question("one-way"), ASKED, [Heard(8), Replied(8)], "an answer that was not due"),
        (_question(), [ASKED[0], Ended(8, "PeerLostError")], [], "nothing explains"),
        (_question(), [ASKED[0], DROPPED], [Heard(8)], "nothing explains"),
        (_question("one-way", wish="drop"), [ASKED[0], DROPPED], [Heard(8)], "nothing explains"),
        (_question(), [ASKED[0], Ended(8, "ProtocolError")], [], "nothing explains"),
        (_question(), [ASKED[0], Ended(8, "cancelled")], [], "nothing explains"),
        (_question(), [ASKED[0], Ended(8, "RemoteError", "HandlerError: x")], [], "nothing explains"),
        (_question(), ASKED, [Heard(8), Broken("a value")], "a value"),
        (_question(), ASKED, [Heard(8), TAKEN], "server wrote"),
    ],
)
def test_impossible_outcomes_of_requests_are_found(
    order: Order, asked: Sequence[Event], served: Sequence[Event], said: str
) -> None:
    [problem] = _problems_of_question(order, asked, served)
    assert said in problem


def test_outcomes_of_requests_that_the_round_explains_are_not_problems() -> None:
    lost = [ASKED[0], Ended(8, "PeerLostError")]
    failed = [ASKED[0], Ended(8, "RemoteError", "HandlerError: raise")]
    assert not _problems_of_question(_question(), ASKED, [Heard(8), Replied(8)])
    assert not _problems_of_question(_question(), ASKED[:1], [Heard(8)], is_killed=True)
    assert not _problems_of_question(_question(), lost, [], _fault(FaultKind.KILL, None))
    assert not _problems_of_question(_question(wish="raise"), failed, [Heard(8)])
    assert not _problems_of_question(_question(wish="drop"), [ASKED[0], DROPPED], [Heard(8)])
    assert not _problems_of_question(_question(fate="cancel"), [ASKED[0], Ended(8, "cancelled")], [])
    assert not _problems_of_question(_question("one-way"), ASKED, [Heard(8)])
    assert not _problems_of_question(_question("one-way"), ASKED, [], _fault(FaultKind.STOP), is_killed=True)
    assert not _problems_of_question(_question("one-way"), ASKED, [], _fault(FaultKind.KILL, None))
