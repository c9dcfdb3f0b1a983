"""The decoders decode or refuse any bytes, in little time and memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verification.fuzz.broadcasts import any_content
from verification.fuzz.choosers import FromBytes, FromHypothesis
from verification.fuzz.decoding import (
    decode_both_ways,
    decode_content,
    decode_headers,
    decode_message,
    decode_moves,
)
from verification.fuzz.grammar import (
    TO_INSPECTOR,
    TO_PUBLISHER,
    TO_RANK,
    TO_RECEIVER,
    TO_SENDER,
    TO_SUBSCRIBER,
    conversation,
)
from verification.fuzz.headers import TO_CLIENT, TO_SERVER, message_parts
from verification.fuzz.steps import CASES, cases
from verification.fuzz.targets import TO_DECODER

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

OF_RECORDS = (TO_RECEIVER, TO_SENDER, TO_INSPECTOR, TO_PUBLISHER, TO_SUBSCRIBER, TO_RANK)
KINDS = (*OF_RECORDS, TO_SERVER, TO_CLIENT, TO_DECODER)

ways = pytest.mark.parametrize("to", OF_RECORDS)


@ways
@settings(database=None, print_blob=True)
@given(data=st.data())
def test_every_generated_record_is_decoded_or_refused_within_bounds(to: str, data: st.DataObject) -> None:
    for step in conversation(FromHypothesis(data), to).steps:
        decode_both_ways(step.data)
        for message in step.messages:
            decode_moves(message)


@pytest.mark.parametrize("to", [TO_SERVER, TO_CLIENT])
@settings(database=None, print_blob=True)
@given(data=st.data())
def test_every_generated_header_is_decoded_or_refused_within_bounds(to: str, data: st.DataObject) -> None:
    for step in conversation(FromHypothesis(data), to).steps:
        decode_headers(step.data)


@settings(database=None, print_blob=True)
@given(data=st.data())
def test_every_generated_message_is_decoded_or_refused_within_bounds(data: st.DataObject) -> None:
    decode_message(message_parts(FromHypothesis(data)))


@settings(database=None, print_blob=True)
@given(data=st.data())
def test_every_generated_content_is_decoded_or_refused_within_bounds(data: st.DataObject) -> None:
    decode_content(any_content(FromHypothesis(data)))


@settings(database=None, print_blob=True)
@given(data=st.binary(max_size=300), buffer=st.binary(max_size=20))
def test_any_bytes_are_decoded_or_refused_within_bounds(data: bytes, buffer: bytes) -> None:
    decode_content(data)
    decode_headers(data)
    decode_moves(data)
    decode_message([data])
    decode_message([data, buffer])


def test_every_recorded_case_is_replayed_for_one_kind_of_peer() -> None:
    replayed = [name for to in KINDS for name in cases(to)]
    assert sorted(replayed) == sorted(path.stem for path in CASES.iterdir())
    assert len(replayed) > 20


def test_recorded_cases_do_not_harm_the_decoder_of_messages() -> None:
    for said in cases(TO_DECODER).values():
        for step in said.steps:
            decode_headers(step.data)
            decode_message([step.data, *map(bytes.fromhex, step.parts)])


@ways
@settings(database=None, print_blob=True)
@given(source=st.binary(max_size=800))
def test_a_conversation_is_determined_by_its_bytes(to: str, source: bytes) -> None:
    said = conversation(FromBytes(source), to)
    assert conversation(FromBytes(source), to) == said
    for step in said.steps:
        decode_both_ways(step.data)
