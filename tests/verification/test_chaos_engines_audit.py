"""The audit of several engines finds every kind of violation in rounds written by hand."""

from collections.abc import Sequence

import msgspec
import pytest

from verification.chaos.audit import Account, Tally
from verification.chaos.engines_audit import audit_engines, wrong_with_refusals
from verification.chaos.journal import Began, Ended, Event, Heard, Replied
from verification.chaos.plan import SLOTS, Fault, FaultKind, Order, Round
from verification.chaos.planning import plan_round

QUIET = plan_round(0, 0, "engines")
ASKED: list[Event] = [Began(8, 1), Ended(8, "whole")]
LOST: list[Event] = [Began(8, 1), Ended(8, "PeerLostError")]
ENGINE = SLOTS + 1


def _problems(
    order: Order,
    asked: Sequence[Event],
    heard: Sequence[Sequence[Event]],
    *faults: Fault,
    is_killed: bool = False,
    is_new: bool = False,
    paused_s: float = 0.0,
) -> list[str]:
    sender = msgspec.structs.replace(QUIET.senders[0], parts=((order,),))
    plan = Round(0, "engines", (sender,), QUIET.taker, faults, QUIET.other_takers)
    engines = [Account(f"engine-{n}", SLOTS + n, False, events) for n, events in enumerate(heard)]
    client = Account("client", 0, is_killed, asked, 0, is_new)
    return audit_engines(plan, [client, *engines], Tally(), paused_s)


def _fault(kind: FaultKind, target: int | None, for_ms: float = 10.0) -> Fault:
    return Fault(kind, target, 0.0, for_ms)


def _question(how: str = "request", wish: str = "answer") -> Order:
    return Order(8, how, (10,), "", 0.0, wish, (10,))


@pytest.mark.parametrize(
    ("order", "asked", "heard", "said"),
    [
        (_question(), ASKED, [[Heard(8)], [Heard(8)]], "heard 2 times, by ['engine-0', 'engine-1']"),
        (_question(), LOST, [[Heard(8)], [Heard(8), Replied(8)]], "heard 2 times"),
        (_question("one-way"), ASKED, [[Heard(8)], [], [Heard(8)]], "heard 2 times"),
        (_question("one-way"), ASKED, [[], []], "no process was lost"),
        (_question(), ASKED, [[], []], "no server received it"),
        (_question(), ASKED[:1], [[Heard(8)]], "never ended"),
    ],
)
@pytest.mark.parametrize("kind", [FaultKind.ATTACK, FaultKind.CLOCK])
def test_impossible_outcomes_of_requests_to_several_engines_are_found(
    order: Order, asked: Sequence[Event], heard: Sequence[Sequence[Event]], said: str, kind: FaultKind
) -> None:
    [problem] = _problems(order, asked, heard, _fault(kind, ENGINE))
    assert said in problem


@pytest.mark.parametrize(("kind", "target"), [(FaultKind.KILL, ENGINE), (FaultKind.PARTITION, None)])
def test_no_fault_explains_a_request_that_two_engines_received(kind: FaultKind, target: int | None) -> None:
    heard = [[Heard(8)], [Heard(8)]]
    assert _problems(_question(), ASKED, heard, _fault(kind, target))
    assert _problems(_question(), ASKED[:1], heard, _fault(kind, target), is_killed=True)


@pytest.mark.parametrize(
    "fault",
    [
        _fault(FaultKind.ATTACK, ENGINE),
        _fault(FaultKind.CLOCK, 0),
        _fault(FaultKind.STOP, ENGINE, 60.0),
        _fault(FaultKind.STOP, 1, 1000.0),  # another client
        _fault(FaultKind.KILL, 1),
    ],
)
def test_a_loss_that_no_fault_explains_is_found(fault: Fault) -> None:
    [problem] = _problems(_question(), LOST, [[], []], fault, is_new=True)
    assert "nothing explains" in problem
    [problem] = _problems(_question("one-way"), ASKED, [[], []], fault)
    assert "no process was lost" in problem


@pytest.mark.parametrize(
    "fault",
    [
        _fault(FaultKind.KILL, ENGINE),
        _fault(FaultKind.CLOSE, ENGINE),
        _fault(FaultKind.STOP, ENGINE, 1000.0),
        _fault(FaultKind.STOP, 0, 1000.0),
        _fault(FaultKind.PARTITION, None),
    ],
)
def test_a_loss_that_a_fault_explains_is_no_problem(fault: Fault) -> None:
    assert not _problems(_question(), LOST, [[], [Heard(8)]], fault)
    assert not _problems(_question("one-way"), ASKED, [[], []], fault)


def test_a_process_that_stood_still_explains_a_loss_and_nothing_else() -> None:
    assert not _problems(_question(), LOST, [[], []], paused_s=2.1)
    assert _problems(_question(), LOST, [[], []], paused_s=1.6)
    assert _problems(_question(), ASKED, [[Heard(8)], [Heard(8)]], paused_s=2.1)
    assert _problems(_question(), [ASKED[0], Ended(8, "RefusedError", "x")], [[]], paused_s=2.1)


@pytest.mark.parametrize(
    "error", ["AccessDeniedError", "ProtocolError", "RefusedError", "OSError", "RemoteError"]
)
def test_no_fault_of_the_network_explains_other_errors(error: str) -> None:
    faults = [_fault(FaultKind.KILL, ENGINE), _fault(FaultKind.PARTITION, None)]
    [problem] = _problems(_question(), [ASKED[0], Ended(8, error, "HandlerError: x")], [[]], *faults)
    assert "nothing explains" in problem


def test_more_than_one_line_a_second_about_repeated_lines_is_found() -> None:
    lines = ["2000-01-01 WARNING aiotensor.channel a connection was refused because ..."]
    assert not wrong_with_refusals(2 * lines, 0.2)
    assert wrong_with_refusals(3 * lines, 0.2)
