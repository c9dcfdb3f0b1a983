"""A pipe with rogue ranks: its waits end with documented errors, and other pipes are not disturbed."""

from functools import partial

import pytest

from verification.fuzz.grammar import TO_RANK
from verification.fuzz.live_rank import live_rank
from verification.fuzz.living import listening
from verification.fuzz.piping import RECEIVED

_MORE = 5
_GROWTH_KIB = 1024

OUTCOMES = ("opened", RECEIVED, "sent", "drained", "receive: PeerLostError", "PeerLostError while opening")


@pytest.mark.parametrize(("link", "loop"), [("tcp", "asyncio"), ("unix", "uvloop")])
def test_a_pipe_survives_an_invalid_rank_and_harms_no_other_pipe(link: str, loop: str) -> None:
    with listening(link, partial(live_rank, uvloop=loop == "uvloop")) as rank:
        rank.explore(TO_RANK, warm_up=40, examples=60, growth_kib=_GROWTH_KIB)
        for _ in range(_MORE):  # few rogues acknowledge everything
            if all(rank.live.outcomes[outcome] for outcome in OUTCOMES):
                break
            rank.explore(TO_RANK, warm_up=0, examples=60, growth_kib=_GROWTH_KIB)
        assert rank.live.cut_off
        assert rank.live.taken_in_memory
        for outcome in OUTCOMES:
            assert rank.live.outcomes[outcome], outcome
