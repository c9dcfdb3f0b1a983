"""Rogue senders for a receiver in a separate process, with an honest sender beside them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiotensor import TensorReceiver, TensorSender
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.children import child_process
from verification.fuzz.engine import Engine, Figures, figures, threads_started
from verification.fuzz.speaking import converse, heard, road_to
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things
from verification.internals import worker_of
from verification.patterns import BIG, pattern
from verification.processes import peers

__all__ = ["LiveReceiver", "live_receiver"]

_PATIENCE_S = 20  # for steps of milliseconds; a slower receiver hangs

_engines: list[Engine] = []  # of the child


async def _start(state: peers.State) -> None:
    receiver = await TensorReceiver(state.endpoint).__aenter__()
    state.receivers.append(receiver)
    _engines.append(Engine(receiver))
    _engines[-1].start()
    await threads_started(worker_of(receiver))


async def _trust(state: peers.State, sender: str) -> None:
    _engines[-1].honest.add(sender)


async def _settle(state: peers.State) -> Figures:
    await _engines[-1].settle()
    return figures()


async def _look(state: peers.State) -> tuple[list[str], int, int, int, int]:
    """Return the errors, and the numbers of tensors taken and links cut off."""
    engine = _engines[-1]
    troubles = engine.troubles
    return troubles.found, engine.taken, engine.taken_in_memory, engine.taken_honest, troubles.cut_off


class LiveReceiver:
    """A receiver, as seen by its senders."""

    def __init__(self, endpoint: Endpoint, child: peers.Peer, honest: TensorSender, things: Things) -> None:
        self.conversations = self.honest_tensors = self.cut_off = self.taken_in_memory = 0
        self._endpoint = endpoint
        self._child = child
        self._honest = honest
        self._things = things

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue's conversation, then send a valid tensor and wait until it is taken."""
        async with asyncio.timeout(_PATIENCE_S):
            with road_to(self._endpoint, self._things) as road:
                await converse(road, conversation)
            self.conversations += 1
            await self.serve_honest(BIG if self.conversations % 8 == 0 else 3)

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return (
            f"{self.cut_off} links cut off, {self.honest_tensors} honest tensors in between, "
            f"{self.taken_in_memory} tensors of rogues taken in shared memory"
        )

    async def serve_honest(self, count: int) -> None:
        """Send a tensor with a known pattern."""
        await self._honest.send(pattern(self.honest_tensors, count))
        self.honest_tensors += 1
        await self._honest.drain()

    async def look(self) -> Figures:
        """Wait until all rogues are gone, check for errors, and measure the held resources."""
        async with asyncio.timeout(_PATIENCE_S):
            await heard(self._endpoint, self._things)
            held = await self._child.call(_settle)
            troubles, _, self.taken_in_memory, taken_honest, self.cut_off = await self._child.call(_look)
        assert not troubles, "\n".join(troubles)
        assert taken_honest == self.honest_tensors
        assert self._honest.statistics().receivers_lost == 0
        return held


@asynccontextmanager
async def live_receiver(endpoint: Endpoint, *, uvloop: bool) -> AsyncIterator[LiveReceiver]:
    """Start a receiver in a separate process, and connect an honest sender to it."""
    async with child_process(endpoint, uvloop=uvloop) as child:
        await child.call(_start)
        async with TensorSender(endpoint) as honest:
            await child.call(_trust, honest.id)
            with Things() as things:
                yield LiveReceiver(endpoint, child, honest, things)
