"""The grammar of the fuzzer produces valid and invalid conversations, with every kind of frame."""

import random
from typing import Any, get_args

import pytest

from aiotensor.protocol.frames import (
    FromSender,
    Opening,
    PublisherReport,
    Subscribe,
    ToInspector,
    ToSender,
)
from verification.fuzz.exploring import said_at_random
from verification.fuzz.grammar import TO_INSPECTOR, TO_RECEIVER, TO_SENDER
from verification.fuzz.outcomes import Outcomes
from verification.fuzz.steps import cases

_CONVERSATIONS = 400

# A receiver accepts none of these.
OF_BROADCAST = (Subscribe, PublisherReport)


@pytest.mark.parametrize(
    ("to", "frames"),
    [(TO_RECEIVER, Opening | FromSender), (TO_SENDER, ToSender), (TO_INSPECTOR, ToInspector)],
)
def test_every_kind_of_frame_is_accepted_and_many_conversations_are_rejected(to: str, frames: Any) -> None:
    source = random.Random(0)
    outcomes = Outcomes()
    for _ in range(_CONVERSATIONS):
        outcomes.add(said_at_random(to, source))

    kinds = [kind for kind in get_args(frames) if kind not in OF_BROADCAST]
    accepted = {kind: outcomes.accepted[to, kind.__name__] for kind in kinds}
    assert min(accepted.values()) > _CONVERSATIONS // 40, accepted
    assert outcomes.valid[to] > _CONVERSATIONS // 4
    assert outcomes.invalid[to] > _CONVERSATIONS // 4


@pytest.mark.parametrize("to", [TO_RECEIVER, TO_SENDER])
def test_each_recorded_case_has_frames_of_the_current_protocol(to: str) -> None:
    for name, said in cases(to).items():
        outcomes = Outcomes()
        outcomes.add(said)
        assert outcomes.accepted or not any(step.record for step in said.steps), name
