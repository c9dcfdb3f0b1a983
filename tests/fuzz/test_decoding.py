"""Any bytes are frames or refused, soon and in little memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.choosers import FromBytes, FromHypothesis
from tests.fuzz.decoding import decode_both_ways
from tests.fuzz.grammar import TO_RECEIVER, TO_SENDER, conversation

ways = pytest.mark.parametrize("to", [TO_RECEIVER, TO_SENDER])


@ways
@settings(deadline=None, database=None, print_blob=True)
@given(data=st.data())
def test_every_record_of_a_rogue_is_frames_or_refused_in_bounds(to: str, data: st.DataObject) -> None:
    for step in conversation(FromHypothesis(data), to).steps:
        decode_both_ways(step.data)


@ways
@settings(deadline=None, database=None, print_blob=True)
@given(source=st.binary(max_size=800))
def test_bytes_that_decide_a_conversation_do_so_for_ever(to: str, source: bytes) -> None:
    said = conversation(FromBytes(source), to)
    assert conversation(FromBytes(source), to) == said
    for step in said.steps:
        decode_both_ways(step.data)
