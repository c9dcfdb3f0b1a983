"""Live targets of rogues, for tests without a running event loop."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Generic, Protocol, TypeVar

from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.engine import Figures
from verification.fuzz.exploring import explore, said_at_random, telling
from verification.fuzz.steps import CASES, Conversation, cases
from verification.places import endpoint

__all__ = ["Listening", "Live", "listening"]


class Live(Protocol):
    """The common interface of all live targets."""

    @property
    def summary(self) -> str:
        """Return a summary of the run."""

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue's conversation, and check that the target still serves honest peers."""

    async def look(self) -> Figures:
        """Check for errors, and measure the held resources."""


L = TypeVar("L", bound=Live)


class Listening(Generic[L]):
    """A live target, and the event loop of its peers."""

    def __init__(self, runner: asyncio.Runner, live: L) -> None:
        self._runner = runner
        self.live = live

    def look(self) -> Figures:
        """Check for errors, and measure the held resources."""
        return self._runner.run(self.live.look())

    def hear(self, said: Conversation) -> None:
        """Run one conversation."""
        self._runner.run(self.live.hear(said))

    def explore(self, to: str, *, warm_up: int, examples: int, growth_kib: int) -> None:
        """Run conversations of every kind, and check that the target has not grown."""
        source = random.Random(0)
        for _ in range(warm_up):
            telling(said_at_random(to, source), self.hear)
        before = self.look()
        explore(to, examples, self.hear)
        grown = self.look().grown(before, growth_kib)
        assert not grown, ", ".join(grown)

    def replay(self, to: str, *, times: int) -> None:
        """Run the recorded cases."""
        recorded = cases(to)
        assert recorded, f"there is no recorded case in {CASES}"
        for said in recorded.values():
            for _ in range(times):
                telling(said, self.hear)
            self.look()


@contextmanager
def listening(
    link: str, start: Callable[[Endpoint], AbstractAsyncContextManager[L]]
) -> Iterator[Listening[L]]:
    """Start a target on a link."""
    with asyncio.Runner() as runner, endpoint(link) as place:
        living = start(place)
        live = runner.run(living.__aenter__())
        try:
            yield Listening(runner, live)
        except BaseException as error:
            runner.run(living.__aexit__(type(error), error, error.__traceback__))
            raise
        runner.run(living.__aexit__(None, None, None))
