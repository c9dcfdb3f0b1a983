"""Hypothesis makes conversations; one that harms somebody is told in the form in which it can be kept."""

import random
from collections.abc import Callable

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.choosers import FromBytes, FromHypothesis
from tests.fuzz.grammar import conversation
from tests.fuzz.steps import Conversation

__all__ = ["explore", "said_at_random", "telling"]

_BYTES = 800  # more than most conversations use up


def explore(to: str, examples: int, hear: Callable[[Conversation], None]) -> None:
    """Have conversations heard that hypothesis makes."""

    # It is not shrunk: who was harmed once would be harmed by whatever it hears next.
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def one(data: st.DataObject) -> None:
        said = conversation(FromHypothesis(data), to)
        telling(said, hear)

    one()


def telling(said: Conversation, hear: Callable[[Conversation], None]) -> None:
    """Have a conversation heard, and add it to whatever error comes of it."""
    try:
        hear(said)
    except BaseException as error:
        error.add_note(f"to be kept in tests/fuzz/cases: {msgspec.json.encode(said).decode()}")
        raise


def said_at_random(to: str, source: random.Random) -> Conversation:
    """Make a conversation of random bytes."""
    return conversation(FromBytes(source.randbytes(_BYTES)), to)
