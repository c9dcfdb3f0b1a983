"""Rogue publishers for subscribers in a separate process, each followed by an honest publisher."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.children import child_process, look, watch
from verification.fuzz.engine import Figures
from verification.fuzz.listening import answer, waiting_at
from verification.fuzz.notes import Note
from verification.fuzz.receiving import HONEST, Received, publish_rightly, receive_all
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things
from verification.processes import peers

__all__ = ["LiveSubscriber", "live_subscriber"]

_PATIENCE_S = 20  # for steps of milliseconds; a slower subscriber hangs

_SUBSCRIBER = "subscriber"
_TROUBLES = "troubles"


async def _open(state: peers.State) -> None:
    state.others[_SUBSCRIBER] = await Subscriber(state.endpoint, Note).__aenter__()


async def _receive(state: peers.State) -> Received:
    subscriber: Subscriber[Note] = state.others[_SUBSCRIBER]
    return await receive_all(subscriber, state.others[_TROUBLES])


async def _close(state: peers.State) -> None:
    subscriber: Subscriber[Note] = state.others.pop(_SUBSCRIBER)
    await subscriber.aclose()
    now = subscriber.statistics()
    assert (now.leases, now.unclaimed, now.mapped_bytes, now.waiting) == (0, 0, 0, 0), now


class LiveSubscriber:
    """A subscriber, as seen by its publishers."""

    def __init__(self, address: Endpoint, child: peers.Peer, things: Things) -> None:
        self.conversations = self.cut_off = self.taken_in_memory = 0
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._child = child
        self._things = things

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue publisher for a new subscriber, which receives everything of the next one."""
        async with asyncio.timeout(_PATIENCE_S):
            with waiting_at(self._address) as listener:
                await self._child.call(_open)
                receiving = self._child.start(_receive)
                await answer(listener, conversation, self._things)
            self.conversations += 1
            async with Publisher(self._address) as honest:
                await publish_rightly(honest)
                received = await receiving
            self.outcomes += received.outcomes
            self.taken_in_memory += received.taken_in_memory
            await self._child.call(_close)

    async def look(self) -> Figures:
        """Check for errors, and measure the held resources."""
        seen = await self._child.call(look)
        assert not seen.troubles, "\n".join(seen.troubles)
        self.cut_off = seen.cut_off
        return seen.figures

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return (
            f"{self.cut_off} publishers cut off, {HONEST * self.conversations} honest publications in "
            f"between, {self.taken_in_memory} tensors of rogues in shared memory; receives: {outcomes}"
        )


@asynccontextmanager
async def live_subscriber(address: Endpoint, *, uvloop: bool) -> AsyncIterator[LiveSubscriber]:
    """Start a process for subscribers."""
    async with child_process(address, uvloop=uvloop) as child:
        await child.call(watch)
        with Things() as things:
            yield LiveSubscriber(address, child, things)
