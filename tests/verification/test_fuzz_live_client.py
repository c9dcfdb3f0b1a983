"""A client with rogue servers: its requests end, and the next server serves it."""

from functools import partial

import pytest

from verification.fuzz.headers import TO_CLIENT
from verification.fuzz.live_client import live_client
from verification.fuzz.living import listening

_GROWTH_KIB = 4096  # of queues of ZeroMQ, one for each connection: 1 MiB was seen


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_client_survives_invalid_servers_and_is_served_by_the_next_one(uvloop: bool) -> None:
    with listening("unix", partial(live_client, uvloop=uvloop)) as client:
        client.explore(TO_CLIENT, warm_up=4, examples=6, growth_kib=_GROWTH_KIB)
        assert client.live.cut_off
        assert client.live.outcomes["PeerLostError"]
        assert client.live.outcomes["answered"]


def test_recorded_cases_do_not_harm_a_client() -> None:
    with listening("unix", partial(live_client, uvloop=True)) as client:
        client.replay(TO_CLIENT, times=1)
