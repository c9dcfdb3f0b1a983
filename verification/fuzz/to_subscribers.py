"""Rogue publishers for subscribers, each followed by an honest one; every call must end."""

import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator

import torch

from aiotensor import PeerLostError, ProtocolError, RefusedError, UsageError, WouldBlockError
from aiotensor.broadcast import Publication, Publisher, Subscriber
from verification.fuzz.living import TROUBLES, LiveConnector
from verification.fuzz.notes import FIRST_HONEST, Note
from verification.fuzz.observing import in_memory
from verification.patterns import BIG, pattern
from verification.processes import peers

_SUBSCRIBER = "subscriber"
_SIZES = (3, BIG, 3, 3000)  # of the publications of an honest publisher

_KEPT = 3  # publications, so that some tensors outlive their publishers


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
