"""Rogues where a sender looks for its receiver: its waits end, and the next receiver is served in full."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fuzz.exploring import explore, said_at_random, telling
from tests.fuzz.grammar import TO_SENDER
from tests.fuzz.live_sender import LiveSender, live_sender
from tests.fuzz.steps import Conversation, cases
from tests.pairs import endpoint

_WARM_UP = 8
_EXAMPLES = 20
_GROWTH_KIB = (
    15_000  # each sender has a thread, with an allocator's arena; of tensors it is one for each example
)


@contextmanager
def _running(*, uvloop: bool) -> Iterator[tuple[asyncio.Runner, LiveSender]]:
    with asyncio.Runner() as runner, endpoint("unix") as address:
        living = live_sender(str(address), uvloop=uvloop)
        running = runner.run(living.__aenter__())
        try:
            yield runner, running
        except BaseException as error:
            runner.run(living.__aexit__(type(error), error, error.__traceback__))
            raise
        runner.run(living.__aexit__(None, None, None))


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_sender_survives_whatever_it_is_answered_and_serves_the_next_receiver(uvloop: bool) -> None:
    with _running(uvloop=uvloop) as (runner, sender):

        def hear(said: Conversation) -> None:
            runner.run(sender.hear(said))

        source = random.Random(0)
        for _ in range(_WARM_UP):
            telling(said_at_random(TO_SENDER, source), hear)
        before = runner.run(sender.look())
        explore(TO_SENDER, _EXAMPLES, hear)
        after = runner.run(sender.look())
        assert not after.grown(before, _GROWTH_KIB)
        assert sender.cut_off
        assert sender.outcomes["PeerLostError"]
        assert sender.honest_tensors > 8 * sender.conversations


def test_what_harmed_a_sender_once_does_so_no_more() -> None:
    with _running(uvloop=True) as (runner, sender):
        for said in cases(TO_SENDER).values():
            telling(said, lambda said: runner.run(sender.hear(said)))
            runner.run(sender.look())
