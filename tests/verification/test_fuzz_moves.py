"""The fuzzer sends valid and invalid messages about moves, and acknowledges what an honest peer moves."""

import random
from collections import Counter
from itertools import chain

import pytest

from aiotensor.errors import ProtocolError
from aiotensor.protocol import moves, network
from verification.fuzz.exploring import said_at_random
from verification.fuzz.grammar import TO_PUBLISHER, TO_RANK, TO_RECEIVER, TO_SENDER, TO_SUBSCRIBER
from verification.fuzz.hearing import Inbox
from verification.fuzz.steps import HEARD, Conversation
from verification.fuzz.things import GUARD, IMAGE

_CONVERSATIONS = 400
_OPENINGS = "openings"

KINDS = {
    network.RECORD: "records",
    network.STEP: "steps",
    network.FREE: "freed blocks",
    network.ACK: "acknowledgements",
    network.BYE: "last messages",
    network.DATA: "records with data",
}


def _bytes_at(start: int, length: int) -> tuple[bytes, ...]:
    return tuple(image[start : start + length].ljust(length, b"\0") for image in (GUARD, IMAGE))


def _counts(said: Conversation) -> Counter[str]:
    """Count the valid messages by their kinds, and the invalid ones."""
    counts: Counter[str] = Counter()
    for step in said.steps:
        counts[_OPENINGS] += step.opening is not None
        for message in step.messages:
            counts.update(_kinds(message))
    return counts


def _kinds(message: bytes) -> list[str]:
    kind = message[0] if message else -1
    try:
        match kind:
            case network.STEP:
                step, data = network.read_step(message)
                assert not data or bytes(data) in _bytes_at(step.start, step.length)
            case network.FREE:
                network.read_area(message)
            case network.ACK:
                network.read_ack(message)
            case network.DATA:
                network.read_data(memoryview(message))
            case network.BATCH:
                return ["batches", *chain(*map(_kinds, map(bytes, network.read_batch(memoryview(message)))))]
    except ProtocolError:
        return ["invalid"]
    return [KINDS.get(kind, "invalid")]


@pytest.mark.parametrize(
    ("to", "kinds"),
    [
        (TO_RECEIVER, {*KINDS.values(), "batches", "invalid", _OPENINGS}),
        (TO_SENDER, {"batches", "acknowledgements", "last messages", "invalid"}),
        (TO_PUBLISHER, {"batches", "acknowledgements", "steps", "last messages", "invalid", _OPENINGS}),
        (TO_SUBSCRIBER, {*KINDS.values(), "batches", "invalid", _OPENINGS}),
        (TO_RANK, {*KINDS.values(), "batches", "invalid", _OPENINGS}),
    ],
)
def test_every_kind_of_message_about_moves_is_sent_and_some_are_invalid(to: str, kinds: set[str]) -> None:
    source = random.Random(0)
    counts: Counter[str] = Counter()
    for _ in range(_CONVERSATIONS):
        counts += _counts(said_at_random(to, source))
    assert {kind: counts[kind] for kind in kinds if counts[kind] < 5} == {}, counts


def test_an_acknowledgement_states_the_bytes_that_an_honest_peer_has_sent() -> None:
    inbox, sent = Inbox(), moves.RecordWindow()
    record = bytes([network.RECORD]) + b"a record"
    sent.sent(len(b"a record"))
    area = network.Area(0, 0)
    step = network.encode_step(network.Step(area, 20, 0, 10, wants_ack=False))
    inbox.add(step)
    inbox.add(bytes([network.BYE]) * 10)  # the bytes of the step, and no last message
    inbox.add(network.encode_batch([step + bytes(10), record]))
    acknowledgement = network.encode_ack(network.Ack(HEARD, HEARD))

    filled_in = network.read_ack(inbox.filled_in(acknowledgement))
    assert filled_in.steps == 20
    sent.acknowledged(filled_in.records)
    with pytest.raises(ProtocolError):
        sent.acknowledged(filled_in.records + 1)
    assert (list(inbox.records), inbox.count, inbox.has_ended) == ([b"a record"], 1, False)

    batch = network.encode_batch([record, acknowledgement])
    assert inbox.filled_in(batch) == network.encode_batch([record, network.encode_ack(filled_in)])
    assert inbox.filled_in(record) == record
    inbox.add(bytes([network.BYE]))
    assert inbox.has_ended
