"""The client: sends requests to servers, and returns their answers.

A request:

    placed --a server has capacity--> announced --Taken--> taken --answer or Failure--> (ended)
      |                                |  ^                  |
      '--waits for a server------------'  |                  '--the server is lost--> PeerLostError
                  ^                       |
                  '--the server is lost---'

Memory and permits belong to the client. A server is chosen when the request has been placed in memory: one
with the fewest requests that it has not taken, then the fewest that it has not answered. So any server takes
any request, and only requests that a server has taken are lost with it. Between machines, the announced ones
are lost, too, unless the server has closed.
"""

import asyncio
import os
import random
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import count
from multiprocessing.queues import Queue
from time import monotonic
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

import torch

from aiotensor.codec import TensorDecoder
from aiotensor.codec.payload import check_body
from aiotensor.errors import (
    AioTensorError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    RemoteError,
    TooLargeError,
    UnavailableError,
    UsageError,
    WouldBlockError,
    again,
)
from aiotensor.link.events import ALLOCATED, PeerLog, log_long_wait
from aiotensor.link.messages import Arrived, MessageSession, close_sessions, trace_context_of
from aiotensor.link.outgoing import Outgoing
from aiotensor.memory.arena import whole_pages
from aiotensor.memory.copying import CopyAbandonedError
from aiotensor.memory.gates import Gate, StuckError, WaitLimits
from aiotensor.memory.mappings import ForeignSegment, Mappings
from aiotensor.memory.memory import Memory
from aiotensor.memory.placement import new_empty, sizes_of, too_large
from aiotensor.protocol.connection import OPEN, Connection, Loss
from aiotensor.protocol.credits import Ticket
from aiotensor.protocol.frames import INLINE, VERSION, Discarded, Failure, Frame, Hello, Message, Taken
from aiotensor.runtime import arguments, tracing
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.outage import Absence, Outage
from aiotensor.runtime.waiting import Waiters, until
from aiotensor.statistics import registry
from aiotensor.statistics.counters import ErrorCounter, WaitCounter, new_counts, snapshot
from aiotensor.transports.address import TcpArguments
from aiotensor.transports.base import Connector, Events, Transport
from aiotensor.transports.endpoints import Endpoint, Route, TensorQueue, route_to
from aiotensor.types import MAX_NUMBER, ClientStatistics, CurveKey, EngineStatistics, Holder, Usage

logger = logger_of("client")

R = TypeVar("R")

_STUCK = "all shared memory is used by permits, or by requests that wait for more of it"

_KEEP_WARM_S = 30.0  # after which idle memory is returned to the system
_LONG_WAIT_S = 10.0  # after which a wait is logged
_FEW_MESSAGES = 2


class SentRequest(Outgoing, kw_only=True, eq=False):
    """A message of a client, from its permit until its answer.

    Attributes:
        client: the client.
        permit: its permit; None once a server has taken the message.
        asks: whether it asks for an answer.
        engines: the servers that may get it; none before it is begun, in a `Permit`.
        session: the session over which it was announced; None before and after that.
        number: its number in this session; None before its announcement.
        ended: completes with the answer; without one, when the message was announced.
        alarm: ends the wait for a server.
        began: when the call began, by `time.monotonic`.
    """

    client: "MessageClient[Any]"
    permit: Ticket[None] | None
    asks: bool = False
    engines: "Sequence[_Engine]" = ()
    session: "_Session | None" = None
    number: int | None = None
    ended: "asyncio.Future[_Answer | None]"
    alarm: asyncio.TimerHandle | None = None
    began: float = 0.0

    @property
    def state(self) -> str:
        """The state in words, for statistics and the log."""
        if not self.engines:
            return ALLOCATED if self.permit is None else "acquired, its request not begun"
        if self.permit is None:
            return "taken, its tensors still in use"
        if self.session is not None:
            return "waiting to be taken"
        return "waiting for a server" if self in self.client._waiting else "being sent"

    def no_space(self, nbytes: int, *, is_stuck: bool) -> WouldBlockError:
        """Return the error of a wait for memory that would never end."""
        reason = _STUCK if is_stuck else "not enough shared memory was free"
        return self.client._would_block(reason, 0, nbytes)

    def fail(self, error: AioTensorError) -> None:
        """End the request with an error."""
        if not self.ended.done():
            self.ended.set_exception(error)
        elif not (
            self.asks or self.ended.cancelled()
        ):  # its call has returned when it was announced to a server, which is lost now
            self.client._lose(self, error)


_Answer: TypeAlias = "Arrived[_Session]"  # an answer that has arrived


class MessageClient(LoopObject, Generic[R]):
    """Send messages that contain tensors to one or several servers, and await the answers.

    Open it with ``async with``, once, and share it between the tasks of that event loop. Opening does not
    wait for a server: messages wait until one has started. After a server is lost, the client connects to the
    next one at that address. Requests that the lost server had taken fail with `PeerLostError`, and the
    others wait for another server. Between machines, all requests that were sent to it fail, unless it has
    closed: it may have taken them.

    The tensors of a message, and a large body, are placed in shared memory of this client; tensors of a few
    KiB are part of the body. Permits and memory belong to the client, and not to a server: any server takes
    any message, unless the call names one.

    Threads encode and decode large messages. But msgspec holds the GIL, so the event loop waits: decoding
    takes 1 to 16 ms for each MiB of numbers, texts and structs, and up to a second for each MiB of tiny
    lists; encoding takes less than half as long. Put large data into tensors or arrays, which avoids both.

    Args:
        endpoints: the location of the server: an address such as ``unix:///run/user/1000/engine.sock``, a
            `TensorQueue`, or a `multiprocessing.Queue`; for several servers, a list of locations.
        answer_type: the type of the answers, as msgspec accepts it; answers are validated against it.
        max_concurrent_videos: the maximum number of messages in flight, that is, begun by this client, and
            neither taken by a server nor ended. Further calls wait in the order of the calls.
        arena_bytes: the maximum number of bytes of shared memory that this client uses at once. Memory is in
            use as long as a tensor in it exists, here or at a server.
        max_wait_s: the time in seconds after which a wait for a permit, for memory, or for a server,
            ends with `WouldBlockError`; it applies to each wait separately. None for no limit. It
            does not limit the wait for an answer.
        grace_s: the time in seconds for which calls may wait for a server that has not been started or was
            lost. After this time without a server, calls raise `UnavailableError` at once; with 0, they never
            wait for one. None for no limit but `max_wait_s`.
        max_body_bytes: the maximum size of the body of an answer in bytes; None for no limit. The body
            contains everything but tensors and arrays; of these, it contains at most 64 KiB in total. Servers
            enforce the limit, and a request with a larger answer raises `RemoteError`.
        secret_key: the CURVE secret key of this client, for servers at ``tcp://`` on other machines.
        server_key: the CURVE public key of these servers.
        peer_timeout_s: the time in seconds without an answer after which a server at ``tcp://`` is lost; None
            means 2 s, or no limit at a loopback address.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an address is invalid, or a limit is out of bounds.
    """

    # Whether the messages that a lost server has not taken are sent to another one; some queues forbid it.
    _sends_again = True

    def __init__(
        self,
        endpoints: Endpoint | Sequence[Endpoint],
        answer_type: type[R],
        max_concurrent_videos: int = 8,
        arena_bytes: int = 1 << 30,
        *,
        max_wait_s: float | None = None,
        grace_s: float | None = None,
        max_body_bytes: int | None = 1 << 20,
        secret_key: CurveKey | None = None,
        server_key: CurveKey | None = None,
        peer_timeout_s: float | None = None,
    ) -> None:
        self.affinity = LoopAffinity("MessageClient")
        given = TcpArguments(True, secret_key, server_key, (), peer_timeout_s)
        several = [endpoints] if isinstance(endpoints, str | TensorQueue | Queue) else endpoints
        routes = [route_to(endpoint, given) for endpoint in several]
        if not routes:
            raise ValueError("endpoints must contain the address of at least one server")
        self._label = ",".join(route.label for route in routes)
        self._shares_memory = not any(route.label.startswith("tcp:") for route in routes)
        self._decoder: TensorDecoder[R] = TensorDecoder(answer_type)
        limit = arguments.count("max_concurrent_videos", max_concurrent_videos)
        self._max_bytes = arguments.count("arena_bytes", arena_bytes)
        self._arena_bytes = whole_pages(self._max_bytes)
        self._max_wait_s = arguments.seconds_or_never("max_wait_s", max_wait_s)
        self._grace_s = arguments.grace_period(grace_s)
        self._max_body_bytes = arguments.count_or_none("max_body_bytes", max_body_bytes)
        self._hello = Hello(
            VERSION,
            os.getpid(),
            "client",
            secrets.token_hex(16),
            limit,
            self._arena_bytes,
            max_body_bytes=self._max_body_bytes,
        )
        self._errors = ErrorCounter()
        self._counts = new_counts(ClientStatistics)
        self._log = PeerLog("client")
        limits = WaitLimits(_LONG_WAIT_S, self._max_wait_s, self._log_wait, self._overdue)
        self._permits: Gate[None] = Gate(limit, limits)
        self._memory = Memory(
            self._arena_bytes, _KEEP_WARM_S, self._counts, limits, segment_closed=self._segment_closed
        )
        self._mappings = Mappings()
        self._engines = [_Engine(self, route) for route in routes]
        self._turns = count()  # of the servers, among those with the same load
        for engine in random.sample(self._engines, len(self._engines)):
            engine.turn = next(self._turns)
        self._held: dict[Ticket[None], SentRequest] = {}  # the permits in use, the oldest first
        self._waiting: OrderedDict[SentRequest, None] = (
            OrderedDict()
        )  # for a server, in the order of the calls
        self._absence = Absence(self._label, self._missing)
        self._changes = Waiters()  # the calls of `ready`
        self._absent = len(self._engines)  # the number of servers that are not connected
        self._largest_body = MAX_NUMBER  # that a connected server accepts

    async def __aenter__(self) -> Self:
        self._loop = self.affinity.enter()
        try:
            self._memory.bind()
            self._mappings.freed.bind()
            for engine in self._engines:
                engine.open()
        except BaseException:
            for engine in self._engines:
                engine.close()
            self._memory.close()
            self._mappings.close()
            self.affinity.close()
            raise
        self.affinity.settle(self, self._label)
        return self

    def permit(self) -> "Permit":
        """Return a permit for one request: ``async with client.permit() as permit``.

        Raises:
            UsageError: this client is not open, or belongs to another thread or event loop.
            ClosedError: this client was closed.
        """
        self.affinity.check()
        return Permit(self)

    async def ready(self, *, nbytes: int | None = None) -> None:
        """Wait until a server has admitted this client, or until a request can be sent without waiting.

        Use it in a readiness probe, or to find out at startup whether the servers would refuse this client:
        opening a client does not wait for a server. Returns immediately while a server has admitted it.

        Args:
            nbytes: the bytes of shared memory that the next message needs, 0 for a permit without memory;
                the call then also waits until a permit and this much memory are free, and no other call waits
                for them. It acquires nothing, so other calls may use them first; `permit` acquires a permit.

        Waits at most `max_wait_s`. Cancellation has no side effects.

        Raises:
            ValueError: `nbytes` is negative.
            TooLargeError: `nbytes` exceeds `arena_bytes`.
            RefusedError: the server refused this client because of a limit or its version. The next call
                tries again.
            PeerLostError: the server cannot be reached any more, or broke the protocol.
            AccessDeniedError: the server belongs to another user, or does not accept this client's key.
            WouldBlockError: the wait exceeded `max_wait_s`. It is an `UnavailableError` if no server is
                connected.
            UsageError: this client is not open, or belongs to another thread or event loop; or there can be
                no socket at the path of the address.
            ClosedError: this client was closed, perhaps during the call.
        """
        with self._errors:
            self.affinity.check()
            if nbytes is not None:
                nbytes = arguments.count("nbytes", nbytes, 0)
                if nbytes > self._max_bytes:
                    raise too_large(nbytes, self._max_bytes)
                self._permits.on_release = self._memory.gate.on_release = self._changes.wake
            self._try_again(self._engines)
            await until(partial(self._is_ready_for, nbytes), self._changes, self._max_wait_s, self._not_ready)

    def _is_ready_for(self, nbytes: int | None) -> bool | None:
        self.affinity.check_open()
        if not any(engine.is_admitted for engine in self._engines):
            if (error := self._hopeless(self._engines)) is not None:
                raise error
            return None
        if nbytes is None:
            return True
        permits, gate = self._permits, self._memory.gate
        is_free = permits.in_use < permits.limit and not permits.waiting
        has_space = not nbytes or (not gate.waiting and nbytes <= self._memory.largest_free)
        return True if is_free and has_space else None

    async def request(
        self,
        message: object,
        *,
        target: int | None = None,
        inside: "Permit | None" = None,
        idempotent: bool = False,
    ) -> R:
        """Send a message, and return the answer to it.

        Args:
            message: a msgspec Struct, a dataclass, a list or a dict, with tensors and arrays anywhere in it.
                Do not change any part of it before the call returns. A large message is encoded in a thread,
                which continues for a moment if the call is cancelled.
            target: the index of the server among several, from 0; by default, the one with the fewest
                messages that it has not taken, and then with the fewest that it has not answered.
            inside: a permit of this client, for callers that acquire it before they create the tensors, so
                that permits also limit video decoding: ``async with client.permit() as permit: ... await
                client.request(message, inside=permit)``. The call uses the permit, also if it fails.
            idempotent: whether a server may do the work twice without harm. In place of a `PeerLostError`,
                the message is then sent once more, with a new permit. The message must not change until the
                call returns.

        Waits for a permit, for memory if the message has large tensors, for a server, and for the answer.
        Cancellation notifies the server, which cancels the task that answers, and releases the permit and the
        memory. The server may be done by then.

        Raises:
            RemoteError: the server's handler raised an exception, or the server could not decode this
                message; `type_name` is the type of the error.
            PeerLostError: the server died or closed after it had taken the message or, between machines, died
                after the message was sent; or its handler was cancelled or ended by an exception such as
                `SystemExit`. The server may have done the work.
            RefusedError: the server refused this client because of a limit or its version. The next call
                tries again.
            AccessDeniedError: the server belongs to another user, or does not accept this client's key.
            ProtocolError: the answer is not of `answer_type`, or its tensors cannot be opened.
            WouldBlockError: all memory is held by messages that wait for more of it, or a wait exceeded
                `max_wait_s`. It is an `UnavailableError` if no server is connected.
            OSError: the machine has no shared memory, no descriptors or no threads left.
            TypeError: part of the message cannot be encoded; `TensorEncoder.encode` lists further errors.
            UnsupportedTensorError: a tensor would arrive changed.
            TooLargeError: the tensors exceed `arena_bytes`, or the body exceeds the server's
                `max_body_bytes`; nothing was sent.
            ClosedError: this client was closed, perhaps during the call.
            UsageError: this client is not open, or belongs to another thread or event loop; or `inside` is
                not in use.
            ValueError: there is no such target, or `inside` is a permit of another client.
        """
        span = None if (tracer := tracing.tracer) is None else tracer.begin("request", self._label)
        try:
            box, repeated = [message], [message] if idempotent else None
            del message
            if asyncio._get_running_loop() is not self.affinity.open_in:
                self.affinity.check()
            while True:
                try:
                    request = await self._place(box, target, inside, asks=True)
                    try:
                        answer = await request.ended
                        del request.ended  # as `_end` does
                    except BaseException:
                        self._end(request)
                        raise
                    if answer is None:
                        raise AssertionError("a request that asks ends with an answer")
                    try:
                        found: R = await answer.decode(self._decoder, self._max_body_bytes)
                        if answer.trace_context is not None and (tracer := tracing.tracer) is not None:
                            tracer.delivered("answer", answer.trace_context)
                    except BaseException as error:
                        answer.finish()
                        if isinstance(error, ProtocolError) and self.affinity.is_closed:
                            raise self.affinity.closed_error() from None  # its memory is gone
                        raise
                    finally:
                        del answer
                    self._counts["answers"] += 1
                    if span is not None:
                        span.end()
                    return found
                except PeerLostError:
                    if repeated is None:
                        raise
                    self._counts["retries"] += 1
                    box, repeated, inside = repeated, None, None
        except BaseException as error:
            self._errors.add(error)
            self._counts["failures"] += isinstance(error, Exception)
            self._counts["cancelled"] += isinstance(error, asyncio.CancelledError)
            if span is not None:
                span.end(error)
            raise

    async def send(
        self, message: object, *, target: int | None = None, inside: "Permit | None" = None
    ) -> None:
        """Send a message without requesting an answer.

        When the call has returned, the caller may change the tensors, but the message may still be lost with
        the server. Arguments, waiting and errors are those of `request`, except for the answer. Cancellation
        discards the message unless it was sent. A message whose server is lost before it takes the message is
        sent to another one, or lost and logged under the conditions in which a request fails.
        """
        with self._errors:
            box = [message]
            del message
            self.affinity.check()
            with tracing.Traced("send message", self._label):
                request = await self._place(box, target, inside, asks=False)
                try:
                    if not request.ended.done():
                        await tracing.step("wait for a server", request.ended)
                    else:
                        request.ended.result()
                except BaseException:
                    self._end(request)
                    raise

    async def _place(
        self, box: list[object], target: int | None, inside: "Permit | None", *, asks: bool
    ) -> SentRequest:
        """Acquire a permit, place a message in memory, and announce it, or queue it for a server."""
        engines = self._engines
        if target is not None:
            if not 0 <= target < len(engines):
                count = len(engines)
                raise ValueError(f"target must be the index of one of the {count} servers, got {target}")
            engines = [engines[target]]
        if self._absent:
            self._try_again(engines)
        if inside is not None:
            request = inside._use(self)
        else:
            request = self._new_request(self._permits.try_request(1) or await self._permits.acquire(1))
        request.engines, request.asks, request.began = engines, asks, monotonic()
        request.max_body_bytes = self._largest_body
        try:
            await request.place(box)
            self._submit(request)
        except BaseException:
            self._end(request)
            raise
        return request

    def _new_request(self, permit: Ticket[None]) -> SentRequest:
        """Return a request that holds a permit and is not begun."""
        ended, shares = self._loop.create_future(), self._shares_memory
        request = self._held[permit] = SentRequest(
            self._memory, shares, self.affinity, client=self, permit=permit, ended=ended
        )
        return request

    # Servers

    def _submit(self, request: SentRequest) -> None:
        """Announce a request to a server that has capacity, or queue it."""
        session = self._choose(request.engines)  # the requests that wait cannot be sent to any server now
        if session is None:
            self._try_again(request.engines)
            self._queue(request)
            return
        if request.blocks or session.transfers or request.body_bytes > session.max_body_bytes:
            session.ask(request)
        else:
            session.announce(request)

    def _choose(self, engines: "Sequence[_Engine]") -> "_Session | None":
        """Return the server with the fewest untaken requests, then with the fewest unanswered ones."""
        best: _Session | None = None
        least = (0, 0, 0)
        for engine in engines:
            session = engine.session
            if (
                session is None
                or session.connection.state is not OPEN
                or not session.transport.is_writable
                or (untaken := len(session.untaken_requests)) >= session.window
            ):
                continue
            if len(engines) == 1:
                return session
            load = (untaken, session.in_flight, engine.turn)
            if best is None or load < least:
                best, least = session, load
        if best is not None:
            best.engine.turn = next(self._turns)
        return best

    def _limits_changed(self) -> None:
        """Find the largest body that a connected server accepts."""
        sessions = [one.session for one in self._engines if one.session is not None and one.is_admitted]
        limits = [session.max_body_bytes for session in sessions]
        self._largest_body = max(limits, default=MAX_NUMBER)

    def _changed(self) -> None:
        """Announce waiting requests, or fail them, because a server has changed."""
        if self._changes:
            self._changes.wake()
        for request in list(self._waiting):
            if request not in self._waiting:
                continue  # announcing an earlier one has ended a session, which calls this
            session = self._choose(request.engines)
            if session is not None:
                self._unqueue(request)
                session.ask(request)
            elif (error := self._hopeless(request.engines)) is not None:
                self._unqueue(request)
                request.fail(error)

    def _requeue(self, requests: Sequence[SentRequest]) -> None:
        """Queue requests again that a lost server has not taken, before the others."""
        for request in reversed(requests):
            request.number = None
            self._queue(request)
            self._waiting.move_to_end(request, last=False)

    def _queue(self, request: SentRequest) -> None:
        self._waiting[request] = None
        self._absence.begin()
        if self._max_wait_s is not None:
            loop = asyncio.get_running_loop()
            request.alarm = loop.call_later(self._max_wait_s, self._waited_too_long, request)

    def _unqueue(self, request: SentRequest) -> None:
        del self._waiting[request]
        if not self._waiting:
            self._absence.end()
        if request.alarm is not None:
            request.alarm.cancel()
            request.alarm = None

    def _waited_too_long(self, request: SentRequest) -> None:
        self._unqueue(request)
        request.fail(self._no_capacity(request.engines, f"{self._max_wait_s:g} s"))

    def _hopeless(self, engines: "Sequence[_Engine]") -> AioTensorError | None:
        """Return the error of a request that no server will take; None if one may take it."""
        if self.affinity.is_closed:
            return self.affinity.closed_error()
        failures = [one.failure for one in engines if one.failure is not None]
        if len(failures) == len(engines):
            return again(failures[0])
        # A server that has accepted the connection is about to answer.
        if all(
            one.failure is not None or (one.outage.is_too_long and one.session is None) for one in engines
        ):
            return self._no_capacity(engines, f"the grace period of {self._grace_s:g} s")
        return None

    def _try_again(self, engines: "Sequence[_Engine]") -> None:
        """Connect to the servers that are not connected; raise an error if none will be."""
        for one in engines:
            one.connect_now()
        if (error := self._hopeless(engines)) is not None:
            raise error

    def _end(self, request: SentRequest) -> None:
        """End a request: withdraw it from its server, and return its permit and its memory."""
        if request in self._waiting:
            self._unqueue(request)
        if request.session is not None:
            request.session.withdraw(request)
        self._memory.abandon(request)
        self._took(request)
        ended = request.ended
        if ended.done() and not ended.cancelled() and ended.exception() is None:
            late = ended.result()
            if late is not None:
                late.finish()  # it has arrived in the iteration in which its call was cancelled
        # A block that the server still reads refers to the request. Its future refers to an error, whose
        # traceback would keep the tensors of the caller alive.
        del request.ended

    def _lose(self, request: SentRequest, error: AioTensorError) -> None:
        """Log that a message is lost whose call has returned; overridden for queues."""
        self._took(request)
        logger.warning(
            "a message that was sent is lost: %s",
            error,
            extra={"event": "message_lost", "reason": str(error)},
        )

    def _refused(self, error: AioTensorError) -> None:
        """Ignore that a server, which logs it, has refused a message of `send`; overridden for queues."""

    def _took(self, request: SentRequest) -> None:
        """Return the permit and the memory of a request, because a server has taken it or it has ended."""
        permit, request.permit = request.permit, None
        if permit is not None:
            if request.blocks or request.owned or request in self._memory.gate.held:
                request.release()
            del self._held[permit]
            self._permits.release(permit)

    def _segment_closed(self, segment: ForeignSegment) -> None:
        for engine in self._engines:
            if engine.session is not None:
                engine.session.detach(segment)

    # The end

    def statistics(self) -> ClientStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        engines, permits = self._engines, self._permits
        return snapshot(
            ClientStatistics,
            self._counts | self._memory.usage(permits, len(self._waiting)),
            servers=sum(engine.is_admitted for engine in engines),
            in_flight=permits.in_use,
            peak_in_flight=permits.peak,
            max_concurrent_videos=permits.limit,
            holders=tuple(self._holders()),
            servers_lost=sum(engine.counts["losses"] + engine.counts["refusals"] for engine in engines),
            permit_waits=permits.waited.waits(),
            errors=self._errors.counts(),
            engines=tuple(engine.statistics() for engine in engines),
        )

    def _holders(self) -> list[Holder]:
        """Return the holders of permits and memory, with the longest time first."""
        now = monotonic()
        since: dict[object, float] = {request: permit.since for permit, request in self._held.items()}
        held: dict[object, int] = dict.fromkeys(since, 0)
        for ticket, _ in self._memory.holdings():
            held[ticket.holder] = held.get(ticket.holder, 0) + ticket.amount
            since[ticket.holder] = min(since.get(ticket.holder, now), ticket.since)
        holders = [
            Holder(None, getattr(holder, "state", ALLOCATED), nbytes, now - since[holder])
            for holder, nbytes in held.items()
        ]
        return sorted(holders, key=lambda holder: -holder.seconds)

    async def aclose(self) -> None:
        """Close the client: pending calls raise `ClosedError`.

        Waits until copies in the worker thread have stopped, and at most 1 s until the connections have
        accepted all records. Cancellation closes the client immediately. Closing again has no effect.
        """
        self.affinity.check_place()
        if self.affinity.close():
            with self.affinity.leaving():
                await self._close()

    async def _close(self) -> None:
        closed = self.affinity.closed_error
        self._permits.fail(closed)
        self._memory.gate.fail(closed)
        self._changes.wake()
        self._absence.end()
        for request in list(self._waiting):
            self._unqueue(request)
            request.fail(closed())
        sessions = [engine.session for engine in self._engines if engine.session is not None]
        for request in [request for session in sessions for request in session.waiting()]:
            if not request.ended.done():
                request.fail(closed())
        for engine in self._engines:
            engine.close()
        try:
            self._memory.freed.collect_all()
            self._mappings.freed.collect_all()
            for session in sessions:
                session.close()
            await close_sessions(sessions, self._memory, self._mappings)
        finally:
            self._log.close()

    def _details(self) -> list[str]:
        details = [f"at {self._label}"]
        if self.affinity.is_open:
            details.append(f"{self._permits.in_use} of {self._permits.limit} messages in flight")
        return details

    # Errors and the log

    def _missing(self) -> str:
        """Return why messages wait for connected servers; "" if none is connected: another line logs that."""
        if not any(engine.is_admitted for engine in self._engines):
            return ""
        return f"{len(self._waiting)} messages wait, because the servers do not take more"

    def _log_wait(self, what: str) -> None:
        """Log a long wait for a resource, with its holders."""
        log_long_wait(logger, _LONG_WAIT_S, what, None, self._holders())

    def _overdue(self, reason: str, messages: int, nbytes: int) -> WouldBlockError:
        return self._would_block(f"{reason} for {self._max_wait_s:g} s", messages, nbytes)

    def _would_block(self, reason: str, messages: int, nbytes: int) -> WouldBlockError:
        permits, memory = self._permits, self._memory.gate
        return WouldBlockError(
            f"{reason} ({permits.in_use} of {permits.limit} messages and {self._memory.describe(nbytes)})",
            messages=Usage(permits.limit, permits.in_use, messages),
            bytes=Usage(memory.limit, memory.in_use, nbytes),
        )

    def _no_capacity(self, engines: "Sequence[_Engine]", period: str) -> WouldBlockError:
        """Return the error of a wait for servers; an `UnavailableError` if none is connected."""
        is_connected = any(engine.is_admitted for engine in engines)
        several = f"none of the {len(engines)} servers"
        which = several if len(engines) > 1 else f"no server at {engines[0].label}"
        what = "has had capacity for this message" if is_connected else "could be reached"
        kind = WouldBlockError if is_connected else UnavailableError
        return kind(f"{which} {what} for {period}", messages=Usage(requested=1))

    def _not_ready(self) -> WouldBlockError:
        if any(engine.is_admitted for engine in self._engines):
            return self._overdue("the client was not ready", 1, 0)
        return self._no_capacity(self._engines, f"{self._max_wait_s:g} s")


class Permit:
    """A permit for one request, made by `MessageClient.permit`.

    Acquire it before the tensors of the request exist, so that permits also limit the memory and the
    processor time for making them::

        async with client.permit() as permit:
            answer = await client.request(Video(await decode(file)), inside=permit)

    Entering the block waits for a permit, at most `max_wait_s`, and raises the errors of this wait as
    `MessageClient.request` does. If the block ends without a request, the permit is released.
    """

    def __init__(self, client: MessageClient[Any]) -> None:
        self._client = client
        self._is_entered = False
        self._request: SentRequest | None = None  # None after its use

    def __repr__(self) -> str:
        state = self._request.state if self._request else "new" if not self._is_entered else "used"
        return f"<Permit {state}>"

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise UsageError("this permit was already entered: acquire another with client.permit()")
        self._is_entered = True
        client = self._client
        with client._errors:
            client.affinity.check()
            client._try_again(client._engines)
            permit = client._permits.try_request(1) or await client._permits.acquire(1)
            self._request = client._new_request(permit)
        return self

    async def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor in shared memory for the request, which is sent without a copy.

        Args:
            shape: the sizes of the tensor's dimensions, in elements.
            dtype: the type of the tensor's elements.

        Waits for shared memory, at most `max_wait_s`. If the call is cancelled, the memory is released. The
        memory is also released when the tensor is freed, if no request has sent it.

        Raises:
            UsageError: the permit is not in use.
            UnsupportedTensorError: a tensor of this dtype cannot be sent.
            TooLargeError: the tensor has more than `arena_bytes` bytes.
            WouldBlockError: all memory is held by messages that wait for more of it, or the wait exceeded
                `max_wait_s`.
            OSError: the machine has no shared memory or no descriptors left.
            ClosedError: the client was closed.
        """
        client, request = self._client, self._request
        with client._errors:
            if request is None:
                raise UsageError("this permit is not in use: `async with client.permit() as permit`")
            client.affinity.check()
            sizes, nbytes = sizes_of(shape, dtype, client._arena_bytes)
            if nbytes == 0:
                return new_empty(sizes, dtype)
            memory, nbytes = client._memory, whole_pages(nbytes)
            try:
                block = memory.try_acquire(nbytes, request) or await memory.acquire(nbytes, request)
                tensor = await memory.tensor_over(block, dtype, sizes, request)
            except StuckError:
                raise client._would_block(_STUCK, 0, nbytes) from None
            except CopyAbandonedError:
                client.affinity.check_open()
                raise UsageError("the request of this permit has ended during this call") from None
            client.affinity.check_open()
            return tensor

    def _use(self, client: MessageClient[Any]) -> SentRequest:
        """Return the request of the permit to begin it, once."""
        if client is not self._client:
            raise ValueError("`inside` must be a permit of this client")
        request, self._request = self._request, None
        if request is None:
            raise UsageError("this permit is not in use, or a request has used it: acquire another")
        return request

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        client = self._client
        if client.affinity.is_left_in_child(error):
            return
        client.affinity.check_place()
        request, self._request = self._request, None
        if request is not None:
            client._end(request)


class _Engine:
    """A server at one address: the connection to it, and to its successors there.

    Attributes:
        label: the address.
        session: the connection, if there is one.
        failure: why no server can be connected, until a call asks for it again.
        outage: measures for how long no server has admitted the client.
        turn: its place in the order of servers with the same load.
        counts: the counters of `EngineStatistics`.
        answered: counts the durations until answers.
    """

    def __init__(self, client: MessageClient[Any], route: Route) -> None:
        self.label = route.label
        self.session: _Session | None = None
        self.failure: AioTensorError | None = None
        self.turn = 0
        self.counts = new_counts(EngineStatistics)
        self.answered = WaitCounter()
        self.outage = Outage(client._grace_s, client._changed)
        self._client = client
        self._route = route
        self._connector: Connector | None = None
        self._entry: registry.Entry | None = None

    def open(self) -> None:
        """Begin to connect."""
        self._entry = registry.add(self, self.label, asyncio.get_running_loop())
        self.outage.begin()
        self._connector = self._route.connector(Events(self._connected, self._not_connected))
        self._connector.connect()

    def close(self) -> None:
        """Stop connecting, and use the connection no more."""
        self.session = None
        self.outage.end()
        if self._connector is not None:
            self._connector.close()
        if self._entry is not None:
            registry.remove(self._entry)

    @property
    def is_admitted(self) -> bool:
        """Whether a server has admitted the client and is connected."""
        return self.session is not None and self.session.connection.state is OPEN

    def connect_now(self) -> None:
        """Connect now, if there is no connection and no attempt is scheduled."""
        if self.session is None and self._connector is not None:
            self.failure = None
            self._connector.connect_now()

    def statistics(self) -> EngineStatistics:
        """Return the current messages of the client here, and their totals."""
        return snapshot(
            EngineStatistics,
            self.counts,
            address=self.label,
            connected=int(self.is_admitted),
            in_flight=0 if self.session is None else self.session.in_flight,
            answer_times=self.answered.waits(),
        )

    def _connected(self, transport: Transport) -> None:
        """Begin a session; raises `OSError` if its first record could not be written."""
        client = self._client
        session = _Session(transport, self)
        session.begin()
        self.session = session
        client._absent -= 1
        self.failure = None
        if transport.mover is not None:
            client._memory.movers.add(transport.mover)

    def _not_connected(self, error: AioTensorError) -> None:
        self.failure = error
        self._client._changed()

    def lost(self, session: "_Session", loss: Loss) -> None:
        """Queue the untaken requests again, fail the others, and connect again if that is possible."""
        client = self._client
        if self.session is session:
            self.session = None
            client._absent += 1
            client._limits_changed()
        # A server writes that it has taken a request before its application begins. Every record was read
        # only if the server has written its last frame, or its socket has ended on the same machine.
        has_ended = session.transport.is_closed and session.transport.mover is None
        is_known = client._sends_again and (loss.is_last or has_ended)
        untaken: list[SentRequest] = []
        unanswered: list[SentRequest] = []
        for request in session.waiting():
            request.session = None
            is_safe = request.number is None or (is_known and request.permit is not None)
            (untaken if is_safe else unanswered).append(request)
        session.leave()
        if client.affinity.is_closed:
            return  # its calls have ended, and the server has closed the connection in return
        self.counts["refusals" if isinstance(loss.error, RefusedError) else "losses"] += 1
        self.failure = None if loss.is_retried else loss.error
        for request in unanswered:
            self.counts["requests_lost"] += 1
            request.fail(again(loss.error))
        client._log.lost(loss, self.label, len(unanswered))
        self.outage.begin()
        client._requeue(untaken)
        if loss.is_retried and self._connector is not None:
            self._connector.reconnect()
        client._changed()


class _Session(MessageSession):
    """The connection to a server.

    Attributes:
        window: the maximum number of requests that the server has not taken.
        max_body_bytes: the maximum size of the body of a request in bytes.
        engine: the server.
        untaken_requests: the requests that the server has not taken, announced or not.
        announced: the requests that were announced, and are neither answered nor, without an answer, taken.
    """

    def __init__(self, transport: Transport, engine: _Engine) -> None:
        client, self.name = engine._client, f"the server at {engine.label}"
        connection = Connection(client._hello, self.name)
        super().__init__(transport, connection, client._log, client._memory, client._mappings)
        self.window = 0
        self.max_body_bytes = MAX_NUMBER
        self.engine = engine
        self.untaken_requests: dict[SentRequest, None] = {}
        self.announced: dict[int, SentRequest] = {}
        self._client = client

    def waiting(self) -> list[SentRequest]:
        """Return the requests that wait to be taken or answered, in order, without those withdrawn."""
        requests = dict.fromkeys((*self.untaken_requests, *self.announced.values()))
        return [request for request in requests if request.session is self]

    @property
    def in_flight(self) -> int:
        """The number of messages that are being moved, are announced, or wait for an answer."""
        return len(self.transfers) + len(self.announced)

    def ask(self, request: SentRequest) -> None:
        """Announce a request, after its blocks were moved."""
        try:
            check_body(request.body_bytes, self.max_body_bytes)
            request.session = self
            self.untaken_requests[request] = None
            self.post(request, partial(self.announce, request))
        except TooLargeError as error:
            request.fail(error)
        except OSError as error:
            if request.ended.done():  # its call has returned, so it is sent again on another connection
                self.unwritable(error)
                return
            del self.untaken_requests[request]
            request.session = None
            request.ended.set_exception(error)

    def announce(self, request: SentRequest) -> None:
        """Announce a request whose blocks the server can read."""
        request.session = self
        connection = self.connection
        number = request.number = connection.next_message
        self.untaken_requests[request] = None
        self.announced[number] = request
        content = request.content
        if request.content_block is None:  # as `frame`, without a call
            frame = Message(number, INLINE, content, len(content), None, request.trace, request.asks)
        else:
            frame = request.frame(number, asks=request.asks)
        try:
            # With few messages in flight, the server probably waits for the next one. Otherwise the messages
            # of one iteration of the event loop share a record.
            if waits := len(self.announced) > _FEW_MESSAGES:
                self.schedule_flush()
            for record in connection.post(frame, waits=waits):
                self.transport.write(record)
        except OSError as error:
            del self.announced[number]
            request.number = None  # no part of it was written, so it waits for another server
            self.unwritable(error)
            return
        self.engine.counts["messages_sent"] += 1
        self._client._counts["messages_sent"] += 1
        if not (request.asks or request.ended.done()):
            request.ended.set_result(None)

    def withdraw(self, request: SentRequest) -> None:
        """Withdraw a request that no call waits for any more; its answer is dropped."""
        request.session = None
        if request.number is None:
            del self.untaken_requests[request]
            self.unpost(request)
            self._client._changed()
        elif request.number in self.announced:
            self.connection.discard(request.number)
            self.schedule_flush()

    # Frames

    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record."""
        for frame in frames:
            match frame:
                case Taken():
                    for number in frame.messages:
                        taken = self.announced.get(number)
                        if taken is not None and taken in self.untaken_requests:
                            del self.untaken_requests[taken]
                            if not taken.asks:
                                del self.announced[number]
                            self._client._took(taken)
                    if self._client._waiting or self._client._changes:
                        self._client._changed()
                case Discarded():
                    for number in frame.messages:
                        withdrawn = self.announced.get(number)
                        if withdrawn is None:
                            continue
                        if withdrawn.session is self:
                            raise ProtocolError("it discarded a message that was not withdrawn")
                        del self.announced[number]
                        if withdrawn in self.untaken_requests:
                            del self.untaken_requests[withdrawn]
                            self.unpost(withdrawn)
                    self._client._changed()
                case Message():
                    if frame.answers is None:
                        raise ProtocolError("it sent a message that answers nothing")
                    request, is_early = self.announced.pop(frame.answers, None), False
                    if request is not None and request in self.untaken_requests:  # no `Taken` was sent
                        del self.untaken_requests[request]
                        self._client._took(request)
                        is_early = True
                    answer = Arrived(self, frame)
                    if frame.trace is not None:
                        answer.trace_context = trace_context_of(frame)
                    self.untaken += 1
                    if request is None or request.session is not self or request.ended.done():
                        answer.finish()  # it was cancelled
                    else:
                        self.engine.counts["answers"] += 1
                        self.engine.answered.add(monotonic() - request.began)
                        request.session = None
                        request.ended.set_result(answer)
                    if is_early:
                        self._client._changed()
                case Failure():
                    request, is_early = self.announced.pop(frame.message, None), False
                    if request is not None and request in self.untaken_requests:  # as above
                        del self.untaken_requests[request]
                        self._client._took(request)
                        is_early = True
                    if request is None:
                        self._client._refused(self._error(frame))
                    elif request.session is self:
                        self.engine.counts["failures"] += 1
                        request.session = None
                        request.fail(self._error(frame))
                    if is_early:
                        self._client._changed()
                case Hello():
                    if frame.is_admitted:
                        self.memory.arena_bytes = frame.arena_bytes
                        self.window = frame.max_waiting
                        if frame.max_body_bytes is not None:
                            self.max_body_bytes = frame.max_body_bytes
                        self.engine.outage.end()
                        self._client._limits_changed()
                        self._client._changed()
                case _:
                    self.control(frame, descriptors)
            if self.is_over:
                break

    def _error(self, failure: Failure) -> AioTensorError:
        what = f"{failure.type_name}: {failure.text}"
        if failure.is_loss:
            return PeerLostError(f"{self.name} stopped its work: {what}", pid=self.pid)
        return RemoteError(what, type_name=failure.type_name)

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        self.engine.lost(self, loss)
        self.untaken_requests.clear()
        self.announced.clear()

    def resume_writing(self) -> None:
        """Announce waiting requests, because the transport accepts records again."""
        super().resume_writing()
        self._client._changed()
