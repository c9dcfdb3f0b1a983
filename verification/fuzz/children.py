"""Child processes of live targets, and the errors in them that no peer may cause."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

from aiotensor.transports.endpoints import Endpoint
from verification import loops
from verification.fuzz.engine import Figures, Troubles, figures, threads_started
from verification.fuzz.things import Things
from verification.processes import peers
from verification.processes.allocator import use_one_heap

__all__ = [
    "ConnectingChild",
    "Look",
    "child_process",
    "connecting_child",
    "latest",
    "look",
    "stop_watching",
    "watch",
]

_TROUBLES = "troubles"


class Look(NamedTuple):
    """The resources of a child process, its errors, and the number of peers that broke the protocol."""

    figures: Figures
    troubles: list[str]
    cut_off: int


async def watch(state: peers.State) -> None:
    """Start collecting errors in the child, after the thread that decodes large messages."""
    use_one_heap()
    await threads_started()
    troubles = state.others[_TROUBLES] = Troubles()
    troubles.watch()


async def look(state: peers.State) -> Look:
    """Measure the child, and return the errors collected in it."""
    troubles: Troubles = state.others[_TROUBLES]
    return Look(figures(), troubles.found, troubles.cut_off)


async def latest(state: peers.State) -> list[str]:
    """Return the last warnings of the child."""
    troubles: Troubles = state.others[_TROUBLES]
    return list(troubles.latest)


async def stop_watching(state: peers.State) -> None:
    """Stop collecting errors in the child."""
    state.others[_TROUBLES].leave()


@asynccontextmanager
async def child_process(endpoint: Endpoint, *, uvloop: bool) -> AsyncIterator[peers.Peer]:
    """Start a child process, and check that it ends normally after the block."""
    child = peers.Peer(endpoint, kind=loops.Kind("uvloop" if uvloop else "asyncio", "plain"))
    try:
        yield child
        assert await child.finish() == 0
    finally:
        await child.close()


class ConnectingChild:
    """A peer in a separate process, which connects to the rogues in this one."""

    def __init__(self, address: Endpoint, child: peers.Peer, things: Things) -> None:
        self.cut_off = 0
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._child = child
        self._things = things

    async def look(self) -> Figures:
        """Check for errors, and measure the held resources."""
        seen = await self._child.call(look)
        assert not seen.troubles, "\n".join(seen.troubles)
        self.cut_off = seen.cut_off
        return seen.figures


C = TypeVar("C", bound=ConnectingChild)


@asynccontextmanager
async def connecting_child(kind: type[C], address: Endpoint, *, uvloop: bool) -> AsyncIterator[C]:
    """Start a process for peers of one kind."""
    async with child_process(address, uvloop=uvloop) as child:
        await child.call(watch)
        with Things() as things:
            yield kind(address, child, things)
