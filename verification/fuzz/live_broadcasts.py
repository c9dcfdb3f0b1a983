"""Rogue subscribers for a publisher with honest ones beside them, and rogue publishers for subscribers.

Each rogue publisher is followed by an honest one; every call of the subscribers must end.
"""

import asyncio
import contextlib
import itertools
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any, get_args

import msgspec
import torch

from aiotensor import PeerLostError, ProtocolError, RefusedError, UsageError, WouldBlockError
from aiotensor.broadcast import Publication, Published, Publisher, SlowPolicy, Subscriber
from verification.fuzz.grammar import MOST_READ
from verification.fuzz.living import TROUBLES, Live, LiveConnector, released
from verification.fuzz.notes import FIRST_HONEST, Note
from verification.fuzz.observing import in_memory, threads_started
from verification.fuzz.speaking import connecting_to, converse
from verification.fuzz.steps import Conversation
from verification.fuzz.things import Things
from verification.internals import held_by_publisher, unidentified_at_publisher, worker_of
from verification.patterns import BIG, pattern
from verification.processes import peers
from verification.waiting import until

_AUDIENCES = (1, 2, 4, 8)
_ARENA_BYTES = 32 << 20
_IN_MEMORY = 3000  # elements of int64: in shared memory, so that rogues know a block
_IN_STEPS = 3 * BIG  # between machines in several steps, the last of which is to be acknowledged
_HISTORY = 2
_EVERY = 32  # conversations with one publisher, and with one process of rogues

_ALLOCATED_S = 10.0

_PUBLISHER = "publisher"
_THINGS = "things"


# The process of the publishers.


async def _open_publisher(state: peers.State, slow: SlowPolicy) -> None:
    options: dict[str, Any] = {"slow": slow, "max_behind": MOST_READ, "max_held_bytes": _ARENA_BYTES // 4}
    publisher = Publisher(state.endpoint, arena_bytes=_ARENA_BYTES, history=_HISTORY, **options)
    state.others[_PUBLISHER] = await publisher.__aenter__()
    await threads_started(worker_of(publisher))


async def _publish(state: peers.State, seed: int, count: int, honest: list[str]) -> Published:
    publisher: Publisher = state.others[_PUBLISHER]

    def are_below_limit() -> bool:
        """Return whether no honest subscriber is as far behind as the limit allows.

        They have received all publications, but their threads may release the memory later. At the limit, the
        next publication would disconnect an honest subscriber, or drop a publication for it.
        """
        lags = publisher.statistics().lags
        return all(lag.behind < MOST_READ for lag in lags if lag.subscriber in honest)

    await until(are_below_limit)
    tensor = pattern(seed, count)
    if seed % 3 == 0:
        allocated = await publisher.allocate((count,), torch.int64)
        tensor = allocated.copy_(tensor)
    return await publisher.publish(Note(seed, [tensor]))


async def _settle(state: peers.State, subscribers: int) -> Counter[str]:
    """Wait until the publisher holds nothing for any rogue, and check that it can use its whole memory."""
    publisher: Publisher = state.others[_PUBLISHER]

    def held() -> dict[str, object]:
        held, now = held_by_publisher(publisher), publisher.statistics()
        is_right = [(lag.behind, lag.held_bytes) for lag in now.lags] == [(0, 0)] * subscribers
        return {
            "turns and departures": held["turns"] + held["departures"],
            "waiting": now.waiting,
            "lags": "" if is_right else str(now.lags),
            "unidentified": unidentified_at_publisher(publisher),
        }

    await released(held)
    async with asyncio.timeout(_ALLOCATED_S):
        whole = await publisher.allocate((_ARENA_BYTES,), torch.uint8)  # which needs that of the history
    del whole
    await released(lambda: {"bytes": publisher.statistics().bytes_in_use})
    assert not any(held_by_publisher(publisher).values()), held_by_publisher(publisher)
    now = publisher.statistics()
    return Counter({"rogues lost": now.subscribers_lost, "refused": now.subscribers_refused})


async def _close_publisher(state: peers.State) -> None:
    await state.others.pop(_PUBLISHER).aclose()


async def _wait_for(state: peers.State, subscriber: str) -> None:
    publisher: Publisher = state.others[_PUBLISHER]
    await until(lambda: subscriber in [lag.subscriber for lag in publisher.statistics().lags])


# The process of the rogues.


async def _talk(state: peers.State, said: Conversation) -> int:
    if _THINGS not in state.others:
        state.others[_THINGS] = state.stack.enter_context(Things())
    with connecting_to(str(state.endpoint), state.others[_THINGS]) as connect:
        return await converse(connect, said)


class LivePublisher(Live):
    """A publisher, as seen by its subscribers."""

    _rogues: peers.Peer

    async def open(self) -> None:
        """Open the first publisher."""
        self._policies = itertools.cycle(get_args(SlowPolicy))
        self._seeds = itertools.count()
        self._honest: list[Subscriber[Note]] = []
        await self._begin()

    async def _begin(self) -> None:
        """Open the next publisher, and start a process for rogues."""
        self._rogues = peers.Peer(self.address)
        await self.process.call(_open_publisher, next(self._policies))

    async def close(self) -> None:
        """Kill the rogues, and close the publisher."""
        await self._rogues.close()
        await self._set_audience(0)
        await self.process.call(_close_publisher)

    async def talk(self, said: Conversation) -> None:
        """Run a rogue's conversation while honest subscribers receive everything."""
        # It decides their number, so that it can be repeated.
        await self._set_audience(_AUDIENCES[zlib.crc32(msgspec.json.encode(said)) % len(_AUDIENCES)])
        talking = self._rogues.start(_talk, said)
        while not talking.done():
            await self._publish()
        self.outcomes["publications read by rogues"] += await talking
        await self._publish()
        if self.conversations % _EVERY == _EVERY - 1:
            await self._renew()

    async def settle(self) -> None:
        """End all rogues, and continue with a new publisher."""
        await self._renew()
        await self._set_audience(1)
        await self._publish(BIG)

    async def _renew(self) -> None:
        """Kill the rogues, check that the publisher holds nothing for them, and open the next one."""
        self._rogues.kill()
        await self._rogues.ended()
        self.outcomes += await self.process.call(_settle, len(self._honest))
        await self.close()
        await self._begin()

    async def _set_audience(self, count: int) -> None:
        while len(self._honest) > count:
            await self._honest.pop().aclose()
        while len(self._honest) < count:
            self._honest.append(await Subscriber(self.address, Note).__aenter__())
            await self.process.call(_wait_for, self._honest[-1].id)

    async def _publish(self, count: int | None = None) -> None:
        """Publish to all, and check that each honest subscriber receives it."""
        seed = next(self._seeds)
        if count is None:
            count = {23: _IN_STEPS, 7: BIG, 4: 3}.get(seed % 32, _IN_MEMORY)
        tensor = pattern(seed, count)
        sent = await self.process.call(_publish, seed, count, [honest.id for honest in self._honest])
        assert sent.delivered >= len(self._honest)
        for honest in self._honest:
            publication = await honest.receive()
            while publication.number < sent.number:  # one of the history
                publication = await honest.receive()
            assert (publication.number, publication.missed) == (sent.number, 0)
            [received] = publication.message.tensors
            assert torch.equal(received, tensor)
            received.fill_(-1)  # which no other subscriber sees
            del publication, received
        self.outcomes["honest publications"] += 1


_SUBSCRIBER = "subscriber"
_SIZES = (3, BIG, 3, 3000)  # of the publications of an honest publisher

_KEPT = 3  # publications, so that some tensors outlive their publishers


# The process of the subscribers.


async def _open(state: peers.State) -> None:
    state.others[_SUBSCRIBER] = await Subscriber(state.endpoint, Note).__aenter__()


async def _receive(state: peers.State) -> Counter[str]:
    """Receive until an honest publisher has published everything; raise errors that no peer may cause."""
    subscriber: Subscriber[Note] = state.others[_SUBSCRIBER]
    outcomes: Counter[str] = Counter()
    kept: deque[Note] = deque(maxlen=_KEPT)
    honest = calls = 0
    while honest < len(_SIZES):
        calls += 1
        try:
            publication = await _next(subscriber, is_direct=calls % 2 == 0)
        except (PeerLostError, RefusedError, ProtocolError, UsageError) as error:
            if honest:
                raise AssertionError("an honest publisher was lost") from error
            outcomes[type(error).__name__] += 1
            continue
        note = publication.message
        if FIRST_HONEST <= note.number < FIRST_HONEST + len(_SIZES):
            assert (note.number, publication.number, publication.missed) == (FIRST_HONEST + honest, honest, 0)
            assert torch.equal(note.tensors[0], pattern(honest, _SIZES[honest]))
            honest += 1
        else:
            outcomes["received"] += 1
            kept.append(note)
            for tensor in note.tensors:
                outcomes["tensors in shared memory"] += in_memory(tensor.detach(), state.others[TROUBLES])
        del publication, note
    return outcomes


async def _next(subscriber: Subscriber[Note], *, is_direct: bool) -> Publication[Note]:
    if is_direct:
        try:
            return subscriber.receive_nowait()
        except WouldBlockError:
            pass
    return await subscriber.receive()


async def _close(state: peers.State) -> None:
    subscriber: Subscriber[Note] = state.others.pop(_SUBSCRIBER)
    await subscriber.aclose()
    now = subscriber.statistics()
    assert (now.leases, now.unclaimed, now.mapped_bytes, now.waiting) == (0, 0, 0, 0), now


class LiveSubscriber(LiveConnector):
    """Subscribers, as seen by their publishers."""

    begin = staticmethod(_open)
    work = staticmethod(_receive)

    @contextlib.asynccontextmanager
    async def honest(self) -> AsyncIterator[None]:
        """Publish everything."""
        async with Publisher(self.address) as publisher:
            await publisher.wait_for_subscribers(1)
            for index, count in enumerate(_SIZES):
                await publisher.publish(Note(FIRST_HONEST + index, [pattern(index, count)]))
            await publisher.drain()
            yield

    async def finish(self) -> None:
        """Close the subscriber, and check that it holds nothing."""
        await self.process.call(_close)
