"""One connected subscriber, as its publisher sees it: the transport, and the rules of the protocol on it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import msgspec

from aiotensor.broadcast.refusals import SubscriberRefusalLog
from aiotensor.errors import ProtocolError
from aiotensor.protocol.audience import Backlog, Item
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import ARENA
from aiotensor.protocol.publisher import PublisherConnection
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.process_end import ProcessEnd
from aiotensor.runtime.waiting import Waiters
from aiotensor.sending.memory import Memory
from aiotensor.sending.moving import PendingMove
from aiotensor.tensors.allocations import Block
from aiotensor.transports.base import Mover, Transport
from aiotensor.types import SubscriberLag

__all__ = ["SubscriberPeer"]

# The maximum number of moves that begin in one iteration of the event loop. Each takes tens of microseconds.
_QUICK_MOVES = 32


class PeerHost(Protocol):
    """The object that owns a connection to a subscriber; part of the publisher.

    Attributes:
        memory: the memory of the publisher.
        changes: woken when the transport accepts records again.
        refusals: logs violations and failed writes.
    """

    memory: Memory
    changes: Waiters
    refusals: SubscriberRefusalLog

    def lose(self, peer: "SubscriberPeer", *, has_closed: bool = False) -> None:
        """Remove a subscriber that is gone."""

    def progress(self) -> None:
        """Wake the calls that wait for subscribers, after an answer."""


class _Transfer(msgspec.Struct, eq=False):
    """A publication whose blocks are moved to a subscriber on another machine, before it is announced."""

    item: Item
    left: int  # the number of moves that have not ended
    moves: list[PendingMove] = []


class SubscriberPeer:
    """Announce publications to one subscriber, and handle its answers; belongs to the running loop.

    Args:
        transport: this end of the connection.
        connection: the connection object.
        host: the object that is notified.

    Attributes:
        backlog: the publications of the subscriber; empty until it is admitted.
        name: the id of the subscriber.
        pid: the process id that the subscriber stated.
        accepted_at: the time at which the transport last accepted records again or completed a move, by the
            clock of the loop.
    """

    def __init__(self, transport: Transport, connection: PublisherConnection, host: PeerHost) -> None:
        self.transport = transport
        self.connection = connection
        self.backlog: Backlog = connection.backlog
        self.name = connection.subscribe.subscriber
        self.pid = connection.subscribe.pid
        self.accepted_at = 0.0
        self._host = host
        self._attached: set[int] = set()
        self._transfers: dict[int, _Transfer] = {}  # by the numbers of the publications, the oldest first

    def lag(self, now: float) -> SubscriberLag:
        """Return how far the subscriber is behind."""
        backlog = self.backlog
        oldest = backlog.oldest
        return SubscriberLag(
            self.name,
            self.pid,
            backlog.behind,
            0.0 if oldest is None else max(0.0, now - oldest.at),
            backlog.held_bytes,
            backlog.delivered,
            backlog.dropped,
        )

    def watch(self, ended: Callable[[], object]) -> ProcessEnd:
        """Call a function once the process of the subscriber has ended."""
        return self.transport.watch_peer(ended)

    def announce(self) -> None:
        """Announce the pending publications for which the subscriber has capacity.

        The transport queues no publication, so the backlog contains all unread publications.
        """
        backlog, transport = self.backlog, self.transport
        while backlog.pending and transport.is_writable and not transport.is_closed:
            item = backlog.next()
            if item is None:
                return
            self._send(item)

    def announce_last(self, items: Iterator[Item]) -> bool:
        """Announce the last publications, and close; return whether the transport has accepted everything."""
        transport, connection = self.transport, self.connection
        while transport.is_writable and not (transport.is_closed or connection.is_closed):
            item = next(items, None)
            if item is not None:
                self._send(item)
            elif self._transfers:
                return False
            else:
                connection.close(Close())
                self.flush()
                transport.finish()
        return transport.is_closed or (connection.is_closed and transport.is_writable)

    def withdraw(self, item: Item) -> None:
        """Withdraw a publication that was announced, or whose blocks are still being moved."""
        transfer = self._transfers.pop(item.number, None)
        if transfer is None:
            self.connection.withdraw(item.number)
            self.flush()
            return
        for move in transfer.moves:
            move.stop()
        self.backlog.discarded(item.number)
        self._host.memory.unpin([block for block, _ in item.blocks])
        self._announce_moved()

    def _send(self, item: Item) -> None:
        """Announce a publication after attaching its segments and, between machines, moving its blocks."""
        if not self._attached.issuperset(item.segments):
            self.attach(item.segments)
        mover = self.transport.mover
        if mover is None:
            self._announce(item)
        else:
            blocks = dict(item.blocks)
            self._transfers[item.number] = transfer = _Transfer(item, len(blocks))
            self._begin_moves(mover, transfer, list(blocks))

    def _begin_moves(self, mover: Mover, transfer: _Transfer, blocks: Sequence[int]) -> None:
        """Begin to move blocks, in several iterations of the event loop if they are many."""
        if self.transport.is_closed or self._transfers.get(transfer.item.number) is not transfer:
            return  # the publication was withdrawn, or the subscriber is gone
        for number in blocks[:_QUICK_MOVES]:
            self._move(mover, transfer, number)
        if rest := blocks[_QUICK_MOVES:]:
            asyncio.get_running_loop().call_soon(self._begin_moves, mover, transfer, rest)
        self._announce_moved()

    def _move(self, mover: Mover, transfer: _Transfer, number: int) -> None:
        memory = self._host.memory
        place = memory.leases.grant_of(number).place
        if place is None:
            raise AssertionError("a block that is published has a place")
        block = Block(number, place)
        moved = partial(self._moved, transfer)
        transfer.moves.append(memory.moves.begin(mover, block, 0, place.view(), self, moved))

    def _moved(self, transfer: _Transfer, is_complete: bool) -> None:
        if is_complete:
            transfer.left -= 1
            self.accepted_at = asyncio.get_running_loop().time()
            if not transfer.left:
                self._announce_moved()
                self._host.changes.wake()

    def _announce_moved(self) -> None:
        """Announce the publications whose blocks were moved completely, in order."""
        transport = self.transport
        while self._transfers and transport.is_writable and not transport.is_closed:
            transfer = next(iter(self._transfers.values()))
            if transfer.left:
                break
            del self._transfers[transfer.item.number]
            self._announce(transfer.item)

    def _announce(self, item: Item) -> None:
        self.connection.announce(item)
        self.flush()

    def attach(self, segments: Sequence[int]) -> None:
        """Share the segments that the subscriber does not have yet."""
        by_number = {segment.number: segment for segment in self._host.memory.segments()}
        for number in segments:
            if number in self._attached:
                continue
            self.flush()
            segment = by_number[number]
            record = self.connection.attach(number, ARENA, segment.nbytes)
            try:
                self.transport.write(record, [segment.descriptor])
            except OSError as error:
                self._unwritable(error)
                return
            segment.is_attached = True
            self._attached.add(number)

    def detach(self, segment: int) -> None:
        """Detach a segment, if the subscriber has it."""
        if segment in self._attached:
            self._attached.remove(segment)
            self.connection.detach(segment)
            self.flush()

    def flush(self) -> None:
        """Write the pending frames now."""
        try:
            for record in self.connection.data_to_send():
                self.transport.write(record)
        except OSError as error:
            self._unwritable(error)

    def _unwritable(self, error: OSError) -> None:
        reason = f"writing to it failed: {error}"
        self._host.refusals.disconnected.add(self.name, self.pid, reason)
        self._host.lose(self)

    def _violated(self, error: ProtocolError) -> None:
        self._host.refusals.broken.add(self.name, self.pid, str(error))
        self._host.lose(self)

    # Events of the transport

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Process the frames of a record."""
        if descriptors:
            close_all(descriptors)  # a subscriber sends none
        host, connection = self._host, self.connection
        try:
            frames = connection.receive(data)
        except ProtocolError as error:
            self._violated(error)
            return
        finally:  # frames before an invalid one count
            freed, connection.freed = connection.freed, []
            if freed:
                host.memory.unpin(freed)
        if frames and isinstance(frames[-1], Close):
            host.lose(self, has_closed=not frames[-1].reason)
            return
        self.announce()
        host.progress()

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Remove the subscriber, because its connection has ended."""
        if isinstance(reason, ProtocolError):
            self._violated(reason)
        else:
            self._host.lose(self)

    def resume_writing(self) -> None:
        """Announce more publications, because the transport accepts records again."""
        self.accepted_at = asyncio.get_running_loop().time()
        if not self.connection.is_closed:
            self._announce_moved()
            self.announce()
        self._host.changes.wake()
