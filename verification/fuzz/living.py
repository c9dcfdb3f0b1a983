"""The parts that all live targets share: the process of the peers, and the checks after each conversation."""

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from verification import loops
from verification.fuzz.listening import listening_at
from verification.fuzz.observing import Figures, Troubles, figures, threads_started
from verification.fuzz.speaking import converse, heard_by
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things
from verification.internals import open_pagemap
from verification.processes import peers
from verification.processes.allocator import use_one_heap
from verification.waiting import until

TROUBLES = "troubles"  # of the process of the peers, in its state

_PATIENCE_S = 20.0  # for steps of milliseconds; a slower peer hangs
_RELEASED_S = 10.0  # as well


async def _watch(state: peers.State) -> None:
    """Start collecting errors in the process, after what stays open: a thread, and a file of the kernel."""
    use_one_heap()
    open_pagemap()
    await threads_started()
    state.others[TROUBLES] = Troubles()


async def _look(state: peers.State, *, measures: bool) -> tuple[Figures | None, int]:
    """Check for errors; return the resources of the process, and the number of warnings of violations."""
    troubles: Troubles = state.others[TROUBLES]
    assert not troubles.found, "\n".join([*troubles.found, "the latest warnings:", *troubles.latest])
    return figures() if measures else None, troubles.violations


async def released(held: Callable[[], Mapping[str, object]]) -> None:
    """Wait until nothing is held for rogues that are gone."""
    try:
        async with asyncio.timeout(_RELEASED_S):
            await until(lambda: not any(held().values()))
    except TimeoutError:
        raise AssertionError(f"held for rogues that are gone: {held()}") from None


async def count_end(outcomes: Counter[str], call: Awaitable[object], *errors: type[Exception]) -> None:
    """Wait for the end of a call, and count it; raise errors that no rogue may cause."""
    try:
        await call
    except errors as error:
        outcomes[type(error).__name__] += 1
    else:
        outcomes["ended"] += 1


class Live(ABC):
    """Peers of one role in a process, as seen by the rogues and honest peers in this one.

    Args:
        address: where the peers listen, or where the rogues do.
        process: the process of the peers.
        things: the descriptors of the rogues.

    Attributes:
        conversations: the number of conversations so far.
        outcomes: the results of the calls of the peers, and other counts.
        settled: waits in the process until nothing is held for any rogue, and returns the counts.
    """

    settled: Callable[[peers.State], Awaitable[Counter[str]]] | None = None

    def __init__(self, address: str, process: peers.Peer, things: Things) -> None:
        self.conversations = 0
        self.outcomes: Counter[str] = Counter()
        self.address = address
        self.process = process
        self.things = things
        self._violations = 0

    async def open(self) -> None:  # noqa: B027 - not all targets open something first
        """Prepare for the first conversation."""

    async def close(self) -> None:  # noqa: B027
        """Close the opened objects."""

    @abstractmethod
    async def talk(self, said: Conversation) -> None:
        """Run a rogue's conversation, and check that honest peers are not affected."""

    async def settle(self) -> None:
        """Wait until nothing is held for any rogue."""
        if self.settled is not None:
            await heard_by(self.address, self.things)
            self.outcomes = await self.process.call(self.settled)

    async def hear(self, said: Conversation) -> None:
        """Run a rogue's conversation, and check for errors that no peer may cause."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self.talk(said)
        finally:
            self.conversations += 1
            await self.process.call(_look, measures=False)  # an error of the process explains any other

    async def look(self) -> Figures:
        """Check that nothing is held for any rogue, and measure the held resources."""
        async with asyncio.timeout(_PATIENCE_S):
            await self.settle()
            found, self._violations = await self.process.call(_look, measures=True)
        assert found is not None
        return found

    @property
    def summary(self) -> str:
        """A summary of the run."""
        counts = [f"{count} {name}" for name, count in sorted(self.outcomes.items())]
        return f"{self._violations} warnings of violations; {', '.join(counts)}"


class LiveConnector(Live):
    """Peers that connect, one after the other: each first to a rogue, and then to an honest peer.

    Attributes:
        begin: opens the next peer in its process.
        work: uses the peer until its work is done, and returns the outcomes of its calls.
    """

    begin: Callable[[peers.State], Awaitable[None]]
    work: Callable[[peers.State], Awaitable[Counter[str]]]

    async def talk(self, said: Conversation) -> None:
        """Run a rogue for a new peer in use, and check that the next one serves it."""
        with listening_at(self.address, self.things) as accept:
            await self.process.call(self.begin)
            working = self.process.start(self.work)
            await converse(accept, said)
        async with self.honest():
            self.outcomes += await working
            await self.finish()

    @abstractmethod
    def honest(self) -> AbstractAsyncContextManager[None]:
        """Open an honest peer at the address, and serve the peers in the process."""

    @abstractmethod
    async def finish(self) -> None:
        """Check that an honest peer is served, and that nothing is held for the rogue."""


@asynccontextmanager
async def opened(kind: type[Live], address: str, *, uvloop: bool) -> AsyncIterator[Live]:
    """Start a live target, and check that its process ends normally after the block."""
    process = peers.Peer(address, kind=loops.Kind("uvloop" if uvloop else "asyncio", "plain"))
    try:
        await process.call(_watch)
        with Things() as things:
            live = kind(address, process, things)
            await live.open()
            yield live
            await live.close()
        assert await process.finish() == 0
    finally:
        await process.close()
