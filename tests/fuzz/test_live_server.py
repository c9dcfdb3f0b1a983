"""Rogues of every kind at a server: it goes on, it keeps nothing of theirs, and it answers the honest."""

from functools import partial

import pytest

from tests.fuzz.grammar import TO_SERVER
from tests.fuzz.live_server import live_server
from tests.fuzz.living import listening

_GROWTH_KIB = 1024


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_server_survives_whatever_it_is_asked_and_keeps_nothing_of_it(uvloop: bool) -> None:
    with listening("unix", partial(live_server, uvloop=uvloop)) as server:
        server.explore(TO_SERVER, warm_up=15, examples=25, growth_kib=_GROWTH_KIB)
        assert server.live.cut_off
        assert server.live.heard > server.live.honest_answers


def test_what_harmed_a_server_once_does_so_no_more() -> None:
    with listening("unix", partial(live_server, uvloop=True)) as server:
        server.replay(TO_SERVER, times=2)  # so that what the first one left is seen too
