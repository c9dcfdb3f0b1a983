"""Rogue subscribers for a publisher in a separate process, with honest subscribers beside them."""

import asyncio
import contextlib
import itertools
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple, get_args

import msgspec
import torch

from aiotensor import AioTensorError
from aiotensor.broadcast import Published, Publisher, SlowPolicy, Subscriber
from aiotensor.transports.endpoints import Endpoint
from verification.fuzz.broadcasts import MOST_READ
from verification.fuzz.children import child_process, latest, look, stop_watching, watch
from verification.fuzz.engine import Figures, threads_started
from verification.fuzz.notes import Note
from verification.fuzz.speaking import road_to
from verification.fuzz.steps import Conversation
from verification.fuzz.subscribing import subscribe
from verification.fuzz.things import Things
from verification.internals import held_by_publisher, unidentified_at_publisher, worker_of
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

__all__ = ["LivePublisher", "live_publisher"]

_PATIENCE_S = 20  # for steps of milliseconds; a slower publisher hangs

_AUDIENCES = (1, 2, 4, 8)
_ARENA_BYTES = 32 << 20
_IN_MEMORY = 3000  # elements of int64: in shared memory, so that rogues know a block
_IN_STEPS = 3 * BIG  # between machines in several steps, the last of which is to be acknowledged
_HISTORY = 2
_EVERY = 32  # conversations with one publisher, and with one process of rogues

_PUBLISHER = "publisher"
_THINGS = "things"


# The process of the publisher.


async def _open(state: peers.State, slow: SlowPolicy) -> None:
    publisher = Publisher(
        state.endpoint,
        arena_bytes=_ARENA_BYTES,
        max_behind=MOST_READ,
        slow=slow,
        max_held_bytes=_ARENA_BYTES // 4,
        history=_HISTORY,
    )
    state.others[_PUBLISHER] = await publisher.__aenter__()
    await threads_started(worker_of(publisher))


async def _publish(state: peers.State, seed: int, count: int, honest: list[str]) -> Published:
    publisher: Publisher = state.others[_PUBLISHER]
    await until(lambda: _are_below_limit(publisher, honest))
    tensor = pattern(seed, count)
    if seed % 3 == 0:
        allocated = await publisher.allocate((count,), torch.int64)
        tensor = allocated.copy_(tensor)
    return await publisher.publish(Note(seed, [tensor]))


def _are_below_limit(publisher: Publisher, honest: list[str]) -> bool:
    """Return whether all honest subscribers are less behind than the limit of the publisher.

    They have received all publications, but their threads may release the memory later. At the limit, the
    next publication would disconnect an honest subscriber, or drop a publication for it.
    """
    lags = publisher.statistics().lags
    return all(lag.behind < MOST_READ for lag in lags if lag.subscriber in honest)


class _Settled(NamedTuple):
    """A publisher after all rogues are gone: its resources, and the numbers of rogues.

    Of violations only those in the log count: at most one line per second.
    """

    figures: Figures
    troubles: list[str]
    lost: int
    refused: int
    violations: int


async def _settle(state: peers.State, subscribers: int) -> _Settled:
    """Wait until the publisher holds nothing for any rogue, and check that it can use its whole memory."""
    publisher: Publisher = state.others[_PUBLISHER]
    try:
        async with asyncio.timeout(_PATIENCE_S / 2):
            await until(lambda: _is_settled(state, publisher, subscribers))
            whole = await publisher.allocate((_ARENA_BYTES,), torch.uint8)  # which needs that of the history
            del whole
            await until(lambda: not publisher.statistics().bytes_in_use)
    except TimeoutError:
        found = held_by_publisher(publisher), publisher.statistics()
        raise AssertionError(f"it holds something of rogues that are gone: {found}") from None
    held = held_by_publisher(publisher)
    assert not any(held.values()), held
    seen, now = await look(state), publisher.statistics()
    return _Settled(seen.figures, seen.troubles, now.subscribers_lost, now.subscribers_refused, seen.cut_off)


def _is_settled(state: peers.State, publisher: Publisher, subscribers: int) -> bool:
    held, now = held_by_publisher(publisher), publisher.statistics()
    of_honest = [(lag.behind, lag.held_bytes) for lag in now.lags]
    return (
        (held["turns"], held["departures"], now.waiting) == (0, 0, 0)
        and of_honest == [(0, 0)] * subscribers
        and not unidentified_at_publisher(publisher)
    )


async def _close(state: peers.State) -> None:
    await state.others.pop(_PUBLISHER).aclose()


# The process of the rogues.


async def _talk(state: peers.State, conversation: Conversation) -> int:
    if _THINGS not in state.others:
        state.others[_THINGS] = state.stack.enter_context(Things())
    things = state.others[_THINGS]
    with road_to(state.endpoint, things) as road:
        return await subscribe(road, conversation)


class _Honest:
    """An honest subscriber, which receives everything."""

    def __init__(self, subscriber: Subscriber[Note]) -> None:
        self._subscriber = subscriber
        self._number: int | None = None
        self._progress = asyncio.Event()
        self._receiving = asyncio.create_task(self._receive())

    @property
    def id(self) -> str:
        """Return the name of the subscriber at the publisher."""
        return self._subscriber.id

    async def reaches(self, number: int) -> None:
        """Wait until it has received a publication, or raise the error of its receiving."""
        while self._number is None or self._number < number:
            self._progress.clear()
            progress = asyncio.ensure_future(self._progress.wait())
            await asyncio.wait([progress, self._receiving], return_when=asyncio.FIRST_COMPLETED)
            progress.cancel()
            if self._receiving.done():
                self._receiving.result()
                raise AssertionError("an honest subscriber was disconnected")

    async def close(self) -> None:
        self._receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiving
        await self._subscriber.aclose()

    async def _receive(self) -> None:
        async for publication in self._subscriber:
            note = publication.message
            assert publication.missed == 0, f"{publication.number} came after a gap"
            assert self._number is None or publication.number == self._number + 1
            assert len(note.tensors) == 1
            assert torch.equal(note.tensors[0], pattern(note.number, note.tensors[0].numel()))
            note.tensors[0].fill_(-1)  # which no other subscriber sees
            self._number = publication.number
            self._progress.set()
            del publication, note


class LivePublisher:
    """A publisher, as seen by its subscribers."""

    def __init__(self, endpoint: Endpoint, child: peers.Peer) -> None:
        self.conversations = self.honest_publications = self.heard = 0
        self.lost = self.refused = self.violations = 0
        self._endpoint = endpoint
        self._child = child
        self._rogues: peers.Peer | None = None
        self._policies = itertools.cycle(get_args(SlowPolicy))
        self._honest: list[_Honest] = []
        self._seeds = itertools.count()

    async def hear(self, conversation: Conversation) -> None:
        """Run a rogue's conversation while honest subscribers receive everything."""
        async with asyncio.timeout(_PATIENCE_S):
            if self._rogues is None:
                await self.open()
            assert self._rogues is not None
            # It decides their number, so that it can be repeated.
            said = zlib.crc32(msgspec.json.encode(conversation))
            await self._set_audience(_AUDIENCES[said % len(_AUDIENCES)])
            talking = self._rogues.start(_talk, conversation)
            while not talking.done():
                await self._publish()
            self.heard += await talking
            await self._publish()
            self.conversations += 1
            if self.conversations % _EVERY == 0:
                await self._settle()

    async def look(self) -> Figures:
        """End all rogues, check for errors, and measure the held resources."""
        async with asyncio.timeout(_PATIENCE_S):
            await self.close()
            await self.open()  # a new publisher in every measurement
            await self._set_audience(1)
            await self._publish(BIG)
            return await self._settle()

    @property
    def summary(self) -> str:
        """Return a summary of the run."""
        return (
            f"{self.lost} subscribers cut off, {self.refused} refused, {self.heard} publications read by "
            f"rogues, {self.honest_publications} received by all honest subscribers"
        )

    async def open(self) -> None:
        """Open the next publisher, and start a process for rogues."""
        self._rogues = peers.Peer(self._endpoint)
        await self._child.call(_open, next(self._policies))

    async def close(self) -> None:
        """Kill the rogues, and close the publisher."""
        if self._rogues is not None:
            await self._rogues.close()
            self._rogues = None
            await self._set_audience(0)
            await self._child.call(_close)

    async def _settle(self) -> Figures:
        """Kill the rogues, check that the publisher holds nothing for them, and close it."""
        assert self._rogues is not None
        self._rogues.kill()
        await self._rogues.ended()
        settled = await self._child.call(_settle, len(self._honest))
        assert not settled.troubles, "\n".join(settled.troubles)
        self.lost += settled.lost
        self.refused += settled.refused
        self.violations = settled.violations
        await self.close()
        return settled.figures

    async def _set_audience(self, count: int) -> None:
        while len(self._honest) > count:
            await self._honest.pop().close()
        while len(self._honest) < count:
            subscriber = Subscriber(self._endpoint, Note)
            self._honest.append(_Honest(await subscriber.__aenter__()))
            await self._child.call(_wait_for, subscriber.id)

    async def _publish(self, count: int | None = None) -> None:
        """Publish to all, and wait until the honest subscribers have received it."""
        seed = next(self._seeds)
        if count is None:
            count = _count_of(seed)
        sent = await self._child.call(_publish, seed, count, [honest.id for honest in self._honest])
        assert sent.delivered >= len(self._honest)
        try:
            for honest in self._honest:
                await honest.reaches(sent.number)
        except (AioTensorError, AssertionError) as error:
            warnings = await self._child.call(latest)  # which raises if the publisher has died
            error.add_note("\n".join(["the publisher, most recently:", *warnings]))
            raise
        self.honest_publications += 1


def _count_of(seed: int) -> int:
    """Return the number of elements of a publication."""
    if seed % 32 == 23:
        return _IN_STEPS
    if seed % 16 == 7:
        return BIG
    return 3 if seed % 5 == 4 else _IN_MEMORY


async def _wait_for(state: peers.State, subscriber: str) -> None:
    publisher: Publisher = state.others[_PUBLISHER]
    await until(lambda: subscriber in [lag.subscriber for lag in publisher.statistics().lags])


@asynccontextmanager
async def live_publisher(endpoint: Endpoint, *, uvloop: bool) -> AsyncIterator[LivePublisher]:
    """Start a process for publishers."""
    async with child_process(endpoint, uvloop=uvloop) as child, AsyncExitStack() as stack:
        await child.call(watch)
        live = LivePublisher(endpoint, child)
        stack.push_async_callback(live.close)
        yield live
        await live.close()
        await child.call(stop_watching)
