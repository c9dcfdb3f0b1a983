"""Rogue publishers for subscribers in a separate process, each followed by an honest publisher."""

import asyncio
from functools import partial

from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.children import ConnectingChild, connecting_child
from verification.fuzz.engine import listed
from verification.fuzz.listening import answering_at
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


class LiveSubscriber(ConnectingChild):
    """A subscriber, as seen by its publishers."""

    def __init__(self, address: Endpoint, child: peers.Peer, things: Things) -> None:
        super().__init__(address, child, things)
        self.conversations = self.taken_in_memory = 0

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue publisher for a new subscriber, which receives everything of the next one."""
        async with asyncio.timeout(_PATIENCE_S):
            with answering_at(self._address, self._things) as answer:
                await self._child.call(_open)
                receiving = self._child.start(_receive)
                await answer(conversation)
            self.conversations += 1
            async with Publisher(self._address) as honest:
                await publish_rightly(honest)
                received = await receiving
            self.outcomes += received.outcomes
            self.taken_in_memory += received.taken_in_memory
            await self._child.call(_close)

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return (
            f"{self.cut_off} publishers cut off, {HONEST * self.conversations} honest publications in "
            f"between, {self.taken_in_memory} tensors of rogues in shared memory; "
            f"receives: {listed(self.outcomes)}"
        )


live_subscriber = partial(connecting_child, LiveSubscriber)
