"""Iterations over connects and disconnects of peers are bounded, independent and safe to cancel."""

import asyncio
import gc
from collections.abc import AsyncIterator

from aiotensor import PeerEvent, PeerLostError
from aiotensor.runtime.affinity import LoopAffinity
from aiotensor.runtime.peer_events import MAX_PEER_EVENTS, PeerEvents
from tests.cancelling import Attempt, cancel_everywhere


def events_of_an_open_object() -> PeerEvents:
    affinity = LoopAffinity("Thing")
    affinity.enter()
    return PeerEvents(affinity)


async def taken(events: AsyncIterator[PeerEvent], count: int) -> list[PeerEvent]:
    return [await anext(events) for _ in range(count)]


async def test_an_iteration_begins_with_the_connected_peers() -> None:
    peers = events_of_an_open_object()
    for number in range(3):
        peers.connected(number, f"peer {number}", number)
    peers.disconnected(1, None)
    events = peers.iterate()
    peers.disconnected(0, None)
    assert await taken(events, 3) == [
        PeerEvent("connected", "peer 0", 0),
        PeerEvent("connected", "peer 2", 2),
        PeerEvent("disconnected", "peer 0", 0),
    ]


async def test_each_iteration_returns_every_event() -> None:
    peers = events_of_an_open_object()
    first, second = peers.iterate(), peers.iterate()
    peers.connected("key", "peer", 7)
    expected = PeerEvent("connected", "peer", 7)
    assert await anext(first) == await anext(second) == expected


async def test_a_peer_that_never_connected_causes_no_event() -> None:
    peers = events_of_an_open_object()
    events = peers.iterate()
    peers.disconnected("refused", PeerLostError("it ended"))
    peers.connected("key", "peer", None)
    assert await anext(events) == PeerEvent("connected", "peer", None)


async def test_a_slow_iteration_loses_the_oldest_events_and_counts_them() -> None:
    peers = events_of_an_open_object()
    slow, fast = peers.iterate(), peers.iterate()
    count = MAX_PEER_EVENTS + 5
    for number in range(count):
        peers.connected(number, str(number), None)
        assert (await anext(fast)).missed == 0
    kept = await taken(slow, MAX_PEER_EVENTS)
    assert [event.peer for event in kept] == [str(number) for number in range(5, count)]
    assert [event.missed for event in kept] == [5] + [0] * (MAX_PEER_EVENTS - 1)
    peers.connected("another", "another", None)
    assert await anext(slow) == PeerEvent("connected", "another", None)


async def test_a_new_iteration_over_too_many_peers_counts_those_that_it_omits() -> None:
    peers = events_of_an_open_object()
    for number in range(MAX_PEER_EVENTS + 2):
        peers.connected(number, str(number), None)
    assert await anext(peers.iterate()) == PeerEvent("connected", "2", None, missed=2)


async def test_an_abandoned_iteration_receives_no_more_events(no_collections: None) -> None:
    peers = events_of_an_open_object()
    events = peers.iterate()
    assert len(peers._iterations) == 1
    del events
    assert not peers._iterations


async def test_an_error_of_an_event_refers_to_no_frames() -> None:
    peers = events_of_an_open_object()
    events = peers.iterate()
    peers.connected("key", "peer", 7)
    try:
        raise PeerLostError("it ended", pid=7)
    except PeerLostError as error:
        peers.disconnected("key", error)
    _, event = await taken(events, 2)
    assert isinstance(event.error, PeerLostError)
    assert (str(event.error), event.error.pid, event.error.__traceback__) == ("it ended", 7, None)


async def test_closing_ends_iterations() -> None:
    peers = events_of_an_open_object()
    waiting, idle = peers.iterate(), peers.iterate()
    ends = asyncio.create_task(anext(waiting, None))
    await asyncio.sleep(0)
    peers._affinity.close()
    assert await ends is None
    assert await anext(idle, None) is None


async def test_cancelling_an_iteration_loses_no_event() -> None:
    peers = events_of_an_open_object()

    async def attempt(attempt: Attempt) -> None:
        events = peers.iterate()

        async def next_event() -> PeerEvent:
            return await anext(events)

        step = attempt.start(next_event())
        await step.bring(lambda: peers.connected("key", "peer", 7))
        event = step.value if await step.completed() else await anext(events)
        assert event == PeerEvent("connected", "peer", 7)
        peers.disconnected("key", None)
        assert await anext(events) == PeerEvent("disconnected", "peer", 7)

    assert await cancel_everywhere(attempt)


async def test_a_waiting_iteration_is_kept_alive_by_its_object() -> None:
    peers = events_of_an_open_object()
    seen: list[PeerEvent] = []

    async def watch() -> None:
        seen.append(await anext(peers.iterate()))

    asyncio.get_running_loop().create_task(watch())
    await asyncio.sleep(0)
    gc.collect()
    peers.connected("key", "peer", 7)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen == [PeerEvent("connected", "peer", 7)]
