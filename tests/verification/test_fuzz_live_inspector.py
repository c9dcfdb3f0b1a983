"""An inspector with rogue receivers: every inspection ends, and the next receiver can be inspected."""

from functools import partial

import pytest

from verification.fuzz.grammar import TO_INSPECTOR
from verification.fuzz.live_inspector import INSPECTED, live_inspector
from verification.fuzz.living import listening

_GROWTH_KIB = 1024


@pytest.mark.parametrize(("link", "loop"), [("tcp", "asyncio"), ("unix", "uvloop")])
def test_an_inspector_survives_invalid_receivers_and_inspects_the_next_one(link: str, loop: str) -> None:
    with listening(link, partial(live_inspector, uvloop=loop == "uvloop")) as inspector:
        inspector.explore(TO_INSPECTOR, warm_up=40, examples=40, growth_kib=_GROWTH_KIB)
        assert inspector.live.outcomes[INSPECTED]
        assert inspector.live.outcomes["ProtocolError"]
        assert inspector.live.outcomes["PeerLostError"]
