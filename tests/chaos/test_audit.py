"""The audit finds what it is there for; rounds that are wrong are written by hand."""

from collections.abc import Sequence

import pytest

from tests.chaos.audit import Account, Tally, audit
from tests.chaos.journal import Answered, Began, Broken, Dropped, Ended, Event, Sent, Taken, Withdrawn
from tests.chaos.plan import Fault, FaultKind, Round, plan_round

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
) -> list[str]:
    plan = Round(0, "engine", QUIET.senders, QUIET.taker, faults)
    accounts = [Account("sender", 0, is_killed, sent, losses), Account("receiver", None, False, received)]
    return audit(plan, accounts, set(), Tally())


def _fault(kind: FaultKind, target: int | None = 0) -> Fault:
    return Fault(kind, target, 0.0, 1.0)


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
def test_what_must_not_be_is_found(sent: Sequence[Event], received: Sequence[Event], said: str) -> None:
    [problem] = _problems(sent, received)
    assert said in problem


def test_what_is_explained_by_the_round_is_no_problem() -> None:
    asked = Answered("s", 0, 0, "PeerLostError")
    assert not _problems(SENT, [TAKEN, ANSWER])
    assert not _problems(SENT, [asked], losses=1)
    assert not _problems(SENT[:1], [], is_killed=True)
    assert not _problems(SENT[:1], [TAKEN], is_killed=True)
    assert not _problems(SENT, [Dropped("s", 0), Answered("s", 0, 0, "DiscardedError")])
    assert not _problems([*SENT, Withdrawn(8)], [TAKEN, ANSWER])
    assert not _problems([Began(8, 1), Ended(8, "OSError")], [], _fault(FaultKind.NO_SPACE))
    assert not _problems([Began(8, 1), Ended(8, "ClosedError")], [], _fault(FaultKind.CLOSE))
    assert not _problems([Began(8, 1), Ended(8, "PeerLostError")], [], _fault(FaultKind.KILL, None))
    assert not _problems([Began(8, 1), Ended(8, "cancelled")], [TAKEN, ANSWER])
