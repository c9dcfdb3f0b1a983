"""Rogue receivers for a sender in a separate process, each followed by an honest receiver."""

import asyncio
import contextlib
from collections import Counter
from functools import partial

from aiotensor import TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz import api
from verification.fuzz.children import ConnectingChild, connecting_child
from verification.fuzz.engine import listed
from verification.fuzz.listening import answering_at
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


class LiveSender(ConnectingChild):
    """A sender, as seen by its receivers."""

    def __init__(self, address: Endpoint, child: peers.Peer, things: Things) -> None:
        super().__init__(address, child, things)
        self.conversations = self.honest_tensors = 0

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue receiver for a new sender, and check that the next receiver gets every tensor."""
        async with asyncio.timeout(_PATIENCE_S):
            with answering_at(self._address, self._things) as answer:
                await self._child.call(_open)
                working = self._child.start(_work)
                await answer(conversation)
            self.conversations += 1
            async with TensorReceiver(self._address) as honest:
                taking = asyncio.create_task(self._take(honest))
                self.outcomes += await working
                await self._child.call(_work)
                await self._child.call(_check)
                taking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await taking

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return (
            f"{self.cut_off} receivers cut off, {self.honest_tensors} honest tensors in between; "
            f"sends to rogues and their successors: {listed(self.outcomes)}"
        )

    async def _take(self, receiver: TensorReceiver) -> None:
        async for delivery in receiver:
            assert api.is_whole(delivery.tensor)
            self.honest_tensors += 1
            del delivery


live_sender = partial(connecting_child, LiveSender)
