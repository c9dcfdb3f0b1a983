"""The subscribers of a publisher: their admission, their publications and answers, and their ends.

    Subscribe --admitted--> connected --Close, violation, failed write, end of the connection--> gone
      |
      '--limit, version--> refused

When a subscriber is gone, `Departures` keeps the blocks that it may still read.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from aiotensor.broadcast.departures import Departures
from aiotensor.broadcast.refusals import SubscriberRefusalLog
from aiotensor.broadcast.settings import PublisherSettings
from aiotensor.broadcast.subscriber_peer import SubscriberPeer
from aiotensor.protocol.audience import Audience, Dropped, Item
from aiotensor.protocol.broadcast import Admit
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import Hello, Subscribe, Welcome
from aiotensor.protocol.publisher import PublisherConnection
from aiotensor.receiving.intake import InspectorPeer
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.sending.memory import Memory
from aiotensor.tensors.segments import Segment
from aiotensor.transports.base import Transport
from aiotensor.types import PublisherStatistics, SubscriberLag

__all__ = ["Subscribers"]

logger = logger_of("publisher")

# The time in seconds for which closing waits until a connection accepts each further record.
_LAST_RECORDS_S = 1.0


class Subscribers:
    """The subscribers of one publisher; belongs to the running loop.

    Args:
        publisher: the id of the publisher.
        settings: its limits.
        counts: its counters.
        memory: its memory.
        statistics: returns the statistics of the publisher.
        progressed: called when a subscriber has joined, has answered, or is gone.

    Attributes:
        connected: the connected subscribers, by their ids.
        audience: how far each of them is behind.
        changes: woken when a subscriber has joined, has answered, or is gone.
        departures: the blocks that disconnected subscribers may still read.
        next_number: the number of the next publication.
    """

    # See `Host`.
    opening = Subscribe
    wrong_role = (
        "a Publisher listens at this address, not a TensorReceiver: open the TensorReceiver at another "
        "address, and pass that address to the TensorSender"
    )

    def __init__(
        self,
        publisher: str,
        settings: PublisherSettings,
        counts: dict[str, int],
        memory: Memory,
        statistics: Callable[[], PublisherStatistics],
        progressed: Callable[[], object],
    ) -> None:
        self.connected: dict[str, SubscriberPeer] = {}
        self.audience: Audience[SubscriberPeer] = Audience(
            settings.slow, settings.max_behind, settings.max_held_bytes
        )
        self.changes = Waiters()
        self.departures = Departures(memory)
        self.next_number = 0
        self.memory = memory
        self.refusals = SubscriberRefusalLog()
        self._publisher = publisher
        self._settings = settings
        self._counts = counts
        self._history: deque[Item] = deque()
        self._statistics = statistics
        self._progressed = progressed

    @property
    def kept(self) -> int:
        """The number of publications that are kept for later subscribers."""
        return len(self._history)

    def lags(self) -> list[SubscriberLag]:
        """List the subscribers, the slowest first."""
        now = time.monotonic()
        lags = [peer.lag(now) for peer in self.connected.values()]
        return sorted(lags, key=lambda lag: (-lag.behind, -lag.behind_s))

    # Publications

    def publish(self, item: Item) -> list[tuple[SubscriberPeer, Dropped]]:
        """Announce a publication to all subscribers, and return the publications dropped in its favor."""
        for peer in self.audience.to_disconnect():
            self.disconnect(
                peer,
                f"it was {peer.backlog.behind} publications behind, the limit max_behind of the publisher: "
                "receive faster, or raise max_behind",
            )
        self.next_number = item.number + 1
        uses = len(self.connected) + (self._settings.history > 0)
        for block, _ in item.blocks:
            self.memory.leases.pin(block, uses)
        dropped = self.audience.publish(item)
        if self._settings.history:
            self._history.append(item)
            while len(self._history) > self._settings.history or self._history_delays_calls():
                self.forget_oldest()
        for peer, lost in dropped:
            if lost.is_withdrawn:
                peer.withdraw(lost.item)
            else:
                self.memory.unpin([block for block, _ in lost.item.blocks])
        for peer in list(self.connected.values()):
            peer.announce()
        return dropped

    def _history_delays_calls(self) -> bool:
        """Return whether calls wait for memory while the history uses some."""
        # The history was empty when they began to wait, and has grown since.
        return self.memory.gate.budget.waiting > 0 and any(item.blocks for item in self._history)

    def forget_oldest(self) -> bool:
        """Forget the oldest publication of the history; return whether there was one."""
        if not self._history:
            return False
        self.memory.unpin([block for block, _ in self._history.popleft().blocks])
        return True

    def detach(self, segment: Segment) -> None:
        """Detach a segment without used blocks from all subscribers."""
        for peer in self.connected.values():
            peer.detach(segment.number)

    # Connections; see `Host`

    def connect(self, transport: Transport, subscribe: Subscribe, welcome: Welcome) -> None:
        """Admit or refuse a subscriber, and send it the result."""
        connection = PublisherConnection(subscribe, welcome)
        peer = SubscriberPeer(transport, connection, self)
        transport.start(peer)
        refusal = connection.mismatch
        if refusal is None:
            earlier = self.connected.get(subscribe.subscriber)
            if earlier is not None:  # it has reconnected, and the end of its old connection is still unread
                self.lose(earlier)
            limit = self._settings.max_subscribers
            if limit is not None and len(self.connected) >= limit:
                refusal = (
                    f"max_subscribers={limit} subscribers are already connected: raise max_subscribers of "
                    "the publisher, or close another subscriber"
                )
        if refusal is not None:
            self.refused(subscribe, refusal)
            connection.refuse(refusal)
            peer.flush()
            transport.close()
            return
        self._admit(peer)

    def _admit(self, peer: SubscriberPeer) -> None:
        subscribe, settings = peer.connection.subscribe, self._settings
        first = subscribe.next if subscribe.publisher == self._publisher else 0
        items = [item for item in self._history if item.number >= first]
        for item in items:
            for block, _ in item.blocks:
                self.memory.leases.pin(block)
        self.connected[subscribe.subscriber] = peer
        if peer.transport.mover is not None:
            self.memory.movers.add(peer.transport.mover)
        backlog = peer.backlog = self.audience.join(peer, items)
        number = items[0].number if items else self.next_number
        drops = settings.slow == "drop"
        peer.connection.admit(backlog, Admit(settings.max_bytes, settings.max_behind, number, drops))
        peer.announce()
        peer.flush()
        self.progress()

    def transports(self) -> list[Transport]:
        """Return the connections of the subscribers."""
        return [peer.transport for peer in self.connected.values()]

    def report(self, inspector: InspectorPeer) -> None:
        """Send the statistics of the publisher to an inspector."""
        pid = inspector.connection.peer_pid
        logger.debug(
            "process %s inspects this publisher",
            pid,
            extra={"event": "publisher_inspected", "peer_pid": pid},
        )
        inspector.connection.report_publisher(self._statistics())
        inspector.flush()

    def broken(self, pid: int | None, reason: str) -> None:
        """Log that an unidentified connection or an inspector broke the protocol."""
        self.refusals.broken.add(None, pid, reason)

    def replaced(self, pid: int | None, connections: int) -> None:
        """Log that an unidentified connection is closed, because the number of newer ones is at the limit."""
        self._counts["subscribers_refused"] += 1
        self.refusals.replaced.add(pid, connections)

    def refused(self, opening: Hello | Subscribe, reason: str) -> None:
        """Log that a peer is refused."""
        self._counts["subscribers_refused"] += 1
        name = opening.subscriber if isinstance(opening, Subscribe) else opening.sender
        self.refusals.refused.add(name, opening.pid, reason)

    def listening_failed(self, error: OSError) -> None:
        """Log that no more subscribers can connect."""
        logger.critical(
            "no more subscribers can connect",
            exc_info=error,
            extra={"event": "reading_failed", "error": type(error).__name__, "reason": str(error)},
        )

    # Ends

    def disconnect(self, peer: SubscriberPeer, reason: str) -> None:
        """Send a subscriber the reason, and close its connection."""
        self.refusals.disconnected.add(peer.name, peer.pid, reason)
        peer.connection.close(Close(reason))
        peer.flush()
        self.lose(peer)

    def lose(self, peer: SubscriberPeer, *, has_closed: bool = False) -> None:
        """Remove a subscriber that is gone."""
        if self.connected.get(peer.name) is peer:
            self._forget(peer)
            self._counts["subscribers_lost"] += not has_closed
            if has_closed:
                self.memory.unpin(peer.backlog.close())
            # Blocks that the subscriber may still read stay pinned until its process has ended.
            self.departures.add(list(peer.backlog.pins()), peer.watch)
            self.memory.unpin(peer.backlog.pending_blocks())
        peer.transport.close()
        self.progress()

    def _forget(self, peer: SubscriberPeer) -> None:
        """Remove a subscriber, and add its counts to the totals."""
        del self.connected[peer.name]
        if peer.transport.mover is not None:
            self.memory.movers.discard(peer.transport.mover)
        self._counts["dropped"] += peer.backlog.dropped
        self._counts["deliveries"] += peer.backlog.delivered
        self.audience.leave(peer)

    async def close(self) -> None:
        """Announce the pending publications to all subscribers, and close the connections.

        Waits until the connections have accepted the last records. A connection that accepts none for a
        second is closed without them.
        """
        try:
            await self._announce_last()
        finally:
            for peer in list(self.connected.values()):
                self._forget(peer)
                peer.transport.close()
            while self.forget_oldest():
                pass
            self.departures.close()
            self.refusals.close()

    async def _announce_last(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        last = {peer: peer.backlog.rest() for peer in self.connected.values()}
        while True:
            for peer, items in list(last.items()):
                if peer.announce_last(items):
                    del last[peer]
            # A subscriber that does not read must not delay the end of the publisher.
            ends = {peer: max(began, peer.accepted_at) + _LAST_RECORDS_S for peer in last}
            last = {peer: items for peer, items in last.items() if loop.time() < ends[peer]}
            if not last:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(ends[peer] for peer in last)):
                    await self.changes.wait()

    def progress(self) -> None:
        """Wake the calls that wait for subscribers."""
        self.changes.wake()
        self._progressed()
