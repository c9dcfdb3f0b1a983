"""Somebody alive who hears rogues, as the tests run them."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Generic, Protocol, TypeVar

from aiotensor.transports.endpoints import Endpoint
from tests.fuzz.engine import Figures
from tests.fuzz.exploring import explore, said_at_random, telling
from tests.fuzz.steps import Conversation, cases
from tests.pairs import endpoint

__all__ = ["Listening", "Live", "listening"]


class Live(Protocol):
    """What all who are alive have in common."""

    @property
    def summary(self) -> str:
        """Say what was done."""

    async def hear(self, conversation: Conversation) -> None:
        """Hear a rogue, then be seen to serve the honest."""

    async def look(self) -> Figures:
        """See that nothing went wrong, and measure what is held."""


L = TypeVar("L", bound=Live)


class Listening(Generic[L]):
    """One that is alive, and the loop of those who talk to it."""

    def __init__(self, runner: asyncio.Runner, live: L) -> None:
        self._runner = runner
        self.live = live

    def look(self) -> Figures:
        """See that nothing went wrong, and measure what is held."""
        return self._runner.run(self.live.look())

    def hear(self, said: Conversation) -> None:
        """Have it hear one conversation."""
        self._runner.run(self.live.hear(said))

    def explore(self, to: str, *, warm_up: int, examples: int, growth_kib: int) -> None:
        """Have it hear conversations of every kind, and see that it has not grown by them."""
        source = random.Random(0)
        for _ in range(warm_up):
            telling(said_at_random(to, source), self.hear)
        before = self.look()
        explore(to, examples, self.hear)
        grown = self.look().grown(before, growth_kib)
        assert not grown, ", ".join(grown)

    def replay(self, to: str, *, times: int) -> None:
        """Have it hear what harmed somebody once."""
        for said in cases(to).values():
            for _ in range(times):
                telling(said, self.hear)
            self.look()


@contextmanager
def listening(
    link: str, start: Callable[[Endpoint], AbstractAsyncContextManager[L]]
) -> Iterator[Listening[L]]:
    """Start one on a link."""
    with asyncio.Runner() as runner, endpoint(link) as place:
        living = start(place)
        live = runner.run(living.__aenter__())
        try:
            yield Listening(runner, live)
        except BaseException as error:
            runner.run(living.__aexit__(type(error), error, error.__traceback__))
            raise
        runner.run(living.__aexit__(None, None, None))
