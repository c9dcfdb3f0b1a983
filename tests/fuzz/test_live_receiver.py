"""Rogues of every kind at a receiver: it goes on, it keeps nothing of theirs, and it serves the honest."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fuzz.exploring import explore, said_at_random, telling
from tests.fuzz.grammar import TO_RECEIVER
from tests.fuzz.live_receiver import LiveReceiver, live_receiver
from tests.fuzz.steps import Conversation, cases
from tests.pairs import endpoint

_WARM_UP = 40
_EXAMPLES = 60
_GROWTH_KIB = 6144  # of an allocator that has not met every size in its warm-up

links = pytest.mark.parametrize("link", ["queue", "unix"])


@contextmanager
def _running(link: str, *, uvloop: bool) -> Iterator[tuple[asyncio.Runner, LiveReceiver]]:
    with asyncio.Runner() as runner, endpoint(link) as place:
        living = live_receiver(place, uvloop=uvloop)
        running = runner.run(living.__aenter__())
        try:
            yield runner, running
        except BaseException as error:
            runner.run(living.__aexit__(type(error), error, error.__traceback__))
            raise
        runner.run(living.__aexit__(None, None, None))


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
@links
def test_a_receiver_survives_whatever_it_is_told_and_keeps_nothing_of_it(link: str, uvloop: bool) -> None:
    with _running(link, uvloop=uvloop) as (runner, receiver):

        def hear(said: Conversation) -> None:
            runner.run(receiver.hear(said))

        source = random.Random(0)
        for _ in range(_WARM_UP):
            telling(said_at_random(TO_RECEIVER, source), hear)
        before = runner.run(receiver.look())
        explore(TO_RECEIVER, _EXAMPLES, hear)
        after = runner.run(receiver.look())
        assert not after.grown(before, _GROWTH_KIB)
        assert receiver.cut_off
        assert receiver.taken_in_memory


@links
def test_what_harmed_a_receiver_once_does_so_no_more(link: str) -> None:
    with _running(link, uvloop=True) as (runner, receiver):
        for said in cases(TO_RECEIVER).values():
            for _ in range(2):  # so that what the first one left is seen too
                telling(said, lambda said: runner.run(receiver.hear(said)))
            runner.run(receiver.look())
