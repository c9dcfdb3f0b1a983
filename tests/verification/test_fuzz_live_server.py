"""A server with rogue clients: it continues, keeps none of their resources, and serves honest clients."""

from functools import partial

import pytest

from verification.fuzz.headers import TO_SERVER
from verification.fuzz.live_server import live_server
from verification.fuzz.living import listening

_GROWTH_KIB = 1024


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_server_survives_invalid_clients_and_keeps_nothing_of_them(uvloop: bool) -> None:
    with listening("unix", partial(live_server, uvloop=uvloop)) as server:
        server.explore(TO_SERVER, warm_up=15, examples=25, growth_kib=_GROWTH_KIB)
        assert server.live.cut_off
        assert server.live.heard > server.live.honest_answers


def test_recorded_cases_do_not_harm_a_server() -> None:
    with listening("unix", partial(live_server, uvloop=True)) as server:
        server.replay(TO_SERVER, times=2)  # the second run shows leftovers of the first
