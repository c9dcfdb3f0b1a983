"""Send tensors to the receiver at an endpoint.

    permit -> a receiver that reads -> bytes -> placement -> announcement    a failure rolls back all steps

A message holds its permit until the receiver has taken all its tensors or either side has discarded it. A
block of shared memory is pinned by the tensor announced over it until the receiver releases it.

    OPEN --last tensor--> WHOLE --taken--> TAKEN
      |                     |
      +---------------------+--discarded, by either side--> DISCARDED
      |                     |
      '---------------------'--the receiver is gone--> LOST

When the receiver is gone, all messages in flight are lost, and waiting calls raise an error. Later sends wait
for the next receiver. Permits and memory are granted in the order of the calls. A wait that could never end
is refused: if messages that wait for more memory hold all of it, one of them raises an error.

A posted message is announced by its number at once, and a task copies its tensors afterwards, in order. A
failed copy discards the message: the receiver is notified, and `copied` raises the error.
"""

import asyncio
import enum
import os
import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
import torch
from torch.nn import Parameter

from aiotensor.errors import (
    AioTensorError,
    ClosedError,
    DiscardedError,
    ProtocolError,
    RefusedError,
    TooLargeError,
    UnavailableError,
    UsageError,
    WouldBlockError,
    again,
)
from aiotensor.link.events import ALLOCATED, PeerLog, log_long_wait
from aiotensor.link.session import Session
from aiotensor.memory.arena import WHERE, Block
from aiotensor.memory.copying import CopyAbandonedError, bytes_of
from aiotensor.memory.gates import Gate, StuckError, WaitLimits
from aiotensor.memory.mappings import ForeignSegment, ForwardedBlock
from aiotensor.memory.memory import Memory
from aiotensor.memory.placement import (
    Allocation,
    Plan,
    new_empty,
    plan_placement,
    sizes_of,
    too_large,
)
from aiotensor.memory.source import DEVICE, Sendable, Source, as_source, attributes_of
from aiotensor.memory.tensors import DTYPE_NAMES, with_attributes
from aiotensor.protocol.connection import OPEN as CONNECTED
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.frames import (
    ARENA,
    INLINE,
    MAX_TENSORS,
    VERSION,
    Attributes,
    Close,
    Discarded,
    Frame,
    Hello,
    Put,
    Release,
    Taken,
)
from aiotensor.runtime import arguments, tracing
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.outage import Outage
from aiotensor.runtime.waiting import Waiters, until
from aiotensor.statistics.counters import ErrorCounter, new_counts, snapshot
from aiotensor.transports.address import TcpArguments
from aiotensor.transports.base import Connector, Events, Mover, Transport
from aiotensor.transports.endpoints import Endpoint, route_to
from aiotensor.types import CurveKey, Holder, SenderStatistics, TensorHandle, Usage

logger = logger_of("sender")

# With at most this many messages in flight, the receiver probably waits for the next one, so it is sent
# immediately. With more, the messages announced in one iteration of the event loop share a record.
_FEW_MESSAGES = 2

_REMEMBERED_FAILURES = 256

_STUCK = (
    "all shared memory is held by messages that wait for more of it, including this one, so the wait would "
    "never end: raise arena_bytes or lower max_concurrent_videos"
)
_STUCK_IN_COPY = (
    "this tensor from allocate() must be copied because it has gaps or is not aligned, or an earlier "
    "receiver may still read it, and its own memory leaves no room for the copy: send a clone of it, and "
    "free it"
)


class MessageState(enum.Enum):
    """The state of a message; the value is its text in statistics."""

    OPEN = "being sent"
    WHOLE = "waiting to be taken"
    TAKEN = "taken, its tensors still in use"
    DISCARDED = "discarded"
    LOST = "lost"


# Names of the module, because each step of a message checks its state, and looking up a member of an enum is
# slow.
OPEN, WHOLE, TAKEN, DISCARDED, LOST = MessageState


class _Pending(NamedTuple):
    """A posted tensor that is still to be announced.

    Attributes:
        block: the block for its copy, or the forwarded block; None if there is none yet.
        is_copied: whether the block already contains the copy.
        context: the context of the call that posted it, with its span; None without tracing.
    """

    source: Source
    plan: Plan
    block: Block | ForwardedBlock | None
    is_copied: bool
    last: bool
    context: Context | None


class SentMessage(msgspec.Struct, eq=False):
    """A message of a sender.

    Attributes:
        permit: its permit, which is released when the message ends.
        state: its state.
        loss: the reason why it is LOST; None in other states.
        number: its number; None before it is announced.
        count: the number of its announced tensors.
        posted: the number of its posted tensors, announced or not.
        pending: its posted tensors that are still to be announced.
        copying: the task that copies and announces these; None if there are none.
        is_finished: whether all its tensors were posted, so that it becomes whole once they are announced.
        awaits_bytes: the number of its sends that wait for shared memory.
    """

    permit: Ticket[None]
    state: MessageState = OPEN
    loss: AioTensorError | None = None
    number: int | None = None
    count: int = 0
    posted: int = 0
    pending: deque[_Pending] = msgspec.field(default_factory=deque)
    copying: "asyncio.Task[None] | None" = None
    is_finished: bool = False
    awaits_bytes: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether its permit was released."""
        return self.state is not OPEN and self.state is not WHOLE


class TensorSender(LoopObject):
    """Send tensors to the receiver at the other end of an endpoint.

    Open it with ``async with``, once, and share it between the tasks of that event loop. Opening does not
    wait for the receiver: messages sent before the receiver starts wait for it. If a receiver is lost, the
    next receiver at the same endpoint replaces it: the messages in flight are lost with `PeerLostError`, and
    later sends go to the new receiver.

    Args:
        endpoint: the location of the receiver: an address such as ``unix:///run/user/1000/engine.sock``, a
            `TensorQueue`, or a `multiprocessing.Queue` if the application cannot use a `TensorQueue`. Such a
            queue only identifies a socket; nothing is put into it.
        max_concurrent_videos: the maximum number of messages in flight, that is, begun by this sender, and
            neither fully taken by the receiver nor discarded. Further sends wait in the order of the calls.
        arena_bytes: the maximum number of bytes of shared memory that this sender uses at once. Memory is
            in use as long as a tensor in it exists, here or at the receiver, taken or not. In a container,
            `arena_bytes` must fit into the memory limit: beyond the limit, the kernel kills a process, and
            no call raises an error. Opening logs a warning if `arena_bytes` does not fit.
        keep_warm_s: the time in seconds after which unused shared memory is returned to the system; None
            keeps it. A copy into new memory takes several times as long as a copy into warm memory, so the
            memory is kept for the next tensor, but not forever, because other programs may need it.
        long_wait_s: the time in seconds after which a wait for a permit or for memory is logged, once, with
            the holders, their resources, and how long they have held them; None for never.
        max_wait_s: the time in seconds after which a wait for a permit, for memory, or for a receiver
            that is not connected or does not read, ends with `WouldBlockError`; None for never.
            It applies to each wait separately. An overloaded server can use it to reject work in time.
        grace_s: the time in seconds for which calls may wait for a receiver that has not been started or was
            lost. After this time without a receiver, calls raise `UnavailableError` at once; with 0, they
            never wait for one. None for no limit but `max_wait_s`. It does not apply to `ready`.
        secret_key: the CURVE secret key of this sender, for a receiver at ``tcp://`` on another machine.
        server_key: the CURVE public key of that receiver.
        peer_timeout_s: the time in seconds without an answer after which the receiver at ``tcp://`` is lost;
            None means 2 s, or no limit at a loopback address.

    Raises:
        TypeError: the endpoint or a limit has the wrong type.
        ValueError: the address is invalid, or a limit is out of bounds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        max_concurrent_videos: int = 8,
        arena_bytes: int = 1 << 30,
        *,
        keep_warm_s: float | None = 30.0,
        long_wait_s: float | None = 10.0,
        max_wait_s: float | None = None,
        grace_s: float | None = None,
        secret_key: CurveKey | None = None,
        server_key: CurveKey | None = None,
        peer_timeout_s: float | None = None,
    ) -> None:
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("TensorSender")
        self._route = route_to(endpoint, TcpArguments(True, secret_key, server_key, (), peer_timeout_s))
        self._label = self._route.label
        self._where = f" at {self._label}" if "://" in self._label else ""  # for errors
        self._max_bytes = arguments.count("arena_bytes", arena_bytes)
        self._long_wait_s = arguments.seconds_or_never("long_wait_s", long_wait_s)
        self._max_wait_s = arguments.seconds_or_never("max_wait_s", max_wait_s)
        self._grace_s = arguments.grace_period(grace_s)
        self._errors = ErrorCounter()
        self._counts = new_counts(SenderStatistics)
        self._log = PeerLog("sender")
        limits = WaitLimits(self._long_wait_s, self._max_wait_s, self._log_wait, self._overdue)
        limit = arguments.count("max_concurrent_videos", max_concurrent_videos)
        self._permits: Gate[None] = Gate(limit, limits)
        self._memory = Memory(
            self._max_bytes,
            arguments.seconds_or_never("keep_warm_s", keep_warm_s),
            self._counts,
            limits,
            stuck_elsewhere=self._stuck_in_sends,
            segment_closed=self._segment_closed,
        )
        self._messages: dict[SentMessage, None] = {}  # in flight, the oldest first
        self._ends = Waiters()  # the calls that wait for messages or copies to end
        self._changes = Waiters()  # the calls that wait for a receiver, for capacity, or for the transport
        # The numbers of the allocated blocks whose sends wait, for a permit or for bytes. Such a block is not
        # freed during the wait, because the send refers to its tensor.
        self._await_permits: Counter[Block] = Counter()
        self._await_bytes: Counter[Block] = Counter()
        # The receiver
        self._connector: Connector | None = None  # created by `__aenter__`, because it belongs to a loop
        self._session: _Receiver | None = None
        self._failure: AioTensorError | None = None  # why this sender does not connect until a call asks
        self._refusal: RefusedError | None = None  # from a receiver that may still be running
        # Whether messages wait until a receiver admits this sender: after a refusal, and on a new connection
        # between machines.
        self._needs_admission = False
        self._outage = Outage(self._grace_s, lambda: self._fail_waiting(self._unavailable))
        self._next_message = 0
        # Posted messages
        self._copying: dict[int, SentMessage] = {}  # by their numbers
        self._post_failures: OrderedDict[int, Exception] = OrderedDict()  # of messages that were not copied

    @property
    def id(self) -> str:
        """The id of this sender, which its handles contain."""
        return self._id

    @property
    def receiver_id(self) -> str | None:
        """The id of the connected receiver; None while none is connected, or before it has answered."""
        theirs = None if self._session is None else self._session.connection.theirs
        return None if theirs is None else theirs.id

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            self._memory.bind()
            self._outage.begin()
            self._connector = self._route.connector(Events(self._connected, self._not_connected))
            self._connector.connect()
        except BaseException:
            self._abort()
            self.affinity.close()
            raise
        self.affinity.settle(self, self._label)
        return self

    async def ready(self, *, nbytes: int | None = None) -> None:
        """Wait until a receiver has admitted this sender, or until a tensor can be sent without waiting.

        Use it in a readiness probe, or to find out at startup whether a receiver would refuse this sender:
        opening a sender does not wait for the receiver. Returns immediately while the sender is admitted and
        connected.

        With `nbytes`, the call also waits until a permit and this much memory are free, no other call waits
        for them, and the receiver reads: `send_nowait` would then succeed. An application can wait in this
        way before it reads its next upload. The call acquires nothing, so other calls may use the capacity
        first; `message` acquires a permit.

        Args:
            nbytes: the bytes of shared memory that the next message needs, 0 for a permit without memory;
                None to wait only for the receiver.

        Waits at most `max_wait_s` in total, and for the next receiver if the receiver closes during the wait.
        Cancellation has no side effects.

        Raises:
            ValueError: `nbytes` is negative.
            TooLargeError: `nbytes` exceeds `arena_bytes`.
            RefusedError: the receiver refused this sender, because of a limit or its version.
            WouldBlockError: the call waited for longer than `max_wait_s`.
            PeerLostError: a receiver broke the protocol.
            AccessDeniedError: the receiver runs as another user.
            UsageError: the process at the address is not a receiver.
            ClosedError: this sender was closed, possibly during the wait.
        """
        with self._errors:
            self.affinity.check()
            if nbytes is not None:
                nbytes = arguments.count("nbytes", nbytes, 0)
                if nbytes > self._max_bytes:
                    raise too_large(nbytes, self._max_bytes)
            if self._obstacle(nbytes) is None:
                return
            if self._session is None:
                self._failure = None  # of an earlier attempt
                self._connect_now()
            if nbytes is not None:
                self._permits.on_release = self._memory.gate.on_release = self._changes.wake
            await until(
                partial(self._is_ready_for, nbytes),
                self._changes,
                self._max_wait_s,
                partial(self._not_ready, nbytes),
            )

    async def send(self, tensor: Sendable) -> TensorHandle:
        """Send a message of one tensor, and return the handle that names it for the receiver.

        When the call returns, the tensor has been copied and may be changed or freed, except for a tensor
        from `allocate`, whose memory the receiver reads. Sending never changes the tensor itself.

        Args:
            tensor: a dense tensor on the CPU of any shape and dtype, a numpy array, or an object with
                ``__dlpack__``. For a slice, only its own bytes are sent, not its entire storage.

        Waits for a permit, then for bytes of shared memory, each in the order of the calls, then for the
        copy, which runs in a worker thread. Cancellation releases all of them, even during the copy, and
        discards the message if the receiver has not taken it yet.

        If no wait is necessary, as for a small tensor with a free permit, the call does not suspend: it
        completes even in an expired timeout scope, and a long series of such calls blocks all other tasks.

        Raises:
            UnsupportedTensorError: the tensor would not arrive unchanged; no resources were taken for it.
            TooLargeError: the tensor is larger than `arena_bytes`; no resources were taken for it.
            WouldBlockError: the call waited for longer than `max_wait_s`, or the wait would never end. It is
                an `UnavailableError` if no receiver is connected.
            PeerLostError: the receiver died or closed.
            RefusedError: the receiver refused this sender, because of a limit or its version. The next call
                tries again.
            DiscardedError: the message was discarded before it was sent, for example by `discard_all`.
            ClosedError: this sender was closed, possibly during the wait.
            OSError: the machine has no shared memory or no descriptors left. At the memory limit of a
                container no error is raised: the kernel kills a process.
        """
        message: SentMessage | None = None
        span: tracing.Span | None = None
        try:
            if asyncio._get_running_loop() is not self.affinity.open_in:
                self.affinity.check()
            if (tracer := tracing.tracer) is not None:
                span = tracer.begin("send tensor", self._label)
            source = as_source(tensor)
            plan = plan_placement(source, self._memory.allocations)
            if plan.new_bytes > self._max_bytes and plan.forwardable is None:
                raise too_large(plan.new_bytes, self._max_bytes)
            if self._outage.is_too_long:
                raise self._unavailable()
            permit = self._permits.try_request(1)
            if permit is None:
                permit = await self._permit(plan.allocation)
            message = SentMessage(permit)
            self._messages[message] = None
            session, allocation = self._session, plan.allocation
            if (
                plan.new_bytes
                or session is None
                or not session.transport.is_writable
                or self._needs_admission
                or (allocation is not None and (allocation.block.lost or session.transport.mover is not None))
            ):
                handle = await self._put(message, source, plan, last=True)
            elif allocation is None:  # as `_put`, without a call
                handle = self._announce(message, source, None, last=True)
            else:
                offset = source.data_ptr() - allocation.start
                handle = self._announce(message, source, allocation.block, offset, last=True)
        except BaseException as error:
            try:
                if message is not None:
                    self._abandon(message)
                self._errors.add(error)
            finally:
                if span is not None:
                    span.end(error)
            raise
        if span is not None:
            span.end(name=_name_of(handle), nbytes=source.nbytes)
        return handle

    def send_nowait(self, tensor: Sendable) -> TensorHandle:
        """Send a message of one tensor without waiting; the copy runs on this thread.

        Use it for small tensors, or if an error is better than a wait. To a receiver at ``tcp://``, the copy
        is moved after the call, so later messages may arrive before this one, and a failure has the same
        effects as after `post`. Arguments and other errors are those of `send`.

        Raises:
            WouldBlockError: no permit or too few bytes are free, other calls already wait for them, no
                receiver is connected, or it is slow to read.
        """
        return self._post_in(None, tensor, last=True, copies_now=True)[1]

    def post(self, tensor: Sendable) -> TensorHandle:
        """Send a message of one tensor without waiting, and copy the tensor in the worker thread afterwards.

        For callers that must not wait, such as the hooks of an encoder: the call takes a permit and memory
        immediately, announces the number of the message, and returns. Later messages may arrive before this
        one. Arguments and other errors are those of `send`.

        The tensor must not change until `copied` returns for its handle, until the receiver has received it,
        or until `drain` returns. If the copy fails, the message is discarded, and the error is logged, raised
        by `copied`, and counted in `statistics`. Closing the sender waits for the copy; if closing is
        cancelled, the message is discarded.

        Raises:
            WouldBlockError: no permit or too few bytes are free, other calls already wait for them, no
                receiver is connected, or it is slow to read.
        """
        return self._post_in(None, tensor, last=True)[1]

    async def copied(self, handle: TensorHandle) -> None:
        """Wait until a tensor that was sent with `post` is copied, and may be changed or freed.

        A tensor from `allocate` is not copied: the receiver reads the same memory, as after `send`. For the
        handles of other calls, the call returns immediately. Cancellation has no side effects: the copy
        continues.

        Args:
            handle: the result of `post`. The sender remembers the errors of the last 256 failed messages.

        Raises:
            ValueError: the handle belongs to another sender.
            OSError: the machine has no memory left for the copy; the message was discarded.
            WouldBlockError: the message waited for a receiver that does not read, for longer than
                `max_wait_s`; the message was discarded.
            DiscardedError: either side discarded the message before the tensor was copied.
            PeerLostError: the receiver died or closed before the tensor was copied.
            ClosedError: this sender was closed, and closing was cancelled before the tensor was copied.
        """
        with self._errors:
            self.affinity.check()
            self._check_own(handle)
        number = handle.message
        while (message := self._copying.get(number)) is not None and message.count <= handle.tensor:
            await self._ends.wait()
        failure = self._post_failures.get(number)
        if failure is not None:  # it was counted when the copy failed
            raise again(failure)

    def message(self) -> "OpenMessage":
        """Begin a message of several tensors, which share one permit and arrive together or not at all.

        Use it as ``async with sender.message() as message:``, and send each tensor in the block with
        ``await message.send(tensor)``. Entering the block waits for a permit, at most `max_wait_s`; the end
        of the block completes the message. An exception or a cancellation that leaves the block discards the
        message.
        """
        with self._errors:
            self.affinity.check()
            return OpenMessage(self)

    async def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory, which is sent without a copy.

        A contiguous or permuted view of the tensor is also sent without a copy. Write to the tensor before
        you send it, because the receiver reads the same memory afterwards. Its bytes are in use as long as
        the tensor, a view of it, or a received tensor exists.

        Args:
            shape: the sizes of the tensor's dimensions, in elements.
            dtype: the type of the tensor's elements.

        Waits for bytes of shared memory, in the order of the calls; cancellation releases them. In the block
        of a message, call `OpenMessage.allocate` instead: only that call notices that messages wait for each
        other's memory. Other errors are those of `send`.

        Raises:
            TypeError: the dtype is not a torch dtype.
            UnsupportedTensorError: a tensor of this dtype cannot be sent.
            ValueError: a size is negative.
            TooLargeError: the tensor would be larger than `arena_bytes`; or it is empty, and its other sizes
                are too large to address.
            WouldBlockError: the call waited for longer than `max_wait_s`.
        """
        try:
            if asyncio._get_running_loop() is not self.affinity.open_in:
                self.affinity.check()
            return await self._allocate(shape, dtype, None)
        except BaseException as error:
            self._errors.add(error)
            raise

    def discard(self, handle: TensorHandle) -> None:
        """Discard the whole message of a handle, because it is no longer needed.

        The permit is free immediately, and the memory as soon as the receiver has released it. A message
        that was already taken or discarded is not affected.

        Raises:
            ValueError: the handle belongs to another sender.
        """
        with self._errors:
            self.affinity.check()
            self._check_own(handle)
        message = None if self._session is None else self._session.announced.get(handle.message)
        if message is not None:
            self._abandon(message)

    def discard_all(self) -> int:
        """Discard every message that the receiver has not taken yet, and return their number.

        The effect on each message is the same as with `discard`.
        """
        with self._errors:
            self.affinity.check()
        messages = list(self._messages)
        for message in messages:
            self._abandon(message)
        return len(messages)

    async def drain(self) -> None:
        """Wait until every message sent before this call was taken or discarded.

        Cancellation has no side effects.

        Raises:
            PeerLostError: the receiver died or closed before it took all of them.
            RefusedError: the receiver refused this sender, and took no message.
            ClosedError: this sender was closed during the wait.
        """
        with self._errors:
            self.affinity.check()
            sent = set(self._messages)
            while any(not message.has_ended for message in sent):
                await self._ends.wait()
                if self.affinity.is_closed:
                    break
            # The receiver may have taken all of them and then closed: no message is lost in that case.
            for message in sent:
                if message.state is LOST or not message.has_ended:
                    raise self._error(message)

    def statistics(self) -> SenderStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        permits = self._permits
        return snapshot(
            SenderStatistics,
            self._counts | self._memory.usage(permits),
            max_concurrent_videos=permits.limit,
            in_flight=permits.in_use,
            peak_in_flight=permits.peak,
            holders=tuple(self._holders()),
            permit_waits=permits.waited.waits(),
            errors=self._errors.counts(),
        )

    async def aclose(self) -> None:
        """Close the sender; complete messages can still be received, and waiting calls raise `ClosedError`.

        Waits until the tensors of posted messages are copied, until other copies in the worker thread have
        stopped, and until the connection has accepted all sent messages. It does not wait until the receiver
        takes them; for that, call `drain` first. Cancellation closes the sender immediately; if the
        connection has not accepted all messages by then, the receiver treats this sender as lost, and drops
        all its messages that were not received. Closing again has no effect.
        """
        self.affinity.check_place()
        if self.affinity.close() and self._connector is not None:
            with self.affinity.leaving():
                await self._close()

    async def _close(self) -> None:
        memory = self._memory
        memory.freed.collect_all()
        self._permits.fail(self._error)
        memory.gate.fail(self._error)
        try:
            for message in [one for one in self._messages if one.state is OPEN and not one.is_finished]:
                self._abandon(message)
            await self._settle_copies()
            # The session is closed before any other wait: without its last frame, the receiver treats this
            # sender, and all messages that it sent, as lost.
            self._changes.wake()
            session = self._session
            if session is not None:
                session.close()
                await session.accepted()
            self._disconnect()
            await memory.aclose()
        finally:
            self._abort()

    async def _settle_copies(self) -> None:
        """Wait until all copies of posted tensors have ended; cancellation stops them."""
        try:
            while self._copying:
                await self._ends.wait()
        except BaseException:
            _cancel_copies(self._copying.values())
            raise

    def _abort(self) -> None:
        """Close without waiting."""
        self._disconnect()
        self._memory.close()
        self._ends.wake()
        self._log.close()

    def _disconnect(self) -> None:
        if self._connector is not None:
            self._connector.close()
        self._outage.end()
        session, self._session = self._session, None
        if session is not None:
            session.is_over = True
            session.transport.close()
            session.keep_pins(self._memory)
        self._changes.wake()

    def _details(self) -> list[str]:
        details = [f"at {self._label}"]
        if self.affinity.is_open:
            permits = self._permits
            details.append(f"{permits.in_use} of {permits.limit} messages in flight")
        return details

    def _planned(self, value: Sendable) -> tuple[Source, Plan]:
        """Validate a tensor, and plan how to send it; errors are those of `send`."""
        source = as_source(value)
        plan = plan_placement(source, self._memory.allocations)
        if plan.new_bytes > self._max_bytes and plan.forwardable is None:
            raise too_large(plan.new_bytes, self._max_bytes)
        return source, plan

    def _check_own(self, handle: TensorHandle) -> None:
        if handle.sender != self._id:
            raise ValueError(f"this handle belongs to sender {handle.sender}, not to this one ({self._id})")

    # Messages

    async def _permit(self, allocation: Allocation | None) -> Ticket[None]:
        """Wait for a permit; the block of the tensor to send cannot be freed during this wait."""
        if allocation is None:
            return await self._permits.acquire(1)
        with _counted(self._await_permits, allocation):
            self._memory.gate.refuse_if_stuck()
            return await self._permits.acquire(1)

    def _begin_nowait(self, nbytes: int) -> SentMessage:
        """Assign a permit to a new message without waiting, or raise an error; `nbytes` is for its text."""
        if not self._is_ready:
            reason = self._unread()
            raise self._last_refusal() or self._would_block(reason, 1, nbytes)
        permit = self._permits.try_request(1)
        if permit is None:
            raise self._would_block("no permit is free", 1, nbytes)
        message = SentMessage(permit)
        self._messages[message] = None
        return message

    def _complete(self, message: SentMessage) -> None:
        """Complete a message after its last tensor."""
        session = self._session
        if message.number is None or session is None:
            self._end(message, DISCARDED)  # an empty message was never announced
            return
        session.connection.end(message.number)
        if len(self._messages) <= _FEW_MESSAGES:
            session.flush()
            self._check_message(message)
        else:
            session.schedule_flush()
        message.state = WHOLE
        self._counts["messages_sent"] += 1
        self._memory.gate.settle(message)  # no wait delays the release of its bytes

    def _abandon(self, message: SentMessage) -> None:
        """Discard a message, including any tensors already announced; no effect if it has ended."""
        if message.has_ended:
            return
        self._end(message, DISCARDED)
        self._counts["messages_discarded"] += 1
        session = self._session
        if message.number is not None and session is not None:
            del session.announced[message.number]
            session.connection.discard(message.number)
            session.schedule_flush()

    def _end(self, message: SentMessage, state: MessageState) -> None:
        """End a message with a final state: stop its copies and moves, and release its permit."""
        was_open = message.state is OPEN
        message.state = state
        del self._messages[message]
        if was_open or self._memory.movers:
            self._memory.abandon(message)
        if was_open:
            self._memory.gate.settle(message)
            self._changes.wake()  # its sends may wait for a receiver
        self._permits.release(message.permit)
        if self._ends:
            self._ends.wake()

    def _check_message(self, message: SentMessage) -> None:
        """Raise an error if a message has ended, either during a wait or because writing has failed."""
        if message.state is not OPEN:
            raise self._error(message)

    def _error(self, message: SentMessage | None = None) -> AioTensorError:
        """Return the error to raise in a waiting call, with the reason why a message cannot be sent."""
        if message is not None and message.loss is not None:
            return again(message.loss)
        if self.affinity.is_closed:
            return ClosedError("this TensorSender was closed")
        return DiscardedError("this message was discarded: begin a new one")

    def _fail_waiting(self, make_error: Callable[[], AioTensorError]) -> None:
        """End all current waits, each with a new error."""
        self._permits.fail_waiting(make_error)
        self._memory.gate.fail_waiting(make_error)
        self._changes.wake()

    # Tensors

    async def _put(self, message: SentMessage, source: Source, plan: Plan, *, last: bool) -> TensorHandle:
        """Wait for a receiver that reads and for memory, place a tensor, and announce it."""
        # Only this check bounds the transport's queue: no call adds to the queue while it is not empty.
        session = self._session
        if session is None or not session.transport.is_writable or self._needs_admission:
            await tracing.step("wait for a receiver", self._receiver_reads(message))
        elif message.state is not OPEN:
            raise self._error(message)
        allocation = plan.allocation
        if allocation is None:
            if not plan.new_bytes:
                return self._announce(message, source, None, last=last)
        elif not (plan.new_bytes or allocation.block.lost):
            offset = source.data_ptr() - allocation.start
            session = self._session
            if session is not None and session.transport.mover is not None:
                await self._move_allocated(session.transport.mover, message, source, allocation.block, offset)
            return self._announce(message, source, allocation.block, offset, last=last)
        if plan.forwardable is not None:
            if self._mover is None:
                forwarded = await self._memory.forward(source, plan.forwardable)
                if forwarded is not None:
                    return await self._put_into(forwarded, message, source, last=last)
            if source.nbytes > self._max_bytes:
                raise too_large(source.nbytes, self._max_bytes)
        block = self._memory.try_acquire(source.nbytes, message)
        if block is None:
            block = await self._block(source.nbytes, message, allocation)
        return await self._put_into(block, message, source, last=last)

    async def _put_into(
        self,
        block: Block | ForwardedBlock,
        message: SentMessage,
        source: Source,
        *,
        last: bool,
        is_copied: bool = False,
    ) -> TensorHandle:
        """Copy or move a tensor, announce it, and remove the pin of its block's owner in any case.

        Args:
            block: the block.
            message: the message.
            source: the tensor.
            last: whether it is the last tensor of the message.
            is_copied: whether the block already contains the tensor, so that it is only moved.
        """
        session = self._session
        if message.state is not OPEN or session is None:  # it may have ended while waiting
            self._memory.unpin_owner(block)
            raise self._error(message)
        try:
            if session.transport.mover is None and isinstance(block, Block) and not is_copied:
                await self._memory.copy(source, block, message)  # as `fill`, without a call
            elif isinstance(block, Block):
                await session.fill(self._memory, source, block, message, is_copied=is_copied)
        except CopyAbandonedError:
            raise self._error(message) from None
        try:
            if not session.transport.is_writable or session is not self._session or self._needs_admission:
                await tracing.step("wait for a receiver", self._receiver_reads(message))
            return self._announce(message, source, block, last=last)
        finally:
            block.is_owned = False  # as `unpin_owner`, without a call
            if not block.sent:
                self._memory.unpin_owner(block)

    async def _move_allocated(
        self, mover: Mover, message: SentMessage, source: Source, block: Block, offset: int
    ) -> None:
        """Move the bytes of a tensor from `allocate` to a receiver on another machine."""
        if self._session is not None:
            self._session.attach(block.place.segment)
        self._check_message(message)
        data = block.place.view()[offset : offset + source.nbytes]
        try:
            moving = self._memory.run_move(mover, block, offset, data, message)
            await tracing.step("move", moving, len(data))
        except CopyAbandonedError:
            raise self._error(message) from None
        self._check_message(message)

    def _announce(
        self,
        message: SentMessage,
        source: Source,
        block: Block | ForwardedBlock | None,
        offset: int = 0,
        *,
        last: bool,
    ) -> TensorHandle:
        """Announce a tensor with a `Put` frame, after which the receiver decides when its memory is free.

        Args:
            message: the message.
            source: the tensor.
            block: the block that contains its bytes; None to send them in the frame.
            offset: the position of the bytes in the block.
            last: whether it is the last tensor of the message.
        """
        session, number = self._session, None
        if message.state is not OPEN or session is None:
            raise self._error(message)
        if block is None:
            kind, payload = INLINE, bytes_of(source)
        else:
            number, place = block.number, block.place
            segment = place.segment
            if segment.number not in session.attached:
                session.attach(segment)
                self._check_message(message)  # writing may have failed
            block.sent += 1
            if isinstance(block, Block) and block.ticket.holder not in self._memory.gate.held:
                if last:  # no wait delays the release of its bytes
                    block.ticket.holder = message
                else:
                    self._memory.account(block, message)
                    self._memory.gate.refuse_if_stuck()
            session.pins[number] = session.pins.get(number, 0) + 1
            kind, payload = ARENA, WHERE.pack(segment.number, place.offset + offset)
        if message.number is None:
            message.number = session.connection.next_message
            session.announced[message.number] = message
        attributes, dtype, shape = None, DTYPE_NAMES[source.dtype], tuple(source.shape)
        # Nearly all tensors have no attributes, which this finds out without a call.
        if (
            type(source) is not torch.Tensor
            or source.requires_grad
            or 1 in shape
            or not source.is_contiguous()
        ):
            attributes = attributes_of(source)
        trace = None if (tracer := tracing.tracer) is None else tracer.context()
        tensor = message.count
        session.connection.put(
            Put(message.number, tensor, dtype, shape, DEVICE, kind, payload, number, last, attributes, trace)
        )
        if (last and len(self._messages) <= _FEW_MESSAGES) or session.connection.records:
            session.flush()
            if message.state is not OPEN:  # writing the frame failed
                raise self._error(message)
        else:
            session.schedule_flush()
        message.count = tensor + 1
        counts = self._counts
        counts["tensors_sent"] += 1
        counts["bytes_sent"] += source.nbytes
        if last:
            message.state = WHOLE  # as `_complete`, without a call
            counts["messages_sent"] += 1
            self._memory.gate.held.pop(message, None)  # as `settle`, without a call
        return TensorHandle(self._id, message.number, tensor, dtype, shape, DEVICE)

    async def _allocate(
        self, shape: Sequence[int], dtype: torch.dtype, message: SentMessage | None
    ) -> torch.Tensor:
        """Wait for a block, accounted to `message`, and return a tensor over it, which owns the block."""
        sizes, nbytes = sizes_of(shape, dtype, self._max_bytes)
        if nbytes == 0:
            return new_empty(sizes, dtype)
        memory = self._memory
        block = memory.try_acquire(nbytes, message)
        if block is None:
            block = await (memory.acquire(nbytes) if message is None else self._block(nbytes, message))
        if message is not None and message.state is not OPEN:  # it may have ended while waiting
            memory.unpin_owner(block)
            raise self._error(message)
        try:
            tensor = await memory.tensor_over(block, dtype, sizes, message)
        except CopyAbandonedError:
            raise self._error(message) from None
        if self.affinity.is_closed:
            raise self._error()
        return tensor

    async def _block(self, nbytes: int, message: SentMessage, allocation: Allocation | None = None) -> Block:
        """Wait for a block of shared memory for a message, and pin it.

        Args:
            nbytes: the size of the block.
            message: the message.
            allocation: the allocated memory that will be copied to the block; None for other tensors.

        Raises:
            WouldBlockError: the wait would never end, or exceeded `max_wait_s`.
            OSError: the machine has no descriptors or no addresses left.
        """
        message.awaits_bytes += 1
        try:
            if allocation is None:
                return await self._memory.acquire(nbytes, message)
            with _counted(self._await_bytes, allocation):
                return await self._memory.acquire(nbytes, message)
        except StuckError:
            reason = _STUCK if allocation is None else _STUCK_IN_COPY
            raise self._would_block(reason, 0, nbytes, for_receiver=False) from None
        finally:
            message.awaits_bytes -= 1

    def _segment_closed(self, segment: ForeignSegment) -> None:
        if self._session is not None:
            self._session.detach(segment)

    def _stuck_in_sends(self) -> int:
        """Return the bytes of allocated blocks whose sends wait, directly or indirectly, for other bytes."""
        blocks = set(self._await_bytes)
        waiting = sum(message.awaits_bytes > 0 for message in self._messages)
        if waiting == self._permits.in_use:
            blocks.update(self._await_permits)
        return self._memory.unaccounted_bytes(blocks)

    # Posted messages

    def _post_in(
        self, message: SentMessage | None, value: Sendable, *, last: bool = False, copies_now: bool = False
    ) -> tuple[SentMessage, TensorHandle]:
        """Post a tensor in a message, and return both the message and the handle.

        Errors are those of `post`.

        Args:
            message: the message; None to begin a new one, which is discarded if this call fails.
            value: the tensor.
            last: whether it is the last tensor of the message.
            copies_now: whether to copy the tensor on this thread, so that it may change afterwards.
        """
        with self._errors:
            self.affinity.check()
            with tracing.Traced("send tensor", self._label) as call:
                source, plan = self._planned(value)
                posted = message or self._begin_nowait(plan.new_bytes)
                try:
                    handle = self._post(posted, source, plan, last=last, copies_now=copies_now)
                except BaseException:
                    if message is None:
                        self._abandon(posted)
                    raise
                call.name, call.nbytes = _name_of(handle), source.nbytes
                return posted, handle

    def _post(
        self, message: SentMessage, source: Source, plan: Plan, *, last: bool, copies_now: bool
    ) -> TensorHandle:
        """Add a tensor to a posted message; a failure does not end the message."""
        if message.is_finished:
            raise DiscardedError("this message has ended: begin a new one")
        self._check_message(message)
        if message.posted >= MAX_TENSORS:
            raise _too_many(message.posted + 1)
        block, handle = None, None
        if plan.new_bytes:
            block = self._block_now(message, source, plan, copies_now=copies_now)
            if copies_now and block is not None:
                if isinstance(source, torch.Tensor):  # the strides of the tensor may change, too
                    attributes = Attributes(source.requires_grad, isinstance(source, Parameter))
                    source = with_attributes(source.detach(), attributes)
                if message.copying is None and self._mover is None:
                    try:
                        handle = self._announce(message, source, block, last=last)
                    finally:
                        self._memory.unpin_owner(block)
        elif message.copying is None and self._is_ready:
            if plan.allocation is None:
                handle = self._announce(message, source, None, last=last)
            elif self._mover is None:
                offset = source.data_ptr() - plan.allocation.start
                handle = self._announce(message, source, plan.allocation.block, offset, last=last)
        message.is_finished = last
        tensor, message.posted = message.posted, message.posted + 1
        if handle is not None:
            return handle
        if message.number is None:
            if self._session is None:
                raise AssertionError("an open message has no session")
            message.number = self._session.connection.begin()
            self._session.announced[message.number] = message
            self._session.schedule_flush()
        context = None if tracing.tracer is None else copy_context()
        message.pending.append(_Pending(source, plan, block, copies_now, last, context))
        if message.copying is None:
            self._copying[message.number] = message
            message.copying = asyncio.get_running_loop().create_task(self._send_pending(message))
            message.copying.add_done_callback(partial(self._copies_ended, message, message.number))
        dtype, shape = DTYPE_NAMES[source.dtype], tuple(source.shape)
        return TensorHandle(self._id, message.number, tensor, dtype, shape, DEVICE)

    def _block_now(
        self, message: SentMessage, source: Source, plan: Plan, *, copies_now: bool
    ) -> Block | ForwardedBlock | None:
        """Return a block for a tensor, filled if `copies_now`; None if it is to be forwarded later."""
        if plan.forwardable is not None and self._mover is None:
            if not copies_now:
                return None
            forwarded = self._memory.forward_now(source, plan.forwardable)
            if forwarded is not None:
                return forwarded
        if plan.new_bytes > self._max_bytes:
            raise too_large(plan.new_bytes, self._max_bytes)
        block = self._memory.try_acquire(plan.new_bytes, message)
        if block is None:
            raise self._would_block("not enough shared memory is free", 1, plan.new_bytes)
        if copies_now:
            try:
                self._memory.copy_now(source, block)
            except BaseException:
                self._memory.unpin_owner(block)
                raise
        return block

    def _finish(self, message: SentMessage) -> None:
        """Finish a posted message: it becomes whole once all its tensors are announced."""
        if not (message.has_ended or message.is_finished):
            message.is_finished = True
            if message.copying is None:
                self._complete(message)

    async def _send_pending(self, message: SentMessage) -> None:
        """Copy and announce the pending tensors in order, then complete the message if it is finished."""
        last = False
        while message.pending:
            source, plan, block, is_copied, last, context = message.pending.popleft()
            if context is not None:  # only this task uses the context that changes
                for variable, value in context.items():
                    variable.set(value)
            if block is None:
                await self._put(message, source, plan, last=last)
            else:
                await self._put_into(block, message, source, last=last, is_copied=is_copied)
            del source
            if self._ends:
                self._ends.wake()
        message.copying = None
        if message.is_finished and not last:
            self._complete(message)

    def _copies_ended(self, message: SentMessage, number: int, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            message.copying = None
            for pending in message.pending:
                if pending.block is not None:
                    self._memory.unpin_owner(pending.block)
            message.pending.clear()
            if error is not None and not message.has_ended:
                self._post_failed(message, number, error)
            else:  # the receiver is gone, the message was discarded, or the task was cancelled
                self._abandon(message)
                self._remember(number, self._error(message))
        if message.copying is None:
            self._copying.pop(number, None)
        self._ends.wake()

    def _post_failed(self, message: SentMessage, number: int, error: BaseException) -> None:
        """Discard the message of a failed copy, and log the error, since perhaps no call ever raises it."""
        self._errors.add(error)
        reason = str(error)  # the log must not keep the error: its traceback refers to the tensor
        logger.error(
            "copying a posted tensor failed, and its message was discarded: %s",
            reason,
            exc_info=None if isinstance(error, (AioTensorError, OSError)) else error,
            extra={
                "event": "post_failed",
                "sender_id": self._id,
                "error": type(error).__name__,
                "reason": reason,
            },
        )
        if isinstance(error, Exception):
            self._remember(number, again(error))
        self._abandon(message)

    def _remember(self, number: int, error: Exception) -> None:
        self._post_failures[number] = error
        if len(self._post_failures) > _REMEMBERED_FAILURES:
            self._post_failures.popitem(last=False)

    # The receiver

    @property
    def _is_admitted(self) -> bool:
        """Whether a receiver has admitted this sender and is still connected."""
        return self._session is not None and self._session.connection.state is CONNECTED

    @property
    def _is_ready(self) -> bool:
        """Whether a message can be announced.

        After a refusal, no message is announced until a receiver has admitted this sender: another refusal
        would lose the message silently, because its call would already have returned. Between machines, the
        same holds for each new connection.
        """
        session = self._session
        return session is not None and session.transport.is_writable and not self._needs_admission

    @property
    def _is_receiver_there(self) -> bool:
        """Whether a receiver is connected, or listens with a full backlog."""
        return self._session is not None or (self._connector is not None and self._connector.is_backlogged)

    @property
    def _mover(self) -> Mover | None:
        """The object that moves bytes to the receiver; None if memory is shared with it."""
        return None if self._session is None else self._session.transport.mover

    async def _receiver_reads(self, message: SentMessage) -> None:
        """Wait until a receiver is connected and reads; raise an error if the message ends before that."""
        self._check_message(message)  # a message lost during its copy must not wait for the next receiver
        await until(
            partial(self._reads_for, message),
            self._changes,
            self._max_wait_s,
            lambda: self._overdue(self._unread("was", "read nothing"), 1, 0),
        )

    def _reads_for(self, message: SentMessage) -> bool | None:
        self._check_message(message)
        if self._session is None and not self._outage.is_too_long:
            self._connect_now()
            self._check_message(message)
        if self._is_ready:
            return True
        if self._outage.is_too_long:
            raise self._unavailable()
        return None

    def _is_ready_for(self, nbytes: int | None) -> bool | None:
        if self.affinity.is_closed:
            raise self._error()
        if self._failure is not None:
            raise again(self._failure)
        return True if self._obstacle(nbytes) is None else None

    def _obstacle(self, nbytes: int | None) -> str | None:
        """Return the reason why `ready` must wait; None if it need not."""
        if not self._is_admitted or (nbytes is not None and not self._is_ready):
            return self._unread("was", "read nothing")
        if nbytes is None:
            return None
        permits, memory = self._permits, self._memory.gate
        if permits.waiting or permits.in_use == permits.limit:
            return "no permit was free"
        if nbytes and (memory.waiting or nbytes > self._memory.largest_free):
            return "not enough shared memory was free"
        return None

    def _connect_now(self) -> None:
        """Connect now, if there is no session and no attempt is scheduled."""
        if self._connector is not None:
            self._connector.connect_now()
        if not self._is_receiver_there:
            self._refusal = None  # the receiver that refused this sender has ended

    def _connected(self, transport: Transport) -> None:
        """Begin a session; raises `OSError` if its first record could not be written."""
        hello = Hello(
            VERSION,
            os.getpid(),
            "sender",
            self._id,
            self._permits.limit,
            self._max_bytes,
            self._next_message,
        )
        self._session = None
        session = _Receiver(transport, Connection(hello, "the receiver"), self)
        session.begin()
        self._session = session
        if transport.mover is not None:
            self._memory.movers.add(transport.mover)
            # A handle may reach the receiver over another channel before the first record of this session.
            # The receiver would then still consider this sender lost, and raise an error for the handle.
            self._needs_admission = True
        self._failure = None
        self._changes.wake()

    def _not_connected(self, error: AioTensorError) -> None:
        """Handle a permanent failure to connect."""
        self._failure, self._refusal = error, None
        self._lose_messages(error, None)

    def _admitted(self) -> None:
        """Let messages be announced, because the receiver has admitted this sender."""
        self._refusal, self._needs_admission = None, False
        self._outage.end()
        self._changes.wake()

    def _lost(self, session: "_Receiver", loss: Loss) -> None:
        """End all messages in flight, and connect again if the loss permits it."""
        if self._session is not session or self._connector is None:
            return  # this side has closed it
        self._session = None
        error = loss.error
        self._next_message = session.connection.next_message
        self._failure = error
        if loss.is_retried:
            self._failure = None
            self._connector.reconnect()
        self._refusal = error if isinstance(error, RefusedError) else None
        self._needs_admission |= self._refusal is not None
        self._outage.begin()
        lost = self._lose_messages(error, session)
        self._counts["receivers_lost"] += 1
        self._log.lost(loss, self._label, lost)

    def _lose_messages(self, error: AioTensorError, session: "_Receiver | None") -> int:
        """End all messages in flight and all waits, and return the number of messages."""
        self._fail_waiting(lambda: again(error))
        lost = list(self._messages)
        for message in lost:
            message.loss = error
            self._end(message, LOST)
        if session is not None:
            if session.transport.mover is not None:
                self._memory.movers.discard(session.transport.mover)
            session.keep_pins(self._memory)
        self._changes.wake()
        return len(lost)

    # Errors and the log

    def _holders(self) -> list[Holder]:
        """Return the holders of permits and memory, with the longest time first."""
        now = time.monotonic()
        held: dict[SentMessage | None, int] = dict.fromkeys(self._messages, 0)
        allocated_since = now
        for ticket, is_only_allocated in self._memory.holdings():
            holder = ticket.holder if isinstance(ticket.holder, SentMessage) else None
            if is_only_allocated and holder is not None and holder.has_ended:
                holder = None  # it was allocated in the block of a message, but not sent in it
            held[holder] = held.get(holder, 0) + ticket.amount
            if holder is None:
                allocated_since = min(allocated_since, ticket.since)
        holders = [
            Holder(None, ALLOCATED, nbytes, now - allocated_since)
            if message is None
            else Holder(message.number, message.state.value, nbytes, now - message.permit.since)
            for message, nbytes in held.items()
        ]
        return sorted(holders, key=lambda holder: -holder.seconds)

    def _log_wait(self, what: str) -> None:
        """Log a long wait for a resource, with its holders."""
        pid = None if self._session is None else self._session.pid
        log_long_wait(logger, self._long_wait_s or 0.0, what, pid, self._holders())

    def _overdue(self, reason: str, messages: int, nbytes: int) -> WouldBlockError:
        """Return the error of a wait beyond `max_wait_s`; the arguments are those of `_would_block`."""
        return self._would_block(f"{reason} for {self._max_wait_s:g} s", messages, nbytes)

    def _would_block(
        self, reason: str, messages: int, nbytes: int, *, for_receiver: bool = True
    ) -> WouldBlockError:
        """Return the error of a call that would have to wait; an `UnavailableError` without a receiver.

        Args:
            reason: the reason, with which the text of the error begins. Without a receiver, the text also
                contains the address.
            messages: the number of permits that the call requested.
            nbytes: the bytes of shared memory that the call requested; 0 if it waits for something else.
            for_receiver: whether a receiver could end the wait.
        """
        permits, memory = self._permits, self._memory.gate
        has_answered = self._session is not None and self._session.pid is not None
        is_available = has_answered or not for_receiver
        kind = WouldBlockError if is_available else UnavailableError
        if not is_available and self._where not in reason:
            reason += f", and no receiver has answered{self._where}"
        return kind(
            f"{reason} ({permits.in_use} of {permits.limit} messages and {self._memory.describe(nbytes)})",
            messages=Usage(permits.limit, permits.in_use, messages),
            bytes=Usage(memory.limit, memory.in_use, nbytes),
        )

    def _unavailable(self) -> AioTensorError:
        """Return the error of a call after a long outage: the last refusal, or an `UnavailableError`."""
        reason = f"{self._unread()}, and none has been for the grace period of {self._grace_s:g} s"
        return self._last_refusal() or self._would_block(reason, 1, 0)

    def _unread(self, is_: str = "is", is_slow: str = "is slow to read") -> str:
        """Return the reason why no message can be announced, in the present or the past tense."""
        if not self._is_receiver_there:
            return f"no receiver {is_} connected{self._where}"
        if self._session is None or self._session.transport.is_writable:
            return f"the receiver{self._where} has not answered"
        return f"the receiver {is_slow}"

    def _last_refusal(self) -> AioTensorError | None:
        """Connect now, and return the last refusal as a new error if its receiver may still be running."""
        self._connect_now()
        return self._refusal if self._refusal is None else again(self._refusal)

    def _not_ready(self, nbytes: int | None) -> WouldBlockError:
        reason = self._obstacle(nbytes) or "the sender was not ready"
        return self._overdue(reason, nbytes is not None, nbytes or 0)


class _Receiver(Session):
    """The connection to a receiver."""

    name = "the receiver"

    def __init__(self, transport: Transport, connection: Connection, sender: TensorSender) -> None:
        super().__init__(transport, connection, sender._log)
        self.announced: dict[int, SentMessage] = {}  # the messages in flight, by their numbers
        self._sender = sender

    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record."""
        sender = self._sender
        for frame in frames:
            match frame:
                case Taken() | Discarded():
                    is_taken = isinstance(frame, Taken)
                    for number in frame.messages:
                        message = self.announced.pop(number, None)
                        if message is not None:  # otherwise this side has discarded it
                            sender._counts["messages_discarded"] += not is_taken
                            sender._end(message, TAKEN if is_taken else DISCARDED)
                case Release():
                    sender._memory.unpin(frame.blocks, self.pins)
                case Hello():
                    if frame.is_admitted:
                        sender._admitted()
                case Close():
                    self.closed(frame)
                case _:
                    raise ProtocolError("it sent a frame that no receiver sends")

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        self._sender._lost(self, loss)

    def resume_writing(self) -> None:
        """Wake the calls that wait until the receiver reads."""
        super().resume_writing()
        self._sender._changes.wake()


class OpenMessage:
    """A message that is being sent, made by `TensorSender.message`."""

    def __init__(self, sender: TensorSender) -> None:
        self._sender = sender
        self._message: SentMessage | None = None
        self._is_beginning = False
        self._sending = 0  # the calls of `send` that have not returned

    def __repr__(self) -> str:
        message = self._message
        state = "new" if message is None else f"{message.state.value}, {message.count} tensors"
        return f"<OpenMessage {state}, of {self._sender!r}>"

    async def __aenter__(self) -> Self:
        sender = self._sender
        with sender._errors:
            if self._is_beginning or self._message is not None:
                raise UsageError("this message has already begun: begin another with sender.message()")
            sender.affinity.check()
            if sender._outage.is_too_long:
                raise sender._unavailable()
            self._is_beginning = True
            try:
                permit = sender._permits.try_request(1) or await sender._permits.acquire(1)
            finally:
                self._is_beginning = False
            self._message = SentMessage(permit)
            sender._messages[self._message] = None
        return self

    async def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory for this message, which is sent without a copy.

        Like `TensorSender.allocate`, but the memory is accounted to this message: if all of `arena_bytes` is
        held by messages that wait for more of it, one of the waiting calls raises `WouldBlockError`.

        Args:
            shape: the sizes of the tensor's dimensions, in elements.
            dtype: the type of the tensor's elements.

        Waits for bytes of shared memory, in the order of the calls; cancellation releases them.

        Raises:
            TypeError: the dtype is not a torch dtype.
            UnsupportedTensorError: a tensor of this dtype cannot be sent.
            ValueError: a size is negative.
            TooLargeError: the tensor would be larger than `arena_bytes`; or it is empty, and its other sizes
                are too large to address.
            WouldBlockError: all of `arena_bytes` is held by messages that wait for more of it, so that
                waiting would never end; or the call waited for longer than `max_wait_s`.
            PeerLostError: the receiver died or closed.
            DiscardedError: the message was discarded, by either side, or its block has ended.
            UsageError: the message has not begun yet.
            ClosedError: the sender was closed, possibly during the wait.
            OSError: the machine has no shared memory or no descriptors left.
        """
        with self._sender._errors:
            self._sender.affinity.check()
            return await self._sender._allocate(shape, dtype, self._open_message())

    async def send(self, tensor: Sendable) -> TensorHandle:
        """Send one tensor of the message, and return its handle.

        The receiver can take the tensor when the message is whole, after the block. An error in `send`
        releases the resources of this tensor and does not affect the message: the block may catch the error
        and continue. Cancellation does the same, unless the tensor was announced already: then the message
        is discarded, and its block ends with `DiscardedError`.
        Arguments, waiting, cancellation and errors are otherwise those of `TensorSender.send`.

        Raises:
            WouldBlockError: all of `arena_bytes` is held by messages that wait for more of it, so that
                waiting would never end; or the call waited for longer than `max_wait_s`.
            TooLargeError: the message already has the maximum number of tensors.
            DiscardedError: the message was discarded, by either side, or its block has ended.
            UsageError: the message has not begun yet.
        """
        sender = self._sender
        with sender._errors:
            if self._message is None:
                raise UsageError(_NOT_BEGUN)
            sender.affinity.check()
            with tracing.Traced("send tensor", sender._label) as call:
                source, plan = sender._planned(tensor)
                message = self._open_message()
                if message.count + self._sending >= MAX_TENSORS:
                    raise _too_many(message.count + self._sending + 1)
                self._sending += 1
                try:
                    handle = await sender._put(message, source, plan, last=False)
                finally:
                    self._sending -= 1
                call.name, call.nbytes = _name_of(handle), source.nbytes
                return handle

    def _open_message(self) -> SentMessage:
        """Return the message if tensors can be added to it; otherwise, raise an error."""
        message = self._message
        if message is None:
            raise UsageError(_NOT_BEGUN)
        if message.loss is not None:
            raise self._sender._error(message)
        if message.state is not OPEN:
            raise DiscardedError("this message has ended: begin a new one")
        return message

    def finish(self) -> None:
        """Complete the message now rather than at the end of the block.

        No further tensor can be sent in it. If the block then ends with an exception, the message is
        discarded nevertheless, unless the receiver has already taken it. Finishing again has no effect.

        Raises:
            DiscardedError: the message was discarded, by either side.
            PeerLostError: the receiver died or closed.
            ClosedError: the sender was closed.
            UsageError: a `send` of this message was not awaited, and the message is discarded; or the message
                has not begun yet.
        """
        message, sender = self._message, self._sender
        with sender._errors:
            if message is None:
                raise UsageError(_NOT_BEGUN)
            if message.is_finished:
                return
            if message.has_ended:
                raise sender._error(message)  # not taken, because it was not whole
            if self._sending:
                sender._abandon(message)
                raise UsageError(
                    "a send of this message was not awaited: await every message.send in its block"
                )
            message.is_finished = True
            sender._complete(message)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._message is None or self._sender.affinity.is_left_in_child(error):
            return
        if kind is not None:
            self._sender._abandon(self._message)
        else:
            self._sender.affinity.check_place()
            self.finish()


_NOT_BEGUN = "this message has not begun yet: use `async with sender.message() as message`"


@contextmanager
def _counted(blocks: Counter[Block], allocation: Allocation) -> Iterator[None]:
    """Count a send of an allocated block as waiting during the `with` block."""
    block = allocation.block
    blocks[block] += 1
    try:
        yield
    finally:
        blocks[block] -= 1
        if not blocks[block]:
            del blocks[block]


def _cancel_copies(messages: Iterable[SentMessage]) -> None:
    # A separate function: the error keeps the frame of its caller alive, where a variable would keep a task
    # and its tensor alive.
    for message in messages:
        if message.copying is not None:
            message.copying.cancel()


def _too_many(requested: int) -> TooLargeError:
    return TooLargeError(
        f"a message has at most {MAX_TENSORS} tensors: stack small ones, or begin another one",
        limit=MAX_TENSORS,
        requested=requested,
        unit="tensors",
    )


def _name_of(handle: TensorHandle) -> str:
    return f"{handle.sender}.{handle.message}.{handle.tensor}"


# For other packages of this library: post a tensor in a message, or in a new one, which `finish_posted` or
# `abandon_posted` ends.
post_in = TensorSender._post_in
finish_posted = TensorSender._finish
abandon_posted = TensorSender._abandon
