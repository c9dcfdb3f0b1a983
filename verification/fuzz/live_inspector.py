"""Rogue receivers for inspectors in a separate process, each followed by an honest receiver."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiotensor import PeerLostError, ProtocolError, TensorReceiver
from aiotensor.inspection import PublisherInspection, inspect
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.children import child_process, look, watch
from verification.fuzz.engine import Figures
from verification.fuzz.listening import answer, waiting_at
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things
from verification.processes import peers

__all__ = ["INSPECTED", "LiveInspector", "inspect_once", "live_inspector"]

INSPECTED = "inspected"

_PATIENCE_S = 20  # for steps of milliseconds; a slower inspector hangs


async def inspect_once(address: Endpoint) -> str:
    """Inspect a receiver or publisher, and return the outcome; raise errors that neither may cause."""
    try:
        inspection = await inspect(str(address), patience_s=_PATIENCE_S / 4)
    except (PeerLostError, ProtocolError) as error:
        return type(error).__name__
    if isinstance(inspection, PublisherInspection):
        return "publisher inspected"
    ids = [sender.sender for sender in inspection.senders]
    assert len(ids) == len(set(ids))
    return INSPECTED if all(sender.statistics for sender in inspection.senders) else "no replies"


async def _inspect(state: peers.State) -> str:
    return await inspect_once(state.endpoint)


class LiveInspector:
    """An inspector, as seen by its receivers."""

    def __init__(self, address: Endpoint, child: peers.Peer, things: Things) -> None:
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._child = child
        self._things = things

    async def hear(self, conversation: Conversation) -> None:
        """Inspect a rogue receiver from the child, and check that it can inspect the next one."""
        async with asyncio.timeout(_PATIENCE_S):
            with waiting_at(self._address) as listener:
                inspecting = self._child.start(_inspect)
                await answer(listener, conversation, self._things)
            self.outcomes[await inspecting] += 1
            async with TensorReceiver(self._address):
                assert await self._child.call(_inspect) == INSPECTED

    async def look(self) -> Figures:
        """Check for errors, and measure the held resources."""
        seen = await self._child.call(look)
        assert not seen.troubles, "\n".join(seen.troubles)
        return seen.figures

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        outcomes = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
        return f"inspections of rogues: {outcomes}"


@asynccontextmanager
async def live_inspector(address: Endpoint, *, uvloop: bool) -> AsyncIterator[LiveInspector]:
    """Start a process for inspectors."""
    async with child_process(address, uvloop=uvloop) as child:
        await child.call(watch)
        with Things() as things:
            yield LiveInspector(address, child, things)
