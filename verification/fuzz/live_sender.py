"""Rogue receivers for a sender in a separate process, each followed by an honest receiver."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiotensor import TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz import api
from verification.fuzz.children import child_process, look, watch
from verification.fuzz.engine import Figures
from verification.fuzz.listening import answer, waiting_at
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things
from verification.processes import peers

__all__ = ["LiveSender", "live_sender"]

_PATIENCE_S = 20  # for steps of milliseconds; a slower sender hangs


async def _open(state: peers.State) -> None:
    sender = TensorSender(state.endpoint, api.PERMITS, api.ARENA_BYTES)
    state.senders[:] = [await sender.__aenter__()]


async def _work(state: peers.State) -> Counter[str]:
    return await api.work(state.sender)


async def _check(state: peers.State) -> None:
    await api.check_all_is_back(state.sender)
    await state.sender.aclose()
    state.senders.clear()


class LiveSender:
    """A sender, as seen by its receivers."""

    def __init__(self, address: Endpoint, child: peers.Peer, things: Things) -> None:
        self.conversations = self.honest_tensors = self.cut_off = 0
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._child = child
        self._things = things

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue receiver for a new sender, and check that the next receiver gets every tensor."""
        async with asyncio.timeout(_PATIENCE_S):
            with waiting_at(self._address) as listener:
                await self._child.call(_open)
                working = self._child.start(_work)
                await answer(listener, conversation, self._things)
            self.conversations += 1
            async with TensorReceiver(self._address) as honest:
                taking = asyncio.create_task(self._take(honest))
                self.outcomes += await working
                await self._child.call(_work)
                await self._child.call(_check)
                taking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await taking

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
            f"{self.cut_off} receivers cut off, {self.honest_tensors} honest tensors in between; "
            f"sends to rogues and their successors: {outcomes}"
        )

    async def _take(self, receiver: TensorReceiver) -> None:
        async for delivery in receiver:
            assert api.is_whole(delivery.tensor)
            self.honest_tensors += 1
            del delivery


@asynccontextmanager
async def live_sender(address: Endpoint, *, uvloop: bool) -> AsyncIterator[LiveSender]:
    """Start a process for senders."""
    async with child_process(address, uvloop=uvloop) as child:
        await child.call(watch)
        with Things() as things:
            yield LiveSender(address, child, things)
