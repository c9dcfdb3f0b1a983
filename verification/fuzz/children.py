"""Child processes of live targets, and the errors in them that no peer may cause."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiotensor.transports.endpoints import Endpoint
from verification import loops
from verification.fuzz.engine import Figures, Troubles, figures
from verification.processes import peers

__all__ = ["Look", "child_process", "look", "stop_watching", "watch"]

_TROUBLES = "troubles"


class Look(NamedTuple):
    """The resources of a child process, its errors, and the number of peers that broke the protocol."""

    figures: Figures
    troubles: list[str]
    cut_off: int


async def watch(state: peers.State) -> None:
    """Start collecting errors in the child."""
    troubles = state.others[_TROUBLES] = Troubles()
    troubles.watch()


async def look(state: peers.State) -> Look:
    """Measure the child, and return the errors collected in it."""
    troubles: Troubles = state.others[_TROUBLES]
    return Look(figures(), troubles.found, troubles.cut_off)


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
