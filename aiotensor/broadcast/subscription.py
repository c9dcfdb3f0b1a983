"""The connections of a subscriber to publishers, and the publications that have arrived.

    (no session) --connected--> session, not admitted --Admit--> session, admitted
    ^                              |                              |
    '--------- loss, close --------+------------------------------'
    '--------- refusal, violation, disconnected for being slow: `failure` is set, until a call connects again

The end of a session is queued behind its publications, so calls learn of it only after receiving all of them.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from aiotensor.broadcast.arrived import Arrived
from aiotensor.broadcast.session import Session
from aiotensor.codec import TensorDecoder
from aiotensor.codec.payload import unpack, unpack_now
from aiotensor.errors import (
    AioTensorError,
    ClosedError,
    ProtocolError,
    UnavailableError,
    WouldBlockError,
    is_shortage,
)
from aiotensor.protocol.broadcast import Publish
from aiotensor.protocol.connection import Loss
from aiotensor.protocol.frames import VERSION, Subscribe
from aiotensor.receiving.mappings import Mappings
from aiotensor.runtime import tracing
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters, at_most
from aiotensor.statistics.counters import ErrorCounter, snapshot
from aiotensor.transports.base import Connector, ConnectorEvents, Transport
from aiotensor.types import Publication, SubscriberStatistics, Usage

__all__ = ["Subscription"]

logger = logger_of("subscriber")

T = TypeVar("T")


class Ended(NamedTuple):
    """The end of a session, which is queued behind its publications.

    Attributes:
        error: the error for the call that receives this item.
        is_clean: whether the publisher has closed, so that an iteration ends without an error.
    """

    error: AioTensorError
    is_clean: bool


class Subscription(Generic[T]):
    """Receive publications for one subscriber; belongs to the running loop.

    Args:
        subscriber: the id of the subscriber.
        connector: makes the `Connector`, given the object to notify.
        decoder: decodes the messages.
        max_mapped_bytes: the limit on the arena of a publisher in bytes; None for no limit.
        max_wait_s: the limit on waiting for a publication in seconds; None for no limit.
        counts: the counters of the subscriber.
        errors: counts the errors of its calls.

    Attributes:
        number: the number of the publication that was received last; None before the first.
        is_closed: whether the subscriber was closed.
    """

    def __init__(
        self,
        subscriber: str,
        connector: Callable[[ConnectorEvents], Connector],
        decoder: TensorDecoder[T],
        max_mapped_bytes: int | None,
        max_wait_s: float | None,
        counts: dict[str, int],
        errors: ErrorCounter,
    ) -> None:
        self.number: int | None = None
        self.is_closed = False
        self._subscriber = subscriber
        self._connector = connector(self)
        self._decoder = decoder
        self._max_mapped_bytes = max_mapped_bytes
        self._max_wait_s = max_wait_s
        self._counts = counts
        self._errors = errors
        self._mappings = Mappings(are_private=True)
        self._session: Session | None = None
        self._inbox: deque[Arrived | Ended] = deque()
        self._waiters = Waiters()
        self._writing = Waiters()  # calls that wait for the transport
        self._last_end: Ended | None = None
        self._ends = 0
        self._failure: AioTensorError | None = None  # while it is set, no publisher is searched for
        self._admitted: Session | None = None  # the latest admitted session
        self._evicted = 0  # publications dropped since the latest call
        self._publisher = ""  # the id of the latest publisher
        self._first = 0  # the number of its first publication since this subscriber found it
        self._next_to_arrive = 0  # the number of its next publication
        self._order = 0  # the number of publications that have arrived
        self._taken_from: Session | None = None
        self._next_to_take = 0

    def open(self) -> None:
        """Begin to connect; errors are those of `Connector.connect`."""
        self._connector.connect()

    async def close(self) -> None:
        """End all waits, answer all publications, and close; cancellation skips the waits."""
        self.is_closed = True
        self._waiters.wake()
        self._connector.close()
        while self._inbox:
            _finish(self._inbox.popleft())
        session = self._session
        try:
            self._mappings.freed.collect_all()
            await self._mappings.settle()
            if session is not None and not session.is_over:
                session.close()
                while not (session.transport.is_writable or session.transport.is_closed):
                    await self._writing.wait()
        finally:
            if session is not None:
                session.abort()
            self._mappings.close()

    def statistics(self) -> SubscriberStatistics:
        """Return the current state of the subscriber, and its totals since opening."""
        session, mappings = self._session, self._mappings
        is_connected = session is not None and not session.is_over
        arena_bytes = session.memory.arena_bytes if session is not None and is_connected else 0
        return snapshot(
            SubscriberStatistics,
            self._counts,
            publishers=int(is_connected),
            waiting=len(self._waiters),
            unclaimed=sum(isinstance(item, Arrived) for item in self._inbox),
            mapped_bytes=mappings.lingering_bytes + arena_bytes,
            leases=mappings.leases,
            leased_bytes=mappings.leased_bytes,
            peak_leased_bytes=mappings.peak_leased_bytes,
            errors=self._errors.counts(),
        )

    # Calls

    async def receive(self, *, has_limit: bool = True) -> Publication[T] | Ended:
        """Wait for the next publication or the end of a session; with `has_limit`, at most `max_wait_s`."""
        while True:
            found = self._next()
            if isinstance(found, Ended):
                return found
            if found is not None:
                publication = await self._opened(found)
                if publication is not None:
                    return publication
                continue
            ended = await self._change(self._max_wait_s if has_limit else None)
            if ended is not None:
                return ended

    def receive_nowait(self) -> Publication[T] | Ended | None:
        """Return the next publication or the end of a session; None if neither has arrived."""
        while True:
            found = self._next()
            if found is None or isinstance(found, Ended):
                return found
            try:
                found.open_now()
            except ProtocolError as error:
                _break(found, error)
                continue
            except BaseException:
                self._keep(found)
                raise
            try:
                message: T = unpack_now(self._decoder, [found.body], found.tensors)
            except BaseException as error:
                self._not_decoded(found, error)
                raise
            return self._received(found, message)

    def next_would_block(self) -> WouldBlockError:
        """Connect again if necessary, and return the error for a publication that has not arrived."""
        self._search()
        return self._would_block("")

    async def _opened(self, found: Arrived) -> Publication[T] | None:
        """Open a publication and decode its message; return None if the publisher broke the protocol."""
        try:
            await found.open()
        except ProtocolError as error:
            _break(found, error)
            return None
        except BaseException:
            self._keep(found)
            raise
        try:
            message: T = await unpack(self._decoder, [found.body], found.tensors)
        except BaseException as error:
            self._not_decoded(found, error)
            raise
        return self._received(found, message)

    def _not_decoded(self, found: Arrived, error: BaseException) -> None:
        # An error of the type, such as one of its `__post_init__`, would occur again.
        if is_shortage(error) or not isinstance(error, Exception):
            self._keep(found)
        else:
            self._counts["missed"] += found.missed or 0  # the error takes the place of the publication
            found.finish()

    def _received(self, found: Arrived, message: T) -> Publication[T]:
        found.finish()
        if self.is_closed:
            raise _closed()
        missed = found.missed or 0
        self.number = found.number
        self._counts["received"] += 1
        self._counts["missed"] += missed
        if found.trace_context is not None and (tracer := tracing.tracer) is not None:
            tracer.delivered("publication", found.trace_context, name=str(found.number))
        return Publication(message, found.number, missed, found.trace_context)

    def _next(self) -> Arrived | Ended | None:
        """Remove the next item from the inbox, and return it; None if the inbox is empty."""
        if self._session is not None and self._session.drops:
            self._session.read_withdrawals()
        if not self._inbox:
            return None
        item = self._inbox.popleft()
        if self._waiters and self._inbox:
            self._waiters.wake_one()
        if isinstance(item, Arrived) and item.missed is None:
            self._count_missed(item)
        return item

    def _count_missed(self, item: Arrived) -> None:
        """Set the number of publications missed before an item: skipped numbers, and evicted publications."""
        session = item.session
        if session is not self._taken_from:
            if self._taken_from is None or session.publisher != self._taken_from.publisher:
                self._next_to_take = session.first
            self._taken_from = session
        item.missed = item.number - self._next_to_take + self._evicted
        self._next_to_take = item.number + 1
        self._evicted = 0

    def _keep(self, found: Arrived) -> None:
        """Return a publication to its place in the inbox, from which a later call takes it."""
        if self.is_closed:
            found.finish()
            return
        index = 0
        for item in self._inbox:
            if isinstance(item, Ended) or item.order > found.order:
                break
            index += 1
        self._inbox.insert(index, found)
        self._waiters.wake_one()

    async def _change(self, max_wait_s: float | None) -> Ended | None:
        """Wait for the next item of the inbox; return the end of a session if another call has taken it."""
        self._search()
        ends = self._ends
        try:
            async with at_most(max_wait_s, self._overdue):
                await self._waiters.wait()
        except WouldBlockError:
            if not self._inbox:  # an item may have arrived just as the time ran out
                raise
        except asyncio.CancelledError:
            if self._inbox:
                self._waiters.wake_one()  # in place of this task, which may have been woken
            raise
        if self.is_closed:
            raise _closed()
        return self._last_end if self._ends != ends and not self._inbox else None

    def _search(self) -> None:
        """Connect again, unless this object is already searching for a publisher."""
        if self._failure is not None:
            self._failure = None
            self._connector.connect_now()

    def _overdue(self) -> WouldBlockError:
        return self._would_block(f" within {self._max_wait_s:g} s")

    def _would_block(self, within: str) -> WouldBlockError:
        session = self._session
        kind: type[WouldBlockError] = UnavailableError
        if session is None or session.is_over:
            state = "no publisher is connected: it is not open, or uses another endpoint"
        elif (pid := session.connection.peer_pid) is None:
            state = "no publisher has answered"
        else:
            kind = WouldBlockError
            state = f"a publisher (pid {pid}) is connected, but has published nothing since then"
        return kind(f"no publication has arrived{within}: {state}", messages=Usage(requested=1))

    # Events of the connector

    def connected(self, transport: Transport) -> None:
        """Begin a session.

        Raises:
            OSError: its first record could not be written.
        """
        hello = Subscribe(VERSION, os.getpid(), self._subscriber, self._publisher, self._next_to_arrive)
        self._session = Session(hello, transport, self._mappings, self._max_mapped_bytes, self)
        self._failure = None

    def connecting_failed(self, error: AioTensorError) -> None:
        """Queue the error of a permanent failure to connect."""
        self._failure = error
        self._queue_end(Ended(error, is_clean=False))

    # Events of the session

    def admitted(self, session: Session) -> None:
        """Record the publisher that has admitted this subscriber."""
        self._evict_older()
        self._admitted = session
        if session.publisher != self._publisher:
            self._publisher, self._next_to_arrive = session.publisher, session.first
            self._first = session.first
        session.first = self._first  # earlier sessions may have ended before a publication arrived

    def arrived(self, session: Session, publish: Publish) -> None:
        """Queue a publication; a closing subscriber drops it."""
        if self.is_closed:
            session.dropped(publish.number)
            return
        self._next_to_arrive = publish.number + 1
        self._order += 1
        self._inbox.append(Arrived(session, publish, self._mappings, self._order))
        if self._waiters:
            self._waiters.wake_one()

    def withdrawn(self, session: Session, number: int) -> None:
        """Drop a publication that the application has not begun to take."""
        for index, item in enumerate(self._inbox):
            if isinstance(item, Arrived) and item.session is session and item.number == number:
                if not item.is_taken:
                    del self._inbox[index]
                    session.dropped(number)
                return

    def ended(self, session: Session, loss: Loss) -> None:
        """Queue the end of a session, and connect again if that is possible."""
        if loss.is_retried:
            self._connector.reconnect()
            if not session.publisher:
                return  # a closing publisher has accepted the connection: no publication was missed
        else:
            self._failure = loss.error
        self._counts["publishers_lost"] += 1
        self._queue_end(Ended(loss.error, loss.is_clean))
        logger.log(
            logging.INFO if loss.is_clean else logging.WARNING,
            "%s",
            loss.error,
            extra={
                "event": "publisher_lost",
                "subscriber_id": self._subscriber,
                "peer_pid": session.connection.peer_pid,
                "reason": str(loss.error),
            },
        )

    def writing_resumed(self) -> None:
        """Wake the calls that wait until the transport accepts records again."""
        self._writing.wake()

    def _queue_end(self, ended: Ended) -> None:
        self._ends += 1
        self._last_end = ended
        if self._inbox and isinstance(self._inbox[-1], Ended):
            self._inbox.pop()
        self._inbox.append(ended)
        self._waiters.wake()

    def _evict_older(self) -> None:
        """Drop the items of all sessions before the latest, so that restarts do not fill the inbox."""
        last = self._admitted
        while self._inbox:
            item = self._inbox[0]
            if isinstance(item, Arrived) and item.session is last:
                return
            if isinstance(item, Ended) and len(self._inbox) == 1:
                return
            self._inbox.popleft()
            if isinstance(item, Arrived):
                if item.missed is None:
                    self._count_missed(item)
                self._evicted += (item.missed or 0) + 1
                item.finish()


def _break(found: Arrived, error: ProtocolError) -> None:
    """End the session of a publication that breaks the protocol."""
    found.finish()
    found.session.violated(error)


def _finish(item: Arrived | Ended) -> None:
    if isinstance(item, Arrived):
        item.finish()


def _closed() -> ClosedError:
    return ClosedError("this Subscriber was closed")
