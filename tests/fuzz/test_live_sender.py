"""Rogues where a sender looks for its receiver: its waits end, and the next receiver is served in full."""

from functools import partial

import pytest

from tests.fuzz.grammar import TO_SENDER
from tests.fuzz.live_sender import live_sender
from tests.fuzz.living import listening

_GROWTH_KIB = 1024  # of tensors it is one for each example: 15 MiB


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_sender_survives_whatever_it_is_answered_and_serves_the_next_receiver(uvloop: bool) -> None:
    with listening("unix", partial(live_sender, uvloop=uvloop)) as sender:
        sender.explore(TO_SENDER, warm_up=8, examples=20, growth_kib=_GROWTH_KIB)
        assert sender.live.cut_off
        assert sender.live.outcomes["PeerLostError"]
        assert sender.live.honest_tensors > 8 * sender.live.conversations


def test_what_harmed_a_sender_once_does_so_no_more() -> None:
    with listening("unix", partial(live_sender, uvloop=True)) as sender:
        sender.replay(TO_SENDER, times=1)
