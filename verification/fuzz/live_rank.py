"""Rogue ranks for pipes in a separate process, with two honest ranks beside them."""

import asyncio
import zlib
from functools import partial

import msgspec

from aiotensor.ranks.entries import Entry
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.children import ConnectingChild, connecting_child
from verification.fuzz.engine import listed
from verification.fuzz.joining import RANKS, address_of, entry_of, joining, store_with
from verification.fuzz.piping import HonestRanks, Used, honest_ranks, on_other_machines, use
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things
from verification.processes import peers

__all__ = ["LiveRank", "live_rank", "rank_for"]

_PATIENCE_S = 20  # for steps of milliseconds; a slower pipe hangs

_HONEST = "honest ranks"
_LEFT = "the rogue has left"
_STORE = "store"
_TROUBLES = "troubles"


def rank_for(conversation: Conversation) -> int:
    """Return the rank of the rogue, which decides which end listens; the same for the same conversation."""
    return zlib.crc32(msgspec.json.encode(conversation)) % RANKS


async def _prepare(state: peers.State) -> None:
    if _HONEST not in state.others:
        if str(state.endpoint).startswith("tcp://"):
            state.stack.enter_context(on_other_machines())
        state.others[_HONEST] = await state.stack.enter_async_context(honest_ranks())


async def _use(state: peers.State, entry: Entry, rank: int) -> Used:
    """Open a pipe to a rogue with this entry and rank, and use it until the rogue is gone."""
    state.others[_LEFT] = asyncio.Event()
    state.others[_STORE] = store = store_with(entry, rank)
    return await use(store, 1 - rank, state.others[_LEFT], state.others[_TROUBLES])


async def _address(state: peers.State, rank: int) -> Entry | None:
    return await address_of(state.others[_STORE], rank)


async def _leave(state: peers.State) -> None:
    state.others[_LEFT].set()


async def _exchange(state: peers.State) -> None:
    honest: HonestRanks = state.others[_HONEST]
    await honest.exchange()


class LiveRank(ConnectingChild):
    """A rank, as seen by the other one."""

    def __init__(self, address: Endpoint, child: peers.Peer, things: Things) -> None:
        super().__init__(address, child, things)
        self.conversations = self.taken_in_memory = 0

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue rank for a new pipe, and check that two honest ranks are not disturbed."""
        async with asyncio.timeout(_PATIENCE_S):
            await self._child.call(_prepare)
            rank = rank_for(conversation)
            async with joining(str(self._address), rank, self._things) as talk:
                using = self._child.start(_use, entry_of(str(self._address), rank), rank)
                entry = await self._child.call(_address, 1 - rank) if rank else None
                await talk(entry, conversation)
            self.conversations += 1
            await self._child.call(_leave)
            await self._child.call(_exchange)
            used = await using
            self.outcomes += used.outcomes
            self.taken_in_memory += used.in_memory

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return (
            f"{self.cut_off} ranks cut off, {self.taken_in_memory} tensors of rogues in shared memory; "
            f"calls: {listed(self.outcomes)}"
        )


live_rank = partial(connecting_child, LiveRank)
