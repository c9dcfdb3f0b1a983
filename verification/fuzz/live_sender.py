"""Rogue receivers for a sender in a separate process, each followed by an honest receiver."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiotensor import TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from verification import loops
from verification.fuzz import api
from verification.fuzz.engine import Figures, Troubles, figures
from verification.fuzz.listening import answer, waiting_at
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things
from verification.processes import peers

__all__ = ["LiveSender", "live_sender"]

_PATIENCE_S = 20  # for steps of milliseconds; a slower sender hangs

_troubles: list[Troubles] = []  # of the child


async def _start(state: peers.State) -> None:
    _troubles.append(Troubles())
    _troubles[-1].watch()


async def _open(state: peers.State) -> None:
    sender = TensorSender(state.endpoint, api.PERMITS, api.ARENA_BYTES)
    state.senders[:] = [await sender.__aenter__()]


async def _work(state: peers.State) -> Counter[str]:
    return await api.work(state.sender)


async def _check(state: peers.State) -> None:
    await api.check_all_is_back(state.sender)
    await state.sender.aclose()


async def _look(state: peers.State) -> tuple[Figures, list[str], int]:
    state.senders.clear()
    return figures(), _troubles[-1].found, _troubles[-1].cut_off


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
        held, troubles, self.cut_off = await self._child.call(_look)
        assert not troubles, "\n".join(troubles)
        return held

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
    child = peers.Peer(address, kind=loops.Kind("uvloop" if uvloop else "asyncio", "plain"))
    try:
        await child.call(_start)
        with Things() as things:
            yield LiveSender(address, child, things)
        assert await child.finish() == 0
    finally:
        await child.close()
