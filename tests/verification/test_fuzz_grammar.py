"""The grammar of the fuzzer produces valid and invalid conversations, with every kind of frame."""

import random
from typing import Any, get_args

import pytest

from aiotensor.protocol.broadcast import Content, FromSubscriber, ToSubscriber
from aiotensor.protocol.frames import Frame, FromSender, Hello, Inspect, Subscribe, ToInspector, ToSender
from aiotensor.protocol.ranks import FromRank
from verification.fuzz.exploring import said_at_random
from verification.fuzz.grammar import (
    TO_INSPECTOR,
    TO_PUBLISHER,
    TO_RANK,
    TO_RECEIVER,
    TO_SENDER,
    TO_SUBSCRIBER,
)
from verification.fuzz.outcomes import Outcomes
from verification.fuzz.steps import cases

_CONVERSATIONS = 400

# The frames that each kind of peer accepts.
ACCEPTED: dict[str, Any] = {
    TO_RECEIVER: Hello | Inspect | FromSender,
    TO_SENDER: ToSender,
    TO_INSPECTOR: ToInspector,
    TO_PUBLISHER: Subscribe | Inspect | FromSubscriber,
    TO_SUBSCRIBER: ToSubscriber | Content,
    TO_RANK: FromRank,
}


@pytest.mark.parametrize("to", ACCEPTED)
def test_every_kind_of_frame_is_accepted_and_many_conversations_are_rejected(to: str) -> None:
    source = random.Random(0)
    outcomes = Outcomes()
    for _ in range(_CONVERSATIONS):
        outcomes.add(said_at_random(to, source))

    accepted = {kind: outcomes.accepted[to, kind.__name__] for kind in get_args(ACCEPTED[to])}
    assert min(accepted.values()) > _CONVERSATIONS // 40, accepted
    assert outcomes.valid[to] > _CONVERSATIONS // 4
    assert outcomes.invalid[to] > _CONVERSATIONS // 4


def test_every_frame_of_the_protocols_is_accepted_by_a_kind_of_peer() -> None:
    accepted = {kind for frames in ACCEPTED.values() for kind in get_args(frames)}
    assert accepted >= set(get_args(Frame | FromSubscriber | ToSubscriber | FromRank))


@pytest.mark.parametrize("to", [TO_RECEIVER, TO_SENDER, TO_PUBLISHER, TO_RANK])
def test_each_recorded_case_has_frames_of_the_current_protocol(to: str) -> None:
    for name, said in cases(to).items():
        outcomes = Outcomes()
        outcomes.add(said)
        assert outcomes.accepted or not any(step.record for step in said.steps), name
