"""A pipe between two ranks.

    waits for its turn --> waits for bytes --> placed --> announced --taken--> (ended)
       |                      |                  |           |
       '----------------------'------------------'-----------'--cancelled, failed, the peer is gone--> (ended)

Calls send in turn, so messages arrive in the order of the calls.

A message counts towards `max_bytes` until the peer has taken it and, if its tensor is in shared memory, has
freed the last view of the tensor. It counts as at least `LEAST_MESSAGE_BYTES`, so that the limit also covers
its frame and the entries for it at both ends. A message that is not in shared memory reserves addresses
there, which get no memory, so that one queue grants the bytes of all messages.
"""

import ipaddress
import operator
import os
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Self, TypeVar

import torch

from aiotensor.errors import AioTensorError, ClosedError, PeerLostError, RefusedError, WouldBlockError, again
from aiotensor.link.admission import Admission
from aiotensor.link.events import PeerLog
from aiotensor.link.messages import MessageSession
from aiotensor.memory.arena import Block, Extent
from aiotensor.memory.copying import QUICK_BYTES, CopyAbandonedError, bytes_of
from aiotensor.memory.gates import Gate, WaitLimits
from aiotensor.memory.mappings import ForeignSegment, ForwardedBlock, Mappings
from aiotensor.memory.memory import Memory
from aiotensor.memory.placement import plan_placement, too_large
from aiotensor.memory.source import DEVICE, Source, as_source, attributes_of
from aiotensor.memory.tensors import DTYPE_NAMES, MAX_INLINE_BYTES, own_copy
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.frames import ARENA, INLINE, VERSION, Close, End, Frame, Hello, Put, Taken
from aiotensor.ranks.meeting import Entry, Group, Meeting, WithdrawnError, membership_of
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import count, seconds_or_never
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.outage import Absence
from aiotensor.runtime.waiting import Waiters, at_most, until
from aiotensor.runtime.worker import in_thread
from aiotensor.statistics.counters import ErrorCounter, new_counts, snapshot
from aiotensor.transports.base import MAX_UNREAD_BYTES, Events, Transport
from aiotensor.types import PipeStatistics, Usage

T = TypeVar("T")

logger = logger_of("ranks")

LEAST_MESSAGE_BYTES = 4096

_KEEP_WARM_S = 30.0  # after which idle memory is returned to the system
_LONG_WAIT_S = 10.0  # after which a wait is logged

# A store sends no notifications, so it is polled, with delays that grow.
_FIRST_POLL_S, _LAST_POLL_S = 0.002, 0.25

# With at most this many messages in flight, the peer probably waits for the next one, so it is sent
# immediately.
_FEW_MESSAGES = 2

# A call waits for `max_bytes`, but not until the peer reads. In the queue of the transport, a message takes
# less than twice the bytes that it counts for, and an answer takes less than the bytes of its message.
_MESSAGES_AND_ANSWERS = 3


class RankPipe(LoopObject):
    """A pipe to another rank of a torch.distributed group, for tensors in order and in both directions.

    Both ranks open a pipe, each with the rank of the other as `peer`. Open it with ``async with``, once, and
    share it between the tasks of that event loop. Opening waits for the other rank. Two ranks may have
    several pipes, which are matched in the order in which they are opened: the first pipe of one rank is
    connected to the first pipe of the other.

    The group is only used to find the other rank: its store carries the address. The pipe's own connection
    carries the tensors, on one machine through shared memory, and otherwise over TCP. A pipe that has lost
    the other rank does not reconnect; open another one.

    A received tensor is a view of shared memory. It stays valid as long as it or a view of it exists, and
    counts towards `max_bytes` of the other rank until then. A tensor of at most 8 KiB has its own memory
    instead, and counts until it is received.

    Args:
        group: a process group or a store of torch.distributed.
        peer: the other rank, as a rank of this group.
        rank: the rank of this process; only for a store, which requires it.
        world_size: the number of ranks; only for a store, which requires it.
        max_bytes: the limit on the bytes of messages in flight in each direction, the same at both ranks.
            Each message counts as at least 4096 bytes. The bytes are free again when the other rank has
            received the message and freed its tensor.
        max_wait_s: the limit in seconds on each wait of `send`, `receive` and opening, which waits for the
            other rank to open its end; None for no limit.
        host: the numeric address of the network interface at which another machine reaches this rank; None
            for the one by which this rank reaches the store.
        encrypt: whether to encrypt the connection between machines with fresh CURVE keys; the same at both
            ranks. This connection is always authenticated by a secret in the store. On one machine, neither
            is needed.
        peer_timeout_s: the time in seconds without an answer after which a rank on another machine is lost;
            None means 2 s.

    Attributes:
        rank: the rank of this process in the group.
        peer: the other rank.

    Raises:
        TypeError: `group` is not a group, `rank` and `world_size` do not match its kind, or an argument has
            the wrong type.
        ValueError: the group has no rank `peer`, or this is the rank of this process; or `host` or a
            limit is invalid.
    """

    def __init__(
        self,
        group: Group,
        peer: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        max_bytes: int = 1 << 30,
        max_wait_s: float | None = None,
        host: str | None = None,
        encrypt: bool = False,
        peer_timeout_s: float | None = None,
    ) -> None:
        self.affinity = LoopAffinity("RankPipe")
        store, self.rank, size = membership_of(group, rank, world_size)
        self.peer = operator.index(peer)
        for one in (self.rank, self.peer):
            if not 0 <= one < size:
                raise ValueError(f"there is no rank {one} in a group of {size}")
        if self.peer == self.rank:
            raise ValueError(f"rank {peer} is this rank: a pipe connects two different ranks")
        self._max_bytes = count("max_bytes", max_bytes, LEAST_MESSAGE_BYTES)
        settings = f"max_bytes={self._max_bytes}, encrypt={bool(encrypt)} and protocol {VERSION}"
        entry = Entry(settings, host="" if host is None else str(ipaddress.ip_address(host)))
        timeout_s = seconds_or_never("peer_timeout_s", peer_timeout_s)
        self._new_meeting = partial(Meeting, store, self.rank, self.peer, entry, timeout_s, encrypt=encrypt)
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        self._label = f"pipe of rank {self.rank} to rank {self.peer}"
        self._errors = ErrorCounter()
        self._counts = new_counts(PipeStatistics)
        self._log = PeerLog("ranks")
        most = self._max_bytes // LEAST_MESSAGE_BYTES
        self._hello = Hello(VERSION, os.getpid(), "rank", max_messages=most, arena_bytes=self._max_bytes)
        self._session: _Rank | None = None
        self._failure: AioTensorError | None = None  # why no further message is sent or arrives
        self._changes = Waiters()
        # Messages to the peer
        limits = WaitLimits(_LONG_WAIT_S, self._max_wait_s, self._log_wait, self._would_block)
        self._turns: Gate[None] = Gate(1, limits._replace(long_wait_s=None), step="wait for a turn")
        self._memory = Memory(
            self._max_bytes,
            _KEEP_WARM_S,
            self._counts,
            limits,
            stuck_elsewhere=None,
            segment_closed=self._segment_closed,
        )
        self._turns.waited = self._memory.gate.waited  # one count of all waits
        self._announced: dict[int, Ticket[Extent] | None] = {}  # not taken yet; None for those in blocks
        # Messages of the peer
        self._mappings = Mappings()
        self._inbox: deque[tuple[int, torch.Tensor | None]] = deque()  # by their numbers
        self._receivers = Waiters()

    async def __aenter__(self) -> Self:
        """Wait for the other rank to open its end, at most `max_wait_s`.

        Cancellation leaves no connection, and the other rank waits for the next pipe.

        Raises:
            PeerLostError: the store cannot be reached, or the connection to the other rank was lost before
                both ends had joined. If the other rank dies before it is connected, the wait continues.
            ProtocolError: the entry of the other rank in the store is invalid.
            RefusedError: the other rank has different arguments, or another version of the library.
            WouldBlockError: the other rank has not opened its end within `max_wait_s`.
            UsageError: the other rank is on another machine, and `host` is required.
            ClosedError: this pipe was closed, perhaps while waiting.
            OSError: this process cannot listen, or has no descriptors or threads left.
        """
        self.affinity.enter()
        self._mappings.freed.bind()
        self._memory.bind()
        missing = f"rank {self.peer} has not opened its end"
        absence = Absence(self._label, lambda: missing)
        absence.begin()
        try:
            with self._errors:
                async with at_most(self._max_wait_s, partial(self._overdue, missing)):
                    while self._session is None:
                        await self._open(self._new_meeting())
                        self.affinity.check_open()
        except BaseException:
            self.affinity.close()
            self._abort()
            raise
        finally:
            absence.end()
        self.affinity.settle(self, self._label)
        return self

    async def _open(self, meeting: Meeting) -> None:
        """Connect to the pipe of the other rank with the same number, unless that one is withdrawn."""
        self._failure = None
        with suppress(WithdrawnError), ExitStack() as stack:
            try:
                route = await self._meet(meeting, lambda: meeting.route)
                if meeting.listens:
                    admission = Admission(
                        self._hello, "rank", self._log, self._refusal, self._admitted, lambda *_: None
                    )
                    stack.callback(admission.close)
                    listener = await route.listen(admission.connection_accepted)
                    stack.callback(listener.close)
                    meeting.ours.address = listener.address or meeting.ours.address
                else:
                    connector = route.connector(Events(partial(self._connected, stack), self._not_joined))
                    stack.callback(connector.close)
                    connector.connect()
                await self._meet(meeting, lambda: self._session)
            except (WithdrawnError, RefusedError):
                raise  # the other rank finds the reason in this entry, too
            except BaseException:
                # Before the connection is closed: after its end, the other rank reads this entry.
                await meeting.withdraw()
                raise

    async def _meet(self, meeting: Meeting, find: Callable[[], T | None]) -> T:
        """Exchange the entries again and again until a function finds something."""
        delay = _FIRST_POLL_S
        while (found := find()) is None:
            failure = self._failure
            await meeting.exchange()
            if failure is not None:  # since before the exchange: the other rank has not withdrawn the entry
                raise again(failure)
            with suppress(TimeoutError):
                await until(lambda: find() or self._failure, self._changes, delay)
            delay = min(2 * delay, _LAST_POLL_S)
        return found

    async def send(self, tensor: torch.Tensor | None) -> None:
        """Send a tensor or None.

        Returns when the tensor may be changed, which may be before the other rank receives the message.
        Waits for the earlier calls, and then until `max_bytes` allows the message, each at most `max_wait_s`.
        Messages arrive in the order of the calls, including concurrent ones. Large tensors are copied in a
        worker thread. If the call is cancelled, the message is not sent, and its bytes are free again.

        Args:
            tensor: a tensor on the CPU, of any shape, strides and dtype.

        Raises:
            UnsupportedTensorError: the tensor cannot be sent unchanged.
            TooLargeError: the tensor has more than `max_bytes`.
            WouldBlockError: one of the waits took longer than `max_wait_s`.
            PeerLostError: the other rank died, closed its end or broke the connection.
            ClosedError: this pipe was closed, perhaps while waiting.
            OSError: the machine has no memory left.
        """
        with self._errors:
            session = self._opened()
            self._check()
            source = None if tensor is None else as_source(tensor)
            del tensor
            nbytes = LEAST_MESSAGE_BYTES if source is None else max(source.nbytes, LEAST_MESSAGE_BYTES)
            if nbytes > self._max_bytes:
                raise too_large(nbytes, self._max_bytes, "max_bytes")
            memory, connection = self._memory, session.connection
            block: Block | ForwardedBlock | None = None
            ticket: Ticket[Extent] | None = None
            turn = self._turns.try_request(1) or await self._turns.acquire(1)
            try:
                number = connection.next_message
                if source is not None and nbytes > MAX_INLINE_BYTES:
                    block = await self._placed(session, source)
                    session.attach(block.place.segment)
                    self._check()  # writing may have failed, or the pipe was closed during the copy
                put = None if source is None else _put_of(number, source, block)
                if not isinstance(block, Block):
                    ticket = memory.gate.try_request(nbytes) or await memory.gate.acquire(nbytes)
                self._announced[number] = ticket
                if put is None:
                    connection.end(number)
                else:
                    connection.put(put)
                if block is not None:
                    memory.pin((block.number,))
                    session.pins[block.number] = 1
            except CopyAbandonedError:
                self._check()
                raise
            finally:
                if block is not None:
                    memory.unpin_owner(block)
                self._turns.release(turn)
            if len(self._announced) <= _FEW_MESSAGES or connection.records:
                session.flush()
            else:
                session.schedule_flush()
            self._check()  # writing may have failed
            self._counts["messages_sent"] += 1
            self._counts["bytes_sent"] += 0 if source is None else source.nbytes

    async def _placed(self, session: "_Rank", source: Source) -> Block | ForwardedBlock:
        """Forward a tensor that was received, or copy it to a new block; the caller owns the block."""
        memory = self._memory
        found = plan_placement(source, memory.allocations).forwardable
        if found is not None and session.transport.mover is None:
            forwarded = await memory.forward(source, found)
            if forwarded is not None:
                return forwarded
        block = memory.try_acquire(source.nbytes) or await memory.acquire(source.nbytes)
        await session.fill(memory, source, block, self)
        return block

    async def receive(self, *, copy: bool = False) -> torch.Tensor | None:
        """Return the next message of the other rank, once it has arrived.

        Waits at most `max_wait_s`. If the call is cancelled, the next call returns the message.

        Args:
            copy: whether to return a copy with its own memory, so that the other rank can use the bytes again
                at once; a worker thread copies large tensors.

        Raises:
            PeerLostError: the other rank died, closed its end or broke the connection, and all messages that
                had arrived were received.
            WouldBlockError: no message has arrived within `max_wait_s`.
            ClosedError: this pipe was closed, perhaps while waiting.
            OSError: the machine has no memory or no thread left for the copy. The next call tries again.
        """
        with self._errors:
            session = self._opened()
            overdue = partial(self._overdue, "no message has arrived")
            arrived = await until(self._next_arrived, self._receivers, self._max_wait_s, overdue)
            number, value = arrived
            if copy and value is not None:
                try:
                    is_quick = value.nbytes <= QUICK_BYTES
                    value = own_copy(value) if is_quick else await in_thread(own_copy, value)
                except BaseException:
                    insort(self._inbox, arrived)  # by the numbers, which are unique
                    # The error refers to this frame, whose variables would keep the tensor alive.
                    del arrived, value
                    self._receivers.wake_one()
                    raise
            del arrived
            self._counts["messages_received"] += 1
            self._counts["bytes_received"] += 0 if value is None else value.nbytes
            session.taken(number)
            return value

    async def drain(self) -> None:
        """Wait until the other rank has received all messages that were sent before this call.

        Cancellation has no side effects.

        Raises:
            PeerLostError: the other rank is gone, and some of these messages are lost.
            ClosedError: this pipe was closed.
        """
        with self._errors:
            self._opened()
            last = self._counts["messages_sent"]
            while next(iter(self._announced), last) < last:
                self._check()
                await self._changes.wait()

    def statistics(self) -> PipeStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        return snapshot(
            PipeStatistics,
            self._counts | self._memory.usage(self._turns),
            connected=int(self._session is not None and not self._session.is_over),
            in_flight=self._in_flight,
            waiting_receives=len(self._receivers),
            unclaimed=len(self._inbox),
            leases=self._mappings.leases,
            leased_bytes=self._mappings.leased_bytes,
            errors=self._errors.counts(),
        )

    async def aclose(self) -> None:
        """Close the pipe; the other rank can still receive all earlier messages.

        Waiting calls raise `ClosedError`. Received tensors stay valid; messages that have arrived here and
        were not received are dropped. Waits until the connection has accepted all messages. Cancellation
        skips that wait. Closing again has no effect.
        """
        self.affinity.check_place()
        if not self.affinity.close():
            return
        self._fail(ClosedError("this RankPipe was closed"))
        if (session := self._session) is None:
            return  # the call that opens the pipe raises the error
        with self.affinity.leaving(), ExitStack() as stack:
            stack.callback(self._abort)
            self._inbox.clear()
            self._mappings.freed.collect_all()
            if not session.is_over:
                session.close(Close(uses_memory=session.memory.leases > 0))
                await session.accepted()
            self._drop()
            await self._memory.aclose()
            await self._mappings.settle()

    def _abort(self) -> None:
        """Close without waiting."""
        self._drop()
        self._mappings.close()
        self._memory.close()
        self._log.close()

    def _drop(self) -> None:
        """Close the connection, and release what belongs to it."""
        self._inbox.clear()
        if self._session is not None:
            self._session.abort()
            self._session.keep_pins(self._memory)

    def _details(self) -> list[str]:
        return [f"rank {self.rank} to {self.peer}"]

    def _opened(self) -> "_Rank":
        """Return the session, after checking that this pipe may be used here."""
        self.affinity.check()
        if self._session is None:
            raise ClosedError("this RankPipe is still being opened")
        return self._session

    def _check(self) -> None:
        if self._failure is not None:
            raise again(self._failure)

    def _overdue(self, reason: str) -> WouldBlockError:
        return WouldBlockError(f"{reason} within {self._max_wait_s:g} s", messages=Usage(requested=1))

    # Opening

    def _refusal(self, hello: Hello) -> str | None:
        is_expected = self._session is None and hello.arena_bytes == self._max_bytes
        return None if is_expected else "this pipe is connected already, or has another max_bytes"

    def _admitted(self, transport: Transport, connection: Connection) -> None:
        session = _Rank(transport, connection, self)
        transport.start(session)
        connection.admit()
        self._join(session)
        session.flush()

    def _connected(self, stack: ExitStack, transport: Transport) -> None:
        session = _Rank(transport, Connection(self._hello, f"rank {self.peer}"), self)
        stack.callback(self._drop_unless_joined, session)
        session.begin()

    def _drop_unless_joined(self, session: "_Rank") -> None:
        if self._session is not session:
            session.abort()

    def _not_joined(self, error: AioTensorError) -> None:
        """Fail the opening of this pipe."""
        self._failure = error
        self._changes.wake()

    def _join(self, session: "_Rank") -> None:
        """Use a connection after the hello of the peer."""
        self._session = session
        if session.transport.mover is not None:
            self._memory.movers.add(session.transport.mover)
        session.transport.limit_queue(_MESSAGES_AND_ANSWERS * self._max_bytes + MAX_UNREAD_BYTES)
        self._changes.wake()

    # Messages to the peer

    @property
    def _in_flight(self) -> int:
        """The number of messages that were begun, and neither taken nor failed."""
        turns = self._turns
        return 0 if self._failure is not None else len(self._announced) + turns.in_use + turns.waiting

    def _segment_closed(self, segment: ForeignSegment) -> None:
        if self._session is not None:
            self._session.detach(segment)

    def _would_block(self, _: str, messages: int, nbytes: int) -> WouldBlockError:
        in_flight, gate = self._in_flight, self._memory.gate
        return WouldBlockError(
            "not enough bytes were free, or earlier calls were not complete: the peer has not taken "
            f"{in_flight} messages, or still uses tensors ({self._memory.describe(nbytes)})",
            messages=Usage(in_use=in_flight, requested=1),
            bytes=Usage(gate.limit, gate.in_use, nbytes),
        )

    def _log_wait(self, what: str) -> None:
        reason = f"a message has waited {_LONG_WAIT_S:g} s for {what}: {self._would_block('', 1, 0)}"
        pipe = self._label
        logger.warning("%s: %s", pipe, reason, extra={"event": "slow_peer", "pipe": pipe, "reason": reason})

    # Messages of the peer

    def _next_arrived(self) -> tuple[int, torch.Tensor | None] | None:
        """Remove the next message from the inbox; raise an error if none will arrive any more."""
        if self._inbox:
            return self._inbox.popleft()
        self._check()
        return None

    # The end

    def _fail(self, error: AioTensorError) -> None:
        """End all waiting and all further calls, except that messages that have arrived can be received."""
        self._failure = error
        self._turns.fail(partial(again, error))
        self._memory.gate.fail(partial(again, error))
        self._memory.abandon(self)
        self._changes.wake()
        self._receivers.wake()


def _put_of(message: int, source: Source, block: Block | ForwardedBlock | None) -> Put:
    """Return the frame that announces a tensor in its block, or that contains it."""
    dtype, shape, attributes = DTYPE_NAMES[source.dtype], tuple(source.shape), attributes_of(source)
    if block is None:
        payload = bytes_of(source)
        return Put(message, 0, dtype, shape, DEVICE, INLINE, payload, None, last=True, attributes=attributes)
    payload = block.place.describe(0)
    return Put(
        message, 0, dtype, shape, DEVICE, ARENA, payload, block.number, last=True, attributes=attributes
    )


class _Rank(MessageSession):
    """The connection to the other rank."""

    def __init__(self, transport: Transport, connection: Connection, pipe: RankPipe) -> None:
        super().__init__(transport, connection, pipe._log, pipe._memory, pipe._mappings)
        self.name = f"rank {pipe.peer}"
        self.memory.arena_bytes = pipe._max_bytes
        self._pipe = pipe

    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record."""
        pipe = self._pipe
        for frame in frames:
            match frame:
                case Put(last=True) | End(count=0):
                    value = self.mappings.open(self.memory, frame) if isinstance(frame, Put) else None
                    pipe._inbox.append((frame.message, value))
                    pipe._receivers.wake_one()
                case Taken():
                    for number in frame.messages:
                        if (ticket := pipe._announced.pop(number, None)) is not None:
                            pipe._memory.gate.release(ticket)
                    pipe._changes.wake()
                case Hello():
                    if frame.is_admitted:
                        pipe._join(self)
                case _:
                    self.control(frame, descriptors)
            if self.is_over:
                break

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        pipe = self._pipe
        if pipe._session is not self:
            pipe._not_joined(loss.error)
            return
        if isinstance(loss.error, RefusedError):  # only opening can be refused
            loss = loss._replace(error=PeerLostError(str(loss.error), pid=loss.error.pid))
        lost = pipe._in_flight
        pipe._fail(loss.error)
        for ticket in filter(None, pipe._announced.values()):
            pipe._memory.gate.release(ticket)
        self.keep_pins(pipe._memory)
        self.release_memory()
        pipe._counts["peers_lost"] += 1
        pipe._log.lost(loss, pipe._label, lost)
