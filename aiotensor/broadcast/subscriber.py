"""Receive the messages of a publisher.

    (no session) --connected--> session, not admitted --Hello--> session, admitted
    ^                              |                              |
    '--------- loss, close --------+------------------------------'
    '--------- refusal, violation, disconnected for being slow: `_failure` is set, until a call connects again

The end of a session is queued behind its publications, so calls learn of it only after receiving all of them.
The publications outlive the session: their memory stays mapped until the application has taken them.
"""

import os
import secrets
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Self

from aiotensor.codec import TensorDecoder
from aiotensor.errors import (
    AioTensorError,
    RefusedError,
    UnavailableError,
    WouldBlockError,
    again,
    is_shortage,
)
from aiotensor.link.events import PeerLog
from aiotensor.link.messages import Arrived, MessageSession, trace_context_of
from aiotensor.link.session import all_accepted
from aiotensor.memory.mappings import Mappings
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.frames import (
    VERSION,
    Discard,
    Frame,
    Hello,
    Message,
)
from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import count_or_none, seconds_or_never
from aiotensor.runtime.waiting import Waiters, until
from aiotensor.statistics.counters import ErrorCounter, new_counts, snapshot
from aiotensor.transports.address import TcpArguments
from aiotensor.transports.base import Connector, Events, Transport
from aiotensor.transports.endpoints import Endpoint, route_to
from aiotensor.types import CurveKey, M, Publication, SubscriberStatistics, Usage

# The maximum number of records read before a publication is taken. Each takes a few microseconds.
_MAX_PENDING_RECORDS = 256


class _Ended(NamedTuple):
    """The end of a session, which is queued behind its publications.

    Attributes:
        error: the error for the call that receives this item.
        is_clean: whether the publisher has closed, so that an iteration ends without an error.
    """

    error: AioTensorError
    is_clean: bool


class Subscriber(LoopObject, Generic[M]):
    """Receive the messages of a publisher, in order.

    Open it with ``async with``, once, and share it between the tasks of that event loop. Opening does not
    wait for the publisher. If the publisher is lost, the next publisher that listens at the address replaces
    it. Until they are received, the publications of the last two connections are kept; those of earlier
    ones are dropped, and counted as missed.

    A received tensor is a view of shared memory; a small tensor has its own memory. A received tensor stays
    valid as long as it or a view of it exists, even after the publisher or this subscriber has ended. Writes
    to it are visible only in this process. The publisher can reuse the memory when all subscribers have freed
    their views.

    Args:
        endpoint: the location of the publisher: an address such as ``unix:///run/user/1000/frames.sock``, or
            the `TensorQueue` or `multiprocessing.Queue` of the publisher.
        type: the type of the messages, as for msgspec, or `torch.Tensor` for bare tensors. A message of
            another type raises `ProtocolError`. By default, messages may have any type.
        max_mapped_bytes: the maximum number of bytes of shared memory that a publisher may have (its
            `arena_bytes`); None for no limit.
        max_wait_s: the time in seconds after which `receive` stops waiting and raises `WouldBlockError`; None
            for never. Iterations wait without limit.
        secret_key: the CURVE secret key of this subscriber, for a ``tcp://`` endpoint on another machine.
        server_key: the CURVE public key of the publisher at a ``tcp://`` endpoint.
        peer_timeout_s: the time in seconds without an answer after which the publisher at a ``tcp://``
            endpoint is lost; None means 2 s, or no limit at a loopback address.

    Raises:
        TypeError: the endpoint or a limit has the wrong type, or msgspec cannot decode the type.
        ValueError: the address is invalid, or a limit is out of range.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        type: type[M] = Any,  # type: ignore[assignment]  # noqa: A002
        *,
        max_mapped_bytes: int | None = 64 << 30,
        max_wait_s: float | None = None,
        secret_key: CurveKey | None = None,
        server_key: CurveKey | None = None,
        peer_timeout_s: float | None = None,
    ) -> None:
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("Subscriber")
        self._route = route_to(endpoint, TcpArguments(True, secret_key, server_key, (), peer_timeout_s))
        self._decoder: TensorDecoder[M] = TensorDecoder(type)
        self._max_mapped_bytes = count_or_none("max_mapped_bytes", max_mapped_bytes)
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        self._errors = ErrorCounter()
        self._counts = new_counts(SubscriberStatistics)
        self._log = PeerLog("subscriber")
        self._mappings = Mappings(are_private=True)
        self._number: int | None = None
        self._connector: Connector | None = None  # created by `__aenter__`, because it belongs to a loop
        self._session: _Publisher | None = None
        self._failure: AioTensorError | None = None  # while it is set, no publisher is searched for
        self._inbox: deque[_ArrivedPublication | _Ended] = deque()
        self._waiters = Waiters()
        self._last_end: _Ended | None = None
        self._admitted_last: _Publisher | None = None
        self._next_to_arrive = 0  # the number of its next publication
        self._order = 0  # the number of publications that have arrived
        self._taken_from: _Publisher | None = None
        self._next_to_take = 0
        self._evicted = 0  # publications dropped since the latest call

    @property
    def id(self) -> str:
        """The id of this subscriber, as the publisher sees it."""
        return self._id

    @property
    def number(self) -> int | None:
        """The number of the publication that was received last; None before the first."""
        return self._number

    @property
    def missed(self) -> int:
        """The number of publications that were missed since opening, up to the one received last."""
        return self._counts["missed"]

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            self._mappings.freed.bind()
            self._connector = self._route.connector(Events(self._connected, self._not_connected))
            self._connector.connect()
        except BaseException:
            if self._connector is not None:
                self._connector.close()
            self._mappings.close()
            self.affinity.close()
            raise
        self.affinity.settle(self, self._route.label)
        return self

    async def receive(self) -> Publication[M]:
        """Return the next publication, once it has arrived.

        Waits at most `max_wait_s`. Cancellation loses nothing: the next call returns the publication. An
        error of the message type, such as one of its `__post_init__`, is raised as it is; the next call
        returns the next publication.

        Raises:
            PeerLostError: the publisher died, closed, or disconnected this subscriber, and all of its
                publications that have arrived were received. The next call waits for the next publisher.
            RefusedError: the publisher refused this subscriber because of a limit or its version, or exceeds
                `max_mapped_bytes`. The next call connects again.
            WouldBlockError: nothing has arrived within `max_wait_s`. It is an `UnavailableError` if no
                publisher has answered.
            ProtocolError: the message does not have the type of this subscriber. The next call returns the
                next publication.
            AccessDeniedError: the publisher runs as another user.
            UsageError: the process at the address is not a publisher.
            ClosedError: this subscriber was closed, perhaps while waiting.
            OSError: the machine has no memory or no thread left to decode the message. The next call tries
                again.
        """
        try:
            found = await self._receive(self._max_wait_s)
            if isinstance(found, _Ended):
                raise again(found.error)
        except Exception as error:
            self._errors.add(error)
            raise
        return found

    def receive_nowait(self) -> Publication[M]:
        """Return the next publication without waiting; it is decoded on this thread.

        Other errors are those of `receive`.

        Raises:
            WouldBlockError: nothing has arrived. It is an `UnavailableError` if no publisher has answered.
        """
        with self._errors:
            self.affinity.check()
            while True:
                found = self._next()
                if found is None:
                    self._search()
                    raise self._would_block("")
                if isinstance(found, _Ended):
                    raise again(found.error)
                try:
                    message: M = found.decode_now(self._decoder)
                except BaseException as error:
                    if self._not_decoded(found, error):
                        raise
                    continue
                return self._received(found, message)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Publication[M]:
        """Return the next publication; cancellation loses nothing.

        Ends when the publisher has closed and all of its publications were received, or when this subscriber
        is closed. Iterate again to wait for the next publisher. Waits without a time limit; errors are those
        of `receive`.
        """
        if self.affinity.is_closed:
            raise StopAsyncIteration
        try:
            found = await self._receive(None)
            if isinstance(found, _Ended):
                if found.is_clean:
                    raise StopAsyncIteration
                raise again(found.error)
        except AioTensorError as error:  # not the end of the iteration
            if self.affinity.is_closed:
                raise StopAsyncIteration from None
            self._errors.add(error)
            raise
        return found

    def statistics(self) -> SubscriberStatistics:
        """Return the current state and the totals since opening; also available after closing."""
        self.affinity.check_place()
        session, mappings = self._session, self._mappings
        is_connected = session is not None and not session.is_over
        arena_bytes = session.memory.arena_bytes if session is not None and is_connected else 0
        return snapshot(
            SubscriberStatistics,
            self._counts,
            publishers=int(is_connected),
            waiting=len(self._waiters),
            unclaimed=sum(isinstance(item, _ArrivedPublication) for item in self._inbox),
            mapped_bytes=mappings.lingering_bytes + arena_bytes,
            leases=mappings.leases,
            leased_bytes=mappings.leased_bytes,
            peak_leased_bytes=mappings.peak_leased_bytes,
            errors=self._errors.counts(),
        )

    async def aclose(self) -> None:
        """Close the subscriber; waiting calls raise `ClosedError`, and iterations end.

        Received tensors stay valid; the other publications are dropped. Waits until the connection has
        accepted the last answers, at most for a second. Cancellation closes the subscriber immediately.
        Closing again has no effect.
        """
        self.affinity.check_place()
        if self.affinity.close() and self._connector is not None:
            with self.affinity.leaving():
                await self._close(self._connector)

    async def _close(self, connector: Connector) -> None:
        self._waiters.wake()
        connector.close()
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, _ArrivedPublication):
                item.finish()
        session = self._session
        try:
            self._mappings.freed.collect_all()
            await self._mappings.settle()
            if session is not None and not session.is_over:
                session.close()
                await all_accepted([session])
        finally:
            if session is not None:
                session.abort()
            self._mappings.close()
            self._log.close()

    def _details(self) -> list[str]:
        return [f"at {self._route.label}"]

    # Publications

    async def _receive(self, max_wait_s: float | None) -> Publication[M] | _Ended:
        """Wait for the next publication or the end of a session."""
        self.affinity.check()
        while True:
            if (item := self._next()) is not None:
                found = item
            else:
                self._search()
                poll = partial(self._arrived_since, self._last_end)
                found = await until(poll, self._waiters, max_wait_s, self._overdue)
            if isinstance(found, _Ended):
                return found
            try:
                message: M = await found.decode(self._decoder)
            except BaseException as error:
                if self._not_decoded(found, error):
                    raise
                continue
            return self._received(found, message)

    def _arrived_since(self, end: _Ended | None) -> "_ArrivedPublication | _Ended | None":
        """Return the next item, or the end of a session after `end` that another call has taken."""
        self.affinity.check_open()
        found = self._next()
        return self._last_end if found is None and self._last_end is not end else found

    def _not_decoded(self, found: "_ArrivedPublication", error: BaseException) -> bool:
        """Keep or finish a publication; return whether the call raises the error."""
        if is_shortage(error) or not isinstance(error, Exception):
            self._keep(found)
            return True
        found.finish()
        if found.is_broken:
            return False  # the end of the session follows, with its own error
        # An error of the type, such as one of its `__post_init__`, would occur again, so it takes the place
        # of the publication.
        self._counts["missed"] += found.missed or 0
        return True

    def _received(self, found: "_ArrivedPublication", message: M) -> Publication[M]:
        if self.affinity.is_closed:
            raise self.affinity.closed_error()
        missed = found.missed or 0
        self._number = found.number
        self._counts["received"] += 1
        self._counts["missed"] += missed
        if found.trace_context is not None and (tracer := tracing.tracer) is not None:
            tracer.delivered("publication", found.trace_context, name=str(found.number))
        return Publication(message, found.number, missed, found.trace_context)

    def _next(self) -> "_ArrivedPublication | _Ended | None":
        """Remove the next item from the inbox, and return it; None if the inbox is empty."""
        if self._session is not None and self._session.withdraws:
            self._session.read_withdrawals()
        if not self._inbox:
            return None
        item = self._inbox.popleft()
        if self._waiters and self._inbox:
            self._waiters.wake_one()
        if isinstance(item, _ArrivedPublication) and item.missed is None:
            self._count_missed(item)
        return item

    def _count_missed(self, item: "_ArrivedPublication") -> None:
        """Set the number of publications missed before an item: skipped numbers, and evicted publications."""
        session = item.session
        if session is not self._taken_from:
            if self._taken_from is None or session.publisher != self._taken_from.publisher:
                self._next_to_take = session.first
            self._taken_from = session
        item.missed = item.number - self._next_to_take + self._evicted
        self._next_to_take = item.number + 1
        self._evicted = 0

    def _keep(self, found: "_ArrivedPublication") -> None:
        """Return a publication to its place in the inbox, from which a later call takes it."""
        if self.affinity.is_closed:
            found.finish()
            return
        index = 0
        for item in self._inbox:
            if isinstance(item, _Ended) or item.order > found.order:
                break
            index += 1
        self._inbox.insert(index, found)
        self._waiters.wake_one()

    def _search(self) -> None:
        """Connect again, unless this object is already searching for a publisher."""
        if self._failure is not None and self._connector is not None:
            self._failure = None
            self._connector.connect_now()

    def _overdue(self) -> WouldBlockError:
        return self._would_block(f" within {self._max_wait_s:g} s")

    def _would_block(self, within: str) -> WouldBlockError:
        session = self._session
        kind: type[WouldBlockError] = UnavailableError
        if session is None or session.is_over:
            state = "no publisher is connected: it is not open, or uses another endpoint"
        elif session.pid is None:
            state = "no publisher has answered"
        else:
            kind = WouldBlockError
            state = f"a publisher (pid {session.pid}) is connected, but has published nothing since then"
        return kind(f"no publication has arrived{within}: {state}", messages=Usage(requested=1))

    # The publisher

    def _connected(self, transport: Transport) -> None:
        """Begin a session; raises `OSError` if its first record could not be written."""
        publisher = "" if self._admitted_last is None else self._admitted_last.publisher
        hello = Hello(
            VERSION, os.getpid(), "subscriber", self._id, publisher=publisher, next=self._next_to_arrive
        )
        session = _Publisher(transport, Connection(hello, "the publisher"), self)
        session.begin()
        self._session = session
        self._failure = None

    def _not_connected(self, error: AioTensorError) -> None:
        """Queue the error of a permanent failure to connect."""
        self._failure = error
        self._queue_end(_Ended(error, is_clean=False))

    def _admitted(self, session: "_Publisher") -> None:
        """Record the publisher that has admitted this subscriber."""
        self._evict_older()
        earlier, self._admitted_last = self._admitted_last, session
        if earlier is None or session.publisher != earlier.publisher:
            self._next_to_arrive = session.first
        else:
            session.first = earlier.first  # earlier sessions may have ended before a publication arrived

    def _arrived(self, session: "_Publisher", message: Message) -> None:
        """Queue a publication; a closing subscriber drops it."""
        publication = _ArrivedPublication(session, message, order=self._order)
        publication.trace_context = trace_context_of(message)
        session.untaken += 1
        if self.affinity.is_closed:
            publication.finish()
            return
        self._next_to_arrive = message.message + 1
        self._order += 1
        self._inbox.append(publication)
        if self._waiters:
            self._waiters.wake_one()

    def _withdrawn(self, session: "_Publisher", number: int) -> None:
        """Drop a publication that the application has not begun to take."""
        for index, item in enumerate(self._inbox):
            if isinstance(item, _ArrivedPublication) and item.session is session and item.number == number:
                if not item.is_taken:
                    del self._inbox[index]
                    item.finish()
                return

    def _lost(self, session: "_Publisher", loss: Loss) -> None:
        """Queue the end of a session, and connect again if that is possible."""
        if loss.is_retried and self._connector is not None:
            self._connector.reconnect()
            if not session.publisher:
                return  # a closing publisher has accepted the connection: no publication was missed
        else:
            self._failure = loss.error
        self._counts["publishers_lost"] += 1
        self._queue_end(_Ended(loss.error, loss.is_clean))
        self._log.lost(loss, self._route.label, 0)

    def _queue_end(self, ended: _Ended) -> None:
        self._last_end = ended
        if self._inbox and isinstance(self._inbox[-1], _Ended):
            self._inbox.pop()
        self._inbox.append(ended)
        self._waiters.wake()

    def _evict_older(self) -> None:
        """Drop the items of all sessions before the latest, so that restarts do not fill the inbox."""
        last = self._admitted_last
        while self._inbox:
            item = self._inbox[0]
            if isinstance(item, _ArrivedPublication) and item.session is last:
                return
            if isinstance(item, _Ended) and len(self._inbox) == 1:
                return
            self._inbox.popleft()
            if isinstance(item, _ArrivedPublication):
                if item.missed is None:
                    self._count_missed(item)
                self._evicted += (item.missed or 0) + 1
                item.finish()


class _Publisher(MessageSession):
    """The connection to a publisher.

    Attributes:
        publisher: the id of the publisher; "" until it has admitted this subscriber.
        first: the number of the first publication that the publisher may send, over this connection or over
            an earlier one.
        withdraws: whether the publisher may withdraw publications.
    """

    name = "the publisher"

    def __init__(self, transport: Transport, connection: Connection, subscriber: Subscriber[Any]) -> None:
        super().__init__(
            transport,
            connection,
            subscriber._log,
            mappings=subscriber._mappings,
            max_mapped_bytes=subscriber._max_mapped_bytes,
        )
        self.publisher = ""
        self.first = 0
        self.withdraws = False
        self._records = 0  # the number of received records
        self._subscriber = subscriber

    def read_withdrawals(self) -> None:
        """Read the pending records of a publisher that drops publications.

        If the application has blocked its event loop, it then takes the newest publications, because
        publications that the publisher has dropped in the meantime are withdrawn first.
        """
        for _ in range(_MAX_PENDING_RECORDS):
            before = self._records
            if not self.is_over:
                self.transport.read_now()
            if self._records == before:
                return

    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record."""
        self._records += 1
        subscriber = self._subscriber
        for frame in frames:
            match frame:
                case Message():
                    subscriber._arrived(self, frame)
                case Discard():
                    subscriber._withdrawn(self, frame.message)
                case Hello():
                    if frame.is_admitted:
                        self._admitted(frame)
                case _:
                    self.control(frame, descriptors)
            if self.is_over:
                break

    def _admitted(self, hello: Hello) -> None:
        limit = self.max_mapped_bytes
        if limit is not None and hello.arena_bytes > limit:
            self.refuse(
                RefusedError(
                    f"its arena has {hello.arena_bytes} bytes, more than max_mapped_bytes={limit} of the "
                    "subscriber: raise max_mapped_bytes, or lower arena_bytes of the publisher"
                )
            )
            return
        self.memory.arena_bytes = hello.arena_bytes
        self.first, self.withdraws, self.publisher = hello.first, hello.withdraws, hello.id
        self._subscriber._admitted(self)

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        self.release_memory()
        self._subscriber._lost(self, loss)


class _ArrivedPublication(Arrived[_Publisher], kw_only=True, eq=False):
    """A publication, from its arrival until the application has taken it.

    Attributes:
        order: its position in the order of arrival.
        missed: the number of publications missed before it; None until the application begins to take it.
    """

    order: int
    missed: int | None = None
