"""A receiver with rogue senders: it continues, keeps none of their resources, and serves honest senders."""

from functools import partial

import pytest

from verification.fuzz.grammar import TO_RECEIVER
from verification.fuzz.live_receiver import live_receiver
from verification.fuzz.living import listening

_GROWTH_KIB = 1024  # 60 to 300 are usual: it remembers who is gone

links = pytest.mark.parametrize("link", ["queue", "stock", "tcp", "unix"])


@pytest.mark.parametrize(
    ("link", "loop"), [("queue", "asyncio"), ("stock", "uvloop"), ("tcp", "asyncio"), ("unix", "uvloop")]
)
def test_a_receiver_survives_invalid_senders_and_keeps_nothing_of_them(link: str, loop: str) -> None:
    with listening(link, partial(live_receiver, uvloop=loop == "uvloop")) as receiver:
        receiver.explore(TO_RECEIVER, warm_up=40, examples=60, growth_kib=_GROWTH_KIB)
        assert receiver.live.cut_off
        assert receiver.live.taken_in_memory


@links
def test_recorded_cases_do_not_harm_a_receiver(link: str) -> None:
    with listening(link, partial(live_receiver, uvloop=True)) as receiver:
        receiver.replay(TO_RECEIVER, times=2)  # the second run shows leftovers of the first
