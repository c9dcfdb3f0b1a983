"""Rogues of every kind at a receiver: it goes on, it keeps nothing of theirs, and it serves the honest."""

from functools import partial

import pytest

from tests.fuzz.grammar import TO_RECEIVER
from tests.fuzz.live_receiver import live_receiver
from tests.fuzz.living import listening

_GROWTH_KIB = 1024  # 60 to 300 are usual: it remembers who is gone

links = pytest.mark.parametrize("link", ["queue", "unix"])


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
@links
def test_a_receiver_survives_whatever_it_is_told_and_keeps_nothing_of_it(link: str, uvloop: bool) -> None:
    with listening(link, partial(live_receiver, uvloop=uvloop)) as receiver:
        receiver.explore(TO_RECEIVER, warm_up=40, examples=60, growth_kib=_GROWTH_KIB)
        assert receiver.live.cut_off
        assert receiver.live.taken_in_memory


@links
def test_what_harmed_a_receiver_once_does_so_no_more(link: str) -> None:
    with listening(link, partial(live_receiver, uvloop=True)) as receiver:
        receiver.replay(TO_RECEIVER, times=2)  # so that what the first one left is seen too
