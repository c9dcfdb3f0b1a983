"""A sender with rogue receivers: its waits end, and the next receiver gets every tensor."""

from functools import partial

import pytest

from verification.fuzz.grammar import TO_SENDER
from verification.fuzz.live_sender import live_sender
from verification.fuzz.living import listening

_GROWTH_KIB = 1024  # of tensors it is one for each example: 15 MiB


links = pytest.mark.parametrize("link", ["tcp", "unix"])

# Seven of the tensors after each conversation are not discarded. On one machine the receiver usually takes
# the eighth before it is discarded.
LEAST = {"tcp": 7, "unix": 8}


@pytest.mark.parametrize(("link", "loop"), [("tcp", "asyncio"), ("unix", "uvloop")])
def test_a_sender_survives_invalid_receivers_and_serves_the_next_one(link: str, loop: str) -> None:
    with listening(link, partial(live_sender, uvloop=loop == "uvloop")) as sender:
        sender.explore(TO_SENDER, warm_up=8, examples=20, growth_kib=_GROWTH_KIB)
        assert sender.live.cut_off
        assert sender.live.outcomes["PeerLostError"]
        assert sender.live.honest_tensors > LEAST[link] * sender.live.conversations


@links
def test_recorded_cases_do_not_harm_a_sender(link: str) -> None:
    with listening(link, partial(live_sender, uvloop=True)) as sender:
        sender.replay(TO_SENDER, times=1)
