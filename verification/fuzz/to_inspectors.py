"""Rogue receivers and publishers for inspectors, each followed by an honest receiver."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from aiotensor import PeerLostError, ProtocolError, TensorReceiver, UsageError
from aiotensor.inspection import inspect
from verification.fuzz.living import LiveConnector
from verification.processes import peers

_INSPECTED = "inspected"
_PATIENCE_S = 5  # for steps of milliseconds


async def _inspect(state: peers.State) -> Counter[str]:
    """Inspect once, and return the outcome; raise errors that no peer may cause."""
    try:
        inspection = await inspect(str(state.endpoint), patience_s=_PATIENCE_S)
    except (PeerLostError, ProtocolError, UsageError) as error:
        return Counter([type(error).__name__])
    if inspection.kind != "receiver":
        return Counter([inspection.kind])
    ids = [sender.sender for sender in inspection.senders]
    assert len(ids) == len(set(ids))
    return Counter([_INSPECTED])


class LiveInspector(LiveConnector):
    """Inspectors, as seen by the objects that they inspect."""

    work = staticmethod(_inspect)

    @contextlib.asynccontextmanager
    async def honest(self) -> AsyncIterator[None]:
        """Open a receiver."""
        async with TensorReceiver(self.address):
            yield

    async def finish(self) -> None:
        """Inspect the receiver."""
        assert await self.process.call(_inspect) == Counter([_INSPECTED])
