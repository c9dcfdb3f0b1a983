"""The calls of an application on a subscriber whose publisher is a rogue: every wait must end."""

from collections import Counter, deque
from typing import NamedTuple

import torch

from aiotensor import PeerLostError, ProtocolError, RefusedError, UsageError, WouldBlockError
from aiotensor.broadcast import Publication, Publisher, Subscriber
from verification.fuzz.engine import Troubles, in_memory
from verification.fuzz.notes import Note
from verification.patterns import BIG, pattern

__all__ = ["HONEST", "Received", "publish_rightly", "receive_all"]

_SIZES = (3, BIG, 3, 3000)
HONEST = len(_SIZES)  # publications of an honest publisher

_FIRST = 1_000_003  # the number in its first message, which no rogue uses
_KEPT = 3  # publications, so that some tensors outlive their publishers


class Received(NamedTuple):
    """The outcomes of calls, and the number of tensors of rogues in shared memory."""

    outcomes: Counter[str]
    taken_in_memory: int


async def publish_rightly(publisher: Publisher) -> None:
    """Publish the messages of an honest publisher to one subscriber."""
    await publisher.wait_for_subscribers(1)
    for index, count in enumerate(_SIZES):
        await publisher.publish(Note(_FIRST + index, [pattern(index, count)]))
    await publisher.drain()


async def receive_all(subscriber: Subscriber[Note], troubles: Troubles) -> Received:
    """Receive until an honest publisher has published everything; raise errors that no peer may cause."""
    outcomes: Counter[str] = Counter()
    kept: deque[Note] = deque(maxlen=_KEPT)
    taken = honest = calls = 0
    while honest < HONEST:
        calls += 1
        try:
            publication = await _next(subscriber, is_direct=calls % 2 == 0)
        except (PeerLostError, RefusedError, ProtocolError, UsageError) as error:
            if honest:
                raise AssertionError("an honest publisher was lost") from error
            outcomes[type(error).__name__] += 1
            continue
        note = publication.message
        if _FIRST <= note.number < _FIRST + HONEST:
            assert (note.number, publication.number, publication.missed) == (_FIRST + honest, honest, 0)
            assert torch.equal(note.tensors[0], pattern(honest, _SIZES[honest]))
            honest += 1
        else:
            outcomes["received"] += 1
            kept.append(note)
            for tensor in note.tensors:
                taken += in_memory(tensor.detach(), troubles)
        del publication, note
    return Received(outcomes, taken)


async def _next(subscriber: Subscriber[Note], *, is_direct: bool) -> Publication[Note]:
    if is_direct:
        try:
            return subscriber.receive_nowait()
        except WouldBlockError:
            pass
    return await subscriber.receive()
