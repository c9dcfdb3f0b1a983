"""The connects and disconnects of the peers of an object, and the iterations over them."""

from collections import deque
from collections.abc import AsyncIterator, Hashable, Iterable
from dataclasses import replace
from typing import Self
from weakref import WeakSet

from aiotensor.errors import AioTensorError, again
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.types import PeerEvent

__all__ = ["MAX_PEER_EVENTS", "LoopObjectWithPeers", "PeerEvents"]

MAX_PEER_EVENTS = 1024  # in the queue of one iteration


class PeerEvents:
    """Record which peers are connected, and notify the iterations of changes; belongs to the running loop.

    Args:
        affinity: the state of the object to which the peers connect.
    """

    def __init__(self, affinity: LoopAffinity) -> None:
        self._affinity = affinity
        self._connected: dict[Hashable, PeerEvent] = {}
        # Weak, so that an abandoned iteration receives no more events.
        self._iterations: WeakSet[_Iteration] = WeakSet()

    def connected(self, key: Hashable, peer: str, pid: int | None) -> None:
        """Record that a peer has connected.

        Args:
            key: the key of its connection, for `disconnected`.
            peer: the id or the address of the peer.
            pid: its process id; None if it is unknown.
        """
        event = self._connected[key] = PeerEvent("connected", peer, pid)
        self._add(event)

    def disconnected(self, key: Hashable, error: AioTensorError | None) -> None:
        """Record that a peer has disconnected, if it was connected; the error is None if it has closed."""
        known = self._connected.pop(key, None)
        if known is not None and self._iterations:
            # A new error, because the traceback of the original one may refer to tensors.
            self._add(PeerEvent("disconnected", known.peer, known.pid, error and again(error)))

    def iterate(self) -> AsyncIterator[PeerEvent]:
        """Return a new iteration, which begins with the connected peers."""
        iteration = _Iteration(self._affinity, self._connected.values())
        self._iterations.add(iteration)
        return iteration

    def _add(self, event: PeerEvent) -> None:
        for iteration in self._iterations:
            iteration.add(event)
        self._affinity.waiters.wake()


class _Iteration(AsyncIterator[PeerEvent]):
    """The events that one iteration has not returned, at most `MAX_PEER_EVENTS`."""

    def __init__(self, affinity: LoopAffinity, events: Iterable[PeerEvent]) -> None:
        self._affinity = affinity
        self._queue: deque[PeerEvent] = deque(maxlen=MAX_PEER_EVENTS)
        self._missed = 0
        for event in events:
            self.add(event)

    def add(self, event: PeerEvent) -> None:
        self._missed += len(self._queue) == MAX_PEER_EVENTS  # the queue then drops its oldest event
        self._queue.append(event)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PeerEvent:
        while not self._affinity.is_closed:
            self._affinity.check()
            if self._queue:
                event, missed = self._queue.popleft(), self._missed
                self._missed = 0
                return replace(event, missed=missed) if missed else event
            await self._affinity.waiters.wait()
        raise StopAsyncIteration


class LoopObjectWithPeers(LoopObject):
    """The base of public objects to which peers connect, or which connect to peers."""

    _peers: PeerEvents

    def peer_events(self) -> AsyncIterator[PeerEvent]:
        """Return an iterator over connects and disconnects: ``async for event in thing.peer_events()``.

        It begins with an event for each peer that is connected now. Each iterator returns all events since
        the call of this method, including those between two iterations. It keeps at most 1024 of them:
        if it is slow, it loses the oldest events, and `PeerEvent.missed` counts them.

        The iteration waits for the next event, and ends when this object is closed. Cancellation loses no
        event. Peers that were refused cause no events.

        Raises:
            UsageError: this object is not open, or belongs to another thread or event loop.
            ClosedError: this object was closed.
        """
        self.affinity.check()
        return self._peers.iterate()
