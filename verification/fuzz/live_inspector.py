"""Rogue receivers for inspectors in a separate process, each followed by an honest receiver."""

import asyncio
from functools import partial

from aiotensor import PeerLostError, ProtocolError, TensorReceiver
from aiotensor.inspection import PublisherInspection, inspect
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.children import ConnectingChild, connecting_child
from verification.fuzz.engine import listed
from verification.fuzz.listening import answering_at
from verification.fuzz.steps import Conversation
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
    return INSPECTED


async def _inspect(state: peers.State) -> str:
    return await inspect_once(state.endpoint)


class LiveInspector(ConnectingChild):
    """An inspector, as seen by its receivers."""

    async def hear(self, conversation: Conversation) -> None:
        """Inspect a rogue receiver from the child, and check that it can inspect the next one."""
        async with asyncio.timeout(_PATIENCE_S):
            with answering_at(self._address, self._things) as answer:
                inspecting = self._child.start(_inspect)
                await answer(conversation)
            self.outcomes[await inspecting] += 1
            async with TensorReceiver(self._address):
                assert await self._child.call(_inspect) == INSPECTED

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return f"inspections of rogues: {listed(self.outcomes)}"


live_inspector = partial(connecting_child, LiveInspector)
