"""Publish messages to subscribers.

    turn -> encoding -> memory, copies -> announcement to all subscribers     a failure rolls back all steps

Publications are numbered in the order of the calls, so one call at a time has the turn. With ``slow="wait"``,
a turn ends only when no subscriber is full, and further calls wait for it in their order.

    Hello --admitted--> connected --Close, violation, failed write, end of the connection--> gone
      |
      '--limit, version--> refused
"""

import contextlib
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import ClassVar, Self, get_args

import torch
from msgspec.structs import replace

from aiotensor.errors import ProtocolError, TooLargeError, WouldBlockError
from aiotensor.link.admission import Admission
from aiotensor.link.events import PeerLog
from aiotensor.link.messages import MessageSession
from aiotensor.link.outgoing import Outgoing
from aiotensor.link.session import LAST_RECORDS_S
from aiotensor.memory.arena import whole_pages
from aiotensor.memory.copying import CopyAbandonedError
from aiotensor.memory.gates import Gate, StuckError, WaitLimits
from aiotensor.memory.mappings import ForeignSegment
from aiotensor.memory.memory import Memory
from aiotensor.memory.placement import Allocation, new_empty, sizes_of
from aiotensor.memory.source import Source
from aiotensor.protocol.audience import Audience, Backlog, Item, SlowPolicy
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.frames import (
    MAX_ROWS,
    VERSION,
    Close,
    Discarded,
    Frame,
    Hello,
    PublisherReport,
    Release,
    Taken,
    bounded,
    encode_record,
)
from aiotensor.runtime import arguments, tracing
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import count_or_none, seconds_or_never
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters, timeout_at_close, until
from aiotensor.statistics.counters import ErrorCounter, new_counts, snapshot
from aiotensor.transports.address import TcpArguments
from aiotensor.transports.base import Listener, Transport
from aiotensor.transports.endpoints import Endpoint, route_to
from aiotensor.types import CurveKey, Published, PublisherStatistics, SubscriberLag, Usage

logger = logger_of("publisher")

_NAMED_SUBSCRIBERS = 8

_STUCK = (
    "all shared memory is used by this message and by tensors from allocate() that no subscriber uses and "
    "that can only be published after this message: publish them first, free them, or raise arena_bytes; an "
    "allocated tensor is copied if it has gaps or is not aligned, or if an earlier publication of it is in "
    "use"
)


class _OutgoingPublication(Outgoing, kw_only=True, eq=False):
    """A message that is being published."""

    publisher: "Publisher"

    max_inline_bytes: ClassVar[int] = sys.maxsize

    def check_fits(self, new_bytes: int, other_bytes: int) -> None:
        """Check that the message fits into the arena, and into the memory that a subscriber may use."""
        super().check_fits(new_bytes, other_bytes)
        nbytes, limit = new_bytes + other_bytes, self.publisher._max_held_bytes
        if limit is not None and nbytes > limit:
            raise TooLargeError(
                f"this message has {nbytes} bytes, more than max_held_bytes={limit} allows each subscriber "
                "to use: publish smaller parts, or raise max_held_bytes",
                limit=limit,
                requested=nbytes,
            )

    def make_space(self, nbytes: int) -> None:
        """Forget the oldest publications of the history until there is space for a block."""
        super().make_space(nbytes)
        self.publisher._make_space(nbytes)

    def no_space(self, nbytes: int, *, is_stuck: bool) -> WouldBlockError:
        """Return the error of a call that gets no block."""
        reason = _STUCK if is_stuck else "not enough shared memory is free"
        return self.publisher._would_block(reason, nbytes)

    def can_carry(self, allocation: Allocation, source: Source) -> bool:
        """Return whether an allocated tensor can be published in its block, which no subscriber uses."""
        # While an earlier publication of the block is in use, a subscriber that has written to it keeps its
        # own copies of the pages, which would hide the new publication.
        return super().can_carry(allocation, source) and not allocation.block.sent


class Publisher(LoopObject):
    """Publish messages to the subscribers that connect to an endpoint.

    Open it with ``async with``, once, and share it between the tasks of that event loop. Subscribers may
    start before it opens, or at any time later. Each tensor is placed in shared memory once, and all
    subscribers read it there. The memory is free again when all of them have freed the tensor.

    A subscriber receives, in order, the publications since it connected, each with the number of publications
    missed before it. A subscriber that is `max_behind` publications behind is slow, and `slow` decides what
    happens:

    - ``"wait"``: publishing waits until the subscriber has taken a publication, in the order of the calls.
    - ``"drop"``: the subscriber loses its oldest publication in favor of the new one.
    - ``"disconnect"``: the subscriber is disconnected, and receives the reason. It may connect again.

    Opening at an address waits while another process holds the lock of the socket's folder; cancellation has
    no side effects. Opening raises `UsageError` if another object listens there, and an `OSError` that names
    the folder if the folder cannot be used, as `TensorReceiver` does.

    Args:
        endpoint: the location of the publisher: an address such as ``unix:///run/user/1000/frames.sock``, to
            which only processes of this user may connect, or a `TensorQueue` or `multiprocessing.Queue`.
        arena_bytes: the maximum number of bytes of shared memory in use at once. Memory is in use as long as
            a tensor in it exists in any process, and as long as it belongs to the history or to a publication
            that was not taken.
        max_behind: the maximum number of publications that a subscriber may be behind.
        slow: the policy for slow subscribers.
        max_held_bytes: the maximum number of bytes of shared memory that one subscriber may use. A subscriber
            receives no publication that would exceed it, and so falls behind. None for no limit.
        history: the number of recent publications to keep for subscribers that connect later, less than
            `max_behind`. Fewer are kept while calls need their memory.
        max_subscribers: the maximum number of connected subscribers; None for no limit.
        keep_warm_s: the time in seconds after which unused shared memory is returned to the system; None
            keeps it.
        long_wait_s: the time in seconds after which a wait for slow subscribers or for memory is logged,
            once, with the slowest subscribers; None for never.
        max_wait_s: the time in seconds after which a wait for slow subscribers and earlier calls, for memory,
            or for subscribers to connect ends with `WouldBlockError`; it applies to each wait separately.
            None for never.
        secret_key: the CURVE secret key of this publisher, for a ``tcp://`` endpoint that other machines can
            reach.
        client_keys: the CURVE public keys of the subscribers and inspectors that may connect to a ``tcp://``
            endpoint.
        peer_timeout_s: the time in seconds without an answer after which a subscriber at a ``tcp://``
            endpoint is lost; None means 2 s, or no limit at a loopback address.

    Raises:
        TypeError: the endpoint or a limit has the wrong type.
        ValueError: the address is invalid, a limit is out of range, or two limits contradict each other.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        arena_bytes: int = 1 << 30,
        max_behind: int = 8,
        slow: SlowPolicy = "wait",
        max_held_bytes: int | None = None,
        history: int = 0,
        max_subscribers: int | None = 64,
        keep_warm_s: float | None = 30.0,
        long_wait_s: float | None = 10.0,
        max_wait_s: float | None = None,
        secret_key: CurveKey | None = None,
        client_keys: Collection[CurveKey] = (),
        peer_timeout_s: float | None = None,
    ) -> None:
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("Publisher")
        self._route = route_to(endpoint, TcpArguments(False, secret_key, None, client_keys, peer_timeout_s))
        self._shares_memory = not self._route.label.startswith("tcp:")
        self._max_bytes = arguments.count("arena_bytes", arena_bytes)
        self._arena_bytes = whole_pages(self._max_bytes)
        self._max_behind = arguments.count("max_behind", max_behind)
        self._slow = slow
        self._max_held_bytes = count_or_none("max_held_bytes", max_held_bytes)
        self._history_size = arguments.count("history", history, 0)
        self._max_subscribers = count_or_none("max_subscribers", max_subscribers)
        self._long_wait_s = seconds_or_never("long_wait_s", long_wait_s)
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        if slow not in get_args(SlowPolicy):
            raise ValueError(f'slow must be "wait", "drop" or "disconnect", got {slow!r}')
        if self._history_size >= self._max_behind:
            raise ValueError(
                f"history must be less than max_behind={self._max_behind}, got {history}: a new subscriber "
                "starts that many publications behind; raise max_behind"
            )
        if self._max_held_bytes is not None and self._max_held_bytes > self._max_bytes:
            raise ValueError(
                f"max_held_bytes must be at most arena_bytes={self._max_bytes}, got {max_held_bytes}: a "
                "subscriber cannot use more; lower it, or raise arena_bytes"
            )
        self._errors = ErrorCounter()
        self._counts = new_counts(PublisherStatistics)
        self._log = PeerLog("publisher")
        limits = WaitLimits(self._long_wait_s, self._max_wait_s, self._log_wait, self._overdue)
        self._memory = Memory(
            self._arena_bytes,
            seconds_or_never("keep_warm_s", keep_warm_s),
            self._counts,
            limits,
            stuck_elsewhere=self._held_by_callers,
            segment_closed=self._segment_closed,
        )
        self._turns: Gate[None] = Gate(
            1,
            limits,
            what="slow subscribers, or earlier calls",
            reason="subscribers were slow, or earlier calls waited",
            step="wait for a turn",
        )
        self._kept_turn: Ticket[None] | None = None  # kept until no subscriber is full
        self._next_number = 0
        self._history: deque[Item] = deque()
        self._subscribers: dict[str, _Subscriber] = {}  # the connected ones, by their ids
        self._audience: Audience[_Subscriber] = Audience(slow, self._max_behind, self._max_held_bytes)
        self._changes = Waiters()  # woken when a subscriber has joined, has answered, or is gone
        self._listener: Listener | None = None
        hello = Hello(
            VERSION,
            os.getpid(),
            "publisher",
            self._id,
            2 * self._max_behind,  # the last publications before a `Close` ignore the limit
            self._max_bytes,
            withdraws=slow == "drop",
        )
        self._admission = Admission(
            hello,
            "subscriber",
            self._log,
            self._refusal,
            self._admitted,
            self._refused,
            self._reports,
        )

    @property
    def id(self) -> str:
        """The id of this publisher, as its subscribers see it."""
        return self._id

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            self._memory.bind()
            self._listener = await self._route.listen(self._admission.connection_accepted)
            if self.affinity.is_closed:  # by another task, during the wait
                await self._close(self._listener)
                raise self.affinity.closed_error()
        except BaseException:
            self.affinity.close()
            self._memory.close()
            raise
        self.affinity.settle(self, self._route.label)
        return self

    async def publish(self, message: object) -> Published:
        """Publish a message to all connected subscribers, and return its number and delivery counts.

        Args:
            message: a tensor, None, bytes, a msgspec Struct, a dataclass, a list or a dict, nested to any
                depth, with tensors, arrays and objects with ``__dlpack__`` anywhere in it. It must not change
                until the call returns. A tensor from `allocate`, or a contiguous or permuted view of
                it, is not copied unless an earlier publication of it is in use.

        Waits for slow subscribers (with ``slow="wait"``) and for earlier calls in their order, for memory,
        and for the copies. It does not wait until subscribers connect or take the message; use
        `wait_for_subscribers` and `drain` for that. A cancelled call publishes nothing and releases its
        memory.

        Raises:
            TypeError: a value in the message cannot be encoded.
            UnsupportedTensorError: a tensor cannot be sent unchanged.
            TooLargeError: the message needs more memory than `arena_bytes` or `max_held_bytes` allows.
            WouldBlockError: a wait exceeded `max_wait_s`, or would never end, because tensors from `allocate`
                that are not published hold the memory.
            ClosedError: this publisher was closed, perhaps while waiting.
            OSError: the machine has no shared memory, threads or descriptors left.
        """
        with self._errors:
            self.affinity.check()
            with tracing.Traced("publish", self._route.label) as call:
                turn = await self._turns.acquire(1)
                publication = _OutgoingPublication(
                    self._memory, self._shares_memory, self.affinity, publisher=self
                )
                try:
                    await publication.place([message])
                    return self._announce(publication, call)
                finally:
                    self._end(turn, publication)

    def publish_nowait(self, message: object) -> Published:
        """Publish a message without waiting; it is encoded and copied on this thread.

        Arguments and other errors are those of `publish`.

        Raises:
            WouldBlockError: a subscriber is slow, another call is publishing or waiting, or too little memory
                is free.
        """
        with self._errors:
            self.affinity.check()
            with tracing.Traced("publish", self._route.label) as call:
                turn = self._turns.try_request(1)
                if turn is None:
                    raise self._would_block("a subscriber is slow, or another call is publishing", 0)
                publication = _OutgoingPublication(
                    self._memory, self._shares_memory, self.affinity, publisher=self
                )
                try:
                    publication.place_now([message])
                    return self._announce(publication, call)
                finally:
                    self._end(turn, publication)

    async def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory, which is published without a copy.

        Write to the tensor before you publish it, because subscribers read the same memory afterwards. Its
        memory is in use as long as the tensor, a view of it, or a received tensor exists.

        Args:
            shape: the sizes of the dimensions, in elements.
            dtype: the type of the elements.

        Waits for shared memory, in the order of the calls; cancellation releases it.

        Raises:
            TypeError: the dtype is not a torch dtype.
            UnsupportedTensorError: a tensor of this dtype cannot be sent.
            ValueError: a size is negative.
            TooLargeError: the tensor would be larger than `arena_bytes`, or it is empty and its other sizes
                are too large to address.
            WouldBlockError: the call waited for longer than `max_wait_s`.
            ClosedError: this publisher was closed, perhaps while waiting.
            OSError: the machine has no shared memory or descriptors left.
        """
        with self._errors:
            self.affinity.check()
            sizes, nbytes = sizes_of(shape, dtype, self._arena_bytes)
            if nbytes == 0:
                return new_empty(sizes, dtype)
            nbytes, memory = whole_pages(nbytes), self._memory
            self._make_space(nbytes)
            try:
                block = memory.try_acquire(nbytes) or await memory.acquire(nbytes)
                tensor = await memory.tensor_over(block, dtype, sizes, None)
            except StuckError:
                raise self._would_block(_STUCK, nbytes) from None
            except CopyAbandonedError:
                raise self.affinity.closed_error() from None
            self.affinity.check_open()
            memory.gate.refuse_if_stuck()
            return tensor

    async def wait_for_subscribers(self, count: int) -> None:
        """Wait until at least `count` subscribers are connected at the same time.

        Cancellation has no side effects.

        Raises:
            ValueError: the count is not positive, or exceeds `max_subscribers`.
            WouldBlockError: fewer subscribers are connected after `max_wait_s`.
            ClosedError: this publisher was closed, perhaps while waiting.
        """
        with self._errors:
            self.affinity.check()
            limit = self._max_subscribers
            number = arguments.count("count", count)
            if limit is not None and number > limit:
                raise ValueError(f"count must be at most max_subscribers={limit}, got {number}")
            await until(
                partial(self._has_subscribers, number),
                self._changes,
                self._max_wait_s,
                partial(self._too_few, number),
            )

    async def drain(self) -> None:
        """Wait until every subscriber has taken or lost all earlier messages, or is gone.

        Cancellation has no side effects.

        Raises:
            ClosedError: this publisher was closed, perhaps while waiting.
        """
        with self._errors:
            self.affinity.check()
            await until(partial(self._has_drained, self._next_number), self._changes)

    def statistics(self) -> PublisherStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        lags = self._lags()
        return snapshot(
            PublisherStatistics,
            self._counts | self._memory.usage(self._turns),
            subscribers=len(lags),
            max_subscribers=self._max_subscribers,
            lags=tuple(lags),
            max_behind=self._max_behind,
            behind=lags[0].behind if lags else 0,
            history=len(self._history),
            arena_bytes=self._max_bytes,
            dropped=self._counts["dropped"] + sum(lag.dropped for lag in lags),
            deliveries=self._counts["deliveries"] + sum(lag.delivered for lag in lags),
            subscriber_waits=self._turns.waited.waits(),
            errors=self._errors.counts(),
        )

    async def aclose(self) -> None:
        """Close the publisher; subscribers receive all publications, and waiting calls raise `ClosedError`.

        Waits until running copies have stopped and the connections have accepted all publications, but at
        most a second for a subscriber that does not read. It does not wait until subscribers take them; for
        that, call `drain` first. Cancellation closes the publisher immediately. Closing again has no effect.
        """
        self.affinity.check_place()
        if self.affinity.close() and self._listener is not None:
            with self.affinity.leaving():
                await self._close(self._listener)

    async def _close(self, listener: Listener) -> None:
        listener.close()
        self._admission.close()
        self._memory.freed.collect_all()
        self._turns.fail(self.affinity.closed_error)
        self._memory.gate.fail(self.affinity.closed_error)
        self._changes.wake()
        try:
            await self._announce_last()
            self._leave()
            await self._memory.aclose()
        finally:
            self._leave()
            self._memory.close()
            self._log.close()

    def _leave(self) -> None:
        for subscriber in list(self._subscribers.values()):
            self._forget(subscriber)
            subscriber.is_over = True
            subscriber.transport.close()
            subscriber.keep_pins(self._memory, list(subscriber.backlog.pins()))
        self._history.clear()

    async def _announce_last(self) -> None:
        """Announce the pending publications to all subscribers, and close the connections.

        Waits until the connections have accepted the last records. A connection that accepts none for a
        second is closed without them.
        """
        began = time.monotonic()
        last = {one: one.backlog.rest() for one in self._subscribers.values()}
        while True:
            for subscriber, items in list(last.items()):
                if subscriber.announce_last(items):
                    del last[subscriber]
            # A subscriber that does not read must not delay the end of the publisher.
            ends = {one: max(began, one.accepted_at) + LAST_RECORDS_S for one in last}
            last = {one: items for one, items in last.items() if time.monotonic() < ends[one]}
            if not last:
                return
            with contextlib.suppress(TimeoutError):
                async with timeout_at_close(max(0.0, min(ends[one] for one in last) - time.monotonic())):
                    await self._changes.wait()

    def _details(self) -> list[str]:
        details = [f"at {self._route.label}"]
        if self.affinity.is_open:
            details.append(f"{len(self._subscribers)} subscribers connected")
        return details

    # Messages

    def _make_space(self, nbytes: int) -> None:
        """Forget the oldest publications of the history until there is space for a block."""
        while self._history and self._memory.largest_free < nbytes:
            self._forget_oldest()

    def _held_by_callers(self) -> int:
        """Count the bytes of tensors from `allocate` that no subscriber uses.

        Publishing them would wait for the call that has the turn, which waits for this memory.
        """
        self._memory.freed.collect_all()
        return sum(ticket.amount for ticket, is_unsent in self._memory.holdings() if is_unsent)

    def _announce(self, publication: _OutgoingPublication, call: tracing.Traced) -> Published:
        """Announce a message to all subscribers; from this point on, nothing is rolled back."""
        number = self._next_number
        call.name = str(number)
        record = encode_record([publication.frame(number)])
        blocks, segments = tuple(publication.blocks), tuple(publication.segments)
        item = Item(number, record, time.monotonic(), blocks, segments)
        for subscriber in self._audience.to_disconnect():
            subscriber.disconnect(
                f"it was {subscriber.backlog.behind} publications behind, the limit max_behind of the "
                "publisher: receive faster, or raise max_behind"
            )
        self._next_number = number + 1
        uses = len(self._subscribers) + (self._history_size > 0)
        self._memory.pin([block for block, _ in blocks], uses)
        dropped = self._audience.publish(item)
        if self._history_size:
            self._history.append(item)
            # The history was empty when calls began to wait for memory, and has grown since.
            waiting = self._memory.gate.waiting
            while len(self._history) > self._history_size or (
                waiting and any(one.blocks for one in self._history)
            ):
                self._forget_oldest()
        for subscriber, lost in dropped:
            if lost.is_withdrawn:
                subscriber.withdraw(lost.item)
            else:
                self._memory.unpin([block for block, _ in lost.item.blocks])
        for subscriber in list(self._subscribers.values()):
            subscriber.announce()
        self._counts["published"] += 1
        self._counts["bytes_published"] += publication.nbytes
        return Published(number, len(self._subscribers), len(dropped))

    def _end(self, turn: Ticket[None], publication: _OutgoingPublication) -> None:
        """Release the memory that no subscriber uses, and the turn unless a slow subscriber delays it."""
        publication.release()
        if self._audience.delaying() and not self.affinity.is_closed:
            self._kept_turn = turn
        else:
            self._turns.release(turn)

    def _forget_oldest(self) -> None:
        self._memory.unpin([block for block, _ in self._history.popleft().blocks])

    def _segment_closed(self, segment: ForeignSegment) -> None:
        for subscriber in self._subscribers.values():
            subscriber.detach(segment)

    # Subscribers

    def _lags(self) -> list[SubscriberLag]:
        """List the subscribers, the slowest first."""
        now = time.monotonic()
        lags = [subscriber.lag(now) for subscriber in self._subscribers.values()]
        return sorted(lags, key=lambda lag: (-lag.behind, -lag.behind_s))

    def _has_subscribers(self, count: int) -> bool | None:
        self.affinity.check_open()
        return True if len(self._subscribers) >= count else None

    def _has_drained(self, before: int) -> bool | None:
        self.affinity.check_open()
        oldest = [backlog.oldest for backlog in self._audience.backlogs.values()]
        return None if any(item is not None and item.number < before for item in oldest) else True

    def _refusal(self, hello: Hello) -> str | None:
        if not hello.id:
            return "its hello has no id"
        limit = self._max_subscribers
        # If it has reconnected, its earlier connection ends with its admission.
        if limit is not None and len(self._subscribers) - (hello.id in self._subscribers) >= limit:
            return (
                f"max_subscribers={limit} subscribers are already connected: raise max_subscribers of the "
                "publisher, or close another subscriber"
            )
        return None

    def _refused(self, hello: Hello | None, reason: str) -> None:
        self._counts["subscribers_refused"] += 1

    def _admitted(self, transport: Transport, connection: Connection) -> None:
        subscriber = _Subscriber(transport, connection, self)
        earlier = self._subscribers.get(subscriber.id)
        if earlier is not None:  # the end of its connection is still unread
            earlier.end(earlier.connection.lost("it connected again", is_retried=True))
        hello = subscriber.hello
        first = hello.next if hello.publisher == self._id else 0
        items = [item for item in self._history if item.number >= first]
        for item in items:
            self._memory.pin([block for block, _ in item.blocks])
        transport.start(subscriber)
        self._subscribers[subscriber.id] = subscriber
        if transport.mover is not None:
            self._memory.movers.add(transport.mover)
        subscriber.backlog = self._audience.join(subscriber, items)
        connection.admit(items[0].number if items else self._next_number)
        subscriber.flush()
        subscriber.announce()
        self._progressed()

    def _lost(self, subscriber: "_Subscriber", loss: Loss) -> None:
        """Remove a subscriber whose connection has ended."""
        if self._subscribers.get(subscriber.id) is subscriber:
            self._forget(subscriber)
            self._counts["subscribers_lost"] += not loss.is_clean
            if loss.is_clean:
                self._memory.unpin(subscriber.backlog.close())
            subscriber.keep_pins(self._memory, list(subscriber.backlog.pins()))
            self._memory.unpin(subscriber.backlog.pending_blocks())
        self._progressed()

    def _forget(self, subscriber: "_Subscriber") -> None:
        """Remove a subscriber, and add its counts to the totals."""
        del self._subscribers[subscriber.id]
        if subscriber.transport.mover is not None:
            self._memory.movers.discard(subscriber.transport.mover)
        self._counts["dropped"] += subscriber.backlog.dropped
        self._counts["deliveries"] += subscriber.backlog.delivered
        self._audience.leave(subscriber)

    def _progressed(self) -> None:
        """Wake the calls that wait for subscribers, and release the turn if none delays it any more."""
        self._changes.wake()
        turn = self._kept_turn
        if turn is not None and not self._audience.delaying():
            self._kept_turn = None
            self._turns.release(turn)

    def _reports(self) -> list[PublisherReport]:
        """Return the statistics for an inspector, with the slowest subscribers."""
        logger.debug("a process inspects this publisher", extra={"event": "publisher_inspected"})
        statistics = self.statistics()
        return [PublisherReport(bounded(replace(statistics, lags=statistics.lags[:MAX_ROWS])))]

    # Errors and the log

    def _log_wait(self, what: str) -> None:
        """Log a long wait, with the subscribers that cause it."""
        held_by = self._slowest()
        logger.warning(
            "publishing has waited %g s for %s; %s",
            self._long_wait_s,
            what,
            held_by,
            extra={
                "event": "long_wait",
                "waited_s": self._long_wait_s,
                "waited_for": what,
                "subscribers": len(self._subscribers),
                "held_by": held_by,
            },
        )

    def _slowest(self) -> str:
        """Describe the slowest subscribers, and the memory of lost ones."""
        lags = [lag for lag in self._lags() if lag.behind or lag.held_bytes]
        described = [
            f"subscriber {lag.subscriber} (pid {lag.pid}) is {lag.behind} of {self._max_behind} publications "
            f"behind, for {lag.behind_s:.1f} s, and uses {lag.held_bytes} bytes"
            for lag in lags[:_NAMED_SUBSCRIBERS]
        ]
        if len(lags) > _NAMED_SUBSCRIBERS:
            described.append(f"and {len(lags) - _NAMED_SUBSCRIBERS} more")
        if kept_bytes := self._memory.kept_bytes:
            described.append(f"lost subscribers, which may still read them, keep {kept_bytes} bytes")
        return "; ".join(described) or "no subscriber is behind or uses memory"

    def _overdue(self, reason: str, _: int, nbytes: int) -> WouldBlockError:
        """Return the error for a wait that exceeded `max_wait_s`; see `WaitLimits`."""
        return self._would_block(f"{reason} for {self._max_wait_s:g} s", nbytes)

    def _would_block(self, reason: str, nbytes: int) -> WouldBlockError:
        """Return the error for a call that would have to wait, with the bytes that it requested."""
        lags, memory = self._lags(), self._memory.gate
        behind = lags[0].behind if lags else 0
        return WouldBlockError(
            f"{reason} ({self._slowest()}; {self._memory.describe(nbytes)})",
            messages=Usage(self._max_behind, behind, 1),
            bytes=Usage(memory.limit, memory.in_use, nbytes),
        )

    def _too_few(self, count: int) -> WouldBlockError:
        connected = len(self._subscribers)
        return WouldBlockError(
            f"{connected} of {count} subscribers have connected within {self._max_wait_s:g} s",
            messages=Usage(count, connected, count - connected),
        )


class _Subscriber(MessageSession):
    """The connection to one subscriber, and the publications that it has not taken."""

    def __init__(self, transport: Transport, connection: Connection, publisher: Publisher) -> None:
        super().__init__(transport, connection, publisher._log, publisher._memory)
        self.id = self.hello.id
        self.name = f"subscriber {self.id}"
        self.backlog = Backlog(1, None)
        self._publisher = publisher
        self._memory = publisher._memory

    def lag(self, now: float) -> SubscriberLag:
        """Return how far the subscriber is behind."""
        backlog = self.backlog
        oldest = backlog.oldest
        return SubscriberLag(
            self.id,
            self.hello.pid,
            backlog.behind,
            0.0 if oldest is None else max(0.0, now - oldest.at),
            backlog.held_bytes,
            backlog.delivered,
            backlog.dropped,
        )

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
            elif self.transfers:
                return False
            else:
                self.close()
        return transport.is_closed or (connection.is_closed and transport.is_writable)

    def withdraw(self, item: Item) -> None:
        """Withdraw a publication that was announced, or whose blocks are still being moved."""
        if self.stop_carrying(item.number):
            self.backlog.discarded(item.number)
            self._memory.unpin([block for block, _ in item.blocks])
        else:
            self.connection.discard(item.number)
            self.flush()

    def disconnect(self, reason: str) -> None:
        """Send the subscriber the reason, and close the connection."""
        self.log.disconnected.add(self.name, self.pid, reason)
        self.connection.close(Close(reason))
        self.flush()
        self.end(self.connection.lost(reason, is_retried=False))

    def _send(self, item: Item) -> None:
        """Announce a publication, after its blocks were moved."""
        blocks = [block for block, _ in item.blocks]
        if not self.attached.keys() >= set(item.segments):
            try:
                self.attach_all(item.segments)
            except OSError as error:
                self.unwritable(error)
            if self.is_over:
                return  # a segment could not be shared
        self.carry(item.number, blocks, partial(self._announce, item))

    def _announce(self, item: Item) -> None:
        self.connection.publish(item.number, item.record)
        self.flush()

    def moved(self) -> None:
        """Wake the calls that wait until the last publications are announced."""
        self._publisher._changes.wake()

    # Events

    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record."""
        backlog, freed = self.backlog, []
        try:
            for frame in frames:
                match frame:
                    case Taken():
                        for number in frame.messages:
                            backlog.taken(number)
                    case Release():
                        for block in frame.blocks:
                            backlog.released(block)
                            freed.append(block)  # unpinned even if the next block is a violation
                    case Discarded():
                        for number in frame.messages:
                            freed += [block for block, _ in backlog.discarded(number).blocks]
                    case Close():
                        self.closed(frame)
                        return
                    case _:
                        raise ProtocolError("it sent a frame that no subscriber sends")
        finally:
            if freed:
                self._memory.unpin(freed)
        self.announce()
        self._publisher._progressed()

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        self._publisher._lost(self, loss)

    def resume_writing(self) -> None:
        """Announce more publications, because the transport accepts records again."""
        super().resume_writing()
        if not self.connection.is_closed:
            self.announce()
        self._publisher._changes.wake()
