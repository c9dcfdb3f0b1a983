"""A subscriber with rogue publishers: its waits end, and it receives everything of the next publisher."""

from functools import partial

import pytest

from verification.fuzz.grammar import TO_SUBSCRIBER
from verification.fuzz.live_subscriber import live_subscriber
from verification.fuzz.living import listening

_GROWTH_KIB = 1024


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_subscriber_survives_invalid_publishers_and_is_served_by_the_next_one(uvloop: bool) -> None:
    with listening("unix", partial(live_subscriber, uvloop=uvloop)) as subscriber:
        subscriber.explore(TO_SUBSCRIBER, warm_up=40, examples=60, growth_kib=_GROWTH_KIB)
        assert subscriber.live.cut_off
        assert subscriber.live.taken_in_memory
        for outcome in ("received", "PeerLostError", "ProtocolError"):
            assert subscriber.live.outcomes[outcome], outcome


def test_recorded_cases_do_not_harm_a_subscriber() -> None:
    with listening("unix", partial(live_subscriber, uvloop=True)) as subscriber:
        subscriber.replay(TO_SUBSCRIBER, times=2)  # the second run shows leftovers of the first
