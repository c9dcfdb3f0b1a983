"""Any bytes are frames or refused, soon and in little memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.choosers import FromBytes, FromHypothesis
from tests.fuzz.decoding import decode_both_ways, decode_headers, decode_message
from tests.fuzz.grammar import TO_CLIENT, TO_RECEIVER, TO_SENDER, TO_SERVER, conversation
from tests.fuzz.headers import message_parts
from tests.fuzz.steps import cases
from tests.fuzz.targets import TO_DECODER

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ways = pytest.mark.parametrize("to", [TO_RECEIVER, TO_SENDER])


@ways
@settings(deadline=None, database=None, print_blob=True)
@given(data=st.data())
def test_every_record_of_a_rogue_is_frames_or_refused_in_bounds(to: str, data: st.DataObject) -> None:
    for step in conversation(FromHypothesis(data), to).steps:
        decode_both_ways(step.data)


@pytest.mark.parametrize("to", [TO_SERVER, TO_CLIENT])
@settings(deadline=None, database=None, print_blob=True)
@given(data=st.data())
def test_every_header_of_a_rogue_is_read_or_refused_in_bounds(to: str, data: st.DataObject) -> None:
    for step in conversation(FromHypothesis(data), to).steps:
        decode_headers(step.data)


@settings(deadline=None, database=None, print_blob=True)
@given(data=st.data())
def test_every_message_of_a_rogue_is_read_or_refused_in_bounds(data: st.DataObject) -> None:
    decode_message(message_parts(FromHypothesis(data)))


@settings(deadline=None, database=None, print_blob=True)
@given(data=st.binary(max_size=300), buffer=st.binary(max_size=20))
def test_any_bytes_are_a_header_or_a_message_or_refused_in_bounds(data: bytes, buffer: bytes) -> None:
    decode_headers(data)
    decode_message([data])
    decode_message([data, buffer])


def test_what_harmed_the_decoder_of_messages_once_does_so_no_more() -> None:
    for said in cases(TO_DECODER).values():
        for step in said.steps:
            decode_headers(step.data)
            decode_message([step.data, *map(bytes.fromhex, step.parts)])


@ways
@settings(deadline=None, database=None, print_blob=True)
@given(source=st.binary(max_size=800))
def test_bytes_that_decide_a_conversation_do_so_for_ever(to: str, source: bytes) -> None:
    said = conversation(FromBytes(source), to)
    assert conversation(FromBytes(source), to) == said
    for step in said.steps:
        decode_both_ways(step.data)
