"""A subscriber with rogue publishers: its waits end, and it receives everything of the next publisher."""

from functools import partial

import pytest

from verification.fuzz.grammar import TO_SUBSCRIBER
from verification.fuzz.live_subscriber import live_subscriber
from verification.fuzz.living import listening
from verification.fuzz.steps import cases

_GROWTH_KIB = 1024

links = pytest.mark.parametrize("link", ["tcp", "unix"])


@pytest.mark.parametrize(("link", "loop"), [("tcp", "asyncio"), ("unix", "uvloop")])
def test_a_subscriber_survives_invalid_publishers_and_is_served_by_the_next_one(link: str, loop: str) -> None:
    with listening(link, partial(live_subscriber, uvloop=loop == "uvloop")) as subscriber:
        subscriber.explore(TO_SUBSCRIBER, warm_up=40, examples=60, growth_kib=_GROWTH_KIB)
        assert subscriber.live.cut_off
        assert subscriber.live.taken_in_memory
        for outcome in ("received", "PeerLostError", "ProtocolError"):
            assert subscriber.live.outcomes[outcome], outcome


@links
def test_recorded_cases_do_not_harm_a_subscriber(link: str) -> None:
    with listening(link, partial(live_subscriber, uvloop=True)) as subscriber:
        subscriber.replay(TO_SUBSCRIBER, times=2)  # the second run shows leftovers of the first


@pytest.mark.parametrize(
    ("name", "outcomes", "is_cut_off"),
    [
        ("publications-whose-bytes-never-came", {"received": 1, "PeerLostError": 1}, True),
        ("a-block-freed-and-moved-again-under-its-tensor", {"received": 3, "PeerLostError": 1}, False),
        ("segments-of-no-bytes", {"PeerLostError": 1}, True),
        ("a-segment-of-many-addresses", {"received": 2, "PeerLostError": 1}, False),
        ("steps-to-a-segment-that-was-detached", {"received": 1, "PeerLostError": 1}, True),
        ("a-publisher-of-another-version-of-the-moves", {"UsageError": 1}, False),
    ],
)
def test_a_subscriber_of_another_machine_raises_documented_errors(
    name: str, outcomes: dict[str, int], is_cut_off: bool
) -> None:
    with listening("tcp", partial(live_subscriber, uvloop=True)) as subscriber:
        subscriber.hear(cases(TO_SUBSCRIBER)[name])
        subscriber.look()
        assert subscriber.live.outcomes == outcomes
        assert bool(subscriber.live.cut_off) == is_cut_off
