"""The server: accepts the connections of clients, and passes their requests to the application.

A request at the server:

    waiting --taken by the application--> in hand --answered, failed--> (ended)
    |                                     |
    '-------------------------------------'--cancelled, or its client is lost--> (ended)
"""

import asyncio
import enum
import logging
import os
import secrets
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

import anyio

from aiotensor.channel.cancelling import CancelOnce
from aiotensor.codec import TensorDecoder
from aiotensor.errors import AioTensorError, ClosedError, ProtocolError, UsageError, WouldBlockError
from aiotensor.link.admission import Admission
from aiotensor.link.events import PeerLog
from aiotensor.link.messages import Arrived, MessageSession, close_sessions, trace_context_of
from aiotensor.link.outgoing import Outgoing
from aiotensor.memory.arena import whole_pages
from aiotensor.memory.mappings import ForeignSegment, Mappings
from aiotensor.memory.memory import Memory
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.frames import (
    INLINE,
    MAX_TEXT,
    MAX_TYPE_NAME,
    VERSION,
    Discard,
    Failure,
    Frame,
    Hello,
    Message,
    ServerReport,
    bounded,
)
from aiotensor.runtime import arguments, tracing
from aiotensor.runtime.affinity import FreedItems, LoopAffinity, LoopObject
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters, until
from aiotensor.statistics.counters import new_counts, snapshot
from aiotensor.transports.address import TcpArguments
from aiotensor.transports.base import Listener, Transport
from aiotensor.transports.endpoints import Endpoint, route_to
from aiotensor.types import MAX_NUMBER, CurveKey, ServerStatistics, Usage

logger = logger_of("server")

M = TypeVar("M")
R = TypeVar("R")

_KEEP_WARM_S = 30.0  # after which idle memory is returned to the system


class MessageServer(LoopObject, Generic[M]):
    """Receive the messages of clients, and answer them, with ``async for request in server`` or `serve`.

    Open it with ``async with``, once, and share it between the tasks of that event loop. A message is taken
    when the application requests the next one, which returns the permit of the client: so a slow server
    applies backpressure. Clients take turns, so a client with many messages does not delay the others. The
    messages of one client are returned in order.

    The tensors of a message are views of the shared memory of its client, and stay valid as long as they
    exist. The tensors of an answer are placed in shared memory of this server.

    Opening raises `UsageError` if another server listens at the address, and an `OSError` that names the
    folder of the socket if it cannot be used; it first waits while another process holds the lock of the
    folder.

    Args:
        endpoint: the location of the server: an address such as ``unix:///run/user/1000/engine.sock``, to
            which only processes of this user may connect, ``tcp://`` with a host and a port, 0 for any free
            one, a `TensorQueue`, or a `multiprocessing.Queue`.
        message_type: the type of the messages, as msgspec accepts it; messages are validated against it.
        arena_bytes: the maximum number of bytes of shared memory that answers use at once.
        max_clients: the maximum number of clients at once, including disconnected ones with messages that
            wait to be taken; None for no limit.
        max_waiting: the maximum number of messages of each client that wait to be taken; the client then
            sends no more.
        max_mapped_bytes: the maximum number of bytes of mapped shared memory, over all clients: the sum of
            their `arena_bytes`, and the memory of disconnected clients that tensors still use; None for no
            limit.
        max_body_bytes: the maximum size of the body of a message in bytes; None for no limit. The body
            contains everything but tensors and arrays; of these, it contains at most 64 KiB in total. Clients
            enforce the limit with `TooLargeError`, and a larger body is never decoded here. A thread decodes
            large bodies, but blocks the event loop: for 1 to 16 ms for each MiB of numbers, texts and
            structs, and for up to a second for each MiB of tiny lists.
        secret_key: the CURVE secret key of this server, for ``tcp://`` addresses that other machines can
            reach.
        client_keys: the CURVE public keys of the clients and inspectors that may connect there.
        peer_timeout_s: the time in seconds without an answer after which a client at ``tcp://`` is lost; None
            means 2 s, or no limit at a loopback address.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the address is invalid, or is reachable from other machines and there are no keys, or a
            limit is out of bounds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        message_type: type[M],
        *,
        arena_bytes: int = 1 << 30,
        max_clients: int | None = 64,
        max_waiting: int = 64,
        max_mapped_bytes: int | None = 64 << 30,
        max_body_bytes: int | None = 1 << 20,
        secret_key: CurveKey | None = None,
        client_keys: Collection[CurveKey] = (),
        peer_timeout_s: float | None = None,
    ) -> None:
        self.affinity = LoopAffinity("MessageServer")
        given = TcpArguments(False, secret_key, None, client_keys, peer_timeout_s, finds_port=True)
        self._route = route_to(endpoint, given)
        arena_bytes = whole_pages(arguments.count("arena_bytes", arena_bytes))
        self._max_clients = arguments.count_or_none("max_clients", max_clients)
        self._max_waiting = arguments.count("max_waiting", max_waiting)
        self._max_mapped_bytes = arguments.count_or_none("max_mapped_bytes", max_mapped_bytes)
        self._max_body_bytes = arguments.count_or_none("max_body_bytes", max_body_bytes)
        self._counts = new_counts(ServerStatistics)
        self._log = PeerLog("server")
        self._memory = Memory(arena_bytes, _KEEP_WARM_S, self._counts, segment_closed=self._segment_closed)
        self._mappings = Mappings()
        self._clients: dict[str, _Client] = {}  # the connected ones, by their ids
        self._leftovers: dict[_Client, None] = {}  # lost clients whose messages still wait
        self._decoder: TensorDecoder[M] = TensorDecoder(message_type)
        self._shares_memory = not self._route.label.startswith("tcp:")
        self._ready = FairQueue()  # the requests that wait to be taken
        self._in_hand: set[Incoming] = set()  # taken requests, until they are answered or cancelled
        self._takers = Waiters()  # the calls that wait to take a request
        self._waiters = Waiters()  # the calls that wait for a change
        self._dropped: FreedItems[Incoming] = FreedItems(self._requests_dropped)  # garbage-collected in hand
        self._listener: Listener | None = None
        hello = Hello(
            VERSION,
            os.getpid(),
            "server",
            secrets.token_hex(16),
            MAX_NUMBER,  # each answer belongs to a request
            arena_bytes,
            max_waiting=self._max_waiting,
            max_body_bytes=self._max_body_bytes,
        )
        self._admission = Admission(
            hello, "client", self._log, self._refusal, self._admitted, self._refused, self._reports
        )

    @property
    def address(self) -> str:
        """The address to which clients connect, with the actual port if 0 was given."""
        return (self._listener is not None and self._listener.address) or self._route.label

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            self._memory.bind()
            self._mappings.freed.bind()
            self._dropped.bind()
            self._listener = await self._route.listen(self._admission.connection_accepted)
            if self.affinity.is_closed:  # by another task, during the wait
                await self._close(self._listener)
                raise self.affinity.closed_error()
        except BaseException:
            self.affinity.close()
            self._memory.close()
            self._mappings.close()
            raise
        self.affinity.settle(self, self._route.label)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> "Request[M]":
        """Return the next request.

        A message that cannot be decoded or is of another type is answered with the error, and skipped.
        Cancellation loses no request. The iteration ends when this server is closed. The call does not
        suspend if a small request has arrived.
        """
        if asyncio._get_running_loop() is not self.affinity.open_in:
            if self.affinity.is_closed:
                raise StopAsyncIteration
            self.affinity.check()
        request = await self._take()
        if request is None:
            raise StopAsyncIteration
        return request

    async def _take(self, *, waits: bool = True) -> "Request[M] | None":
        """Take a request, and wait for it if `waits`; return None if none waits or the server is closed."""
        ready = self._ready
        while True:
            while not ready.by_client:
                if not waits or self.affinity.is_closed:
                    return None
                try:
                    await self._takers.wait()
                except asyncio.CancelledError:
                    self._takers.wake_one()  # in place of this task, which may have been woken
                    raise
            incoming = ready.take()
            if ready.by_client and self._takers:
                self._takers.wake_one()
            try:
                message: M = await incoming.decode(self._decoder, self._max_body_bytes)
            except asyncio.CancelledError:
                if incoming.state is WAITING and not self.affinity.is_closed:
                    ready.put_back(incoming)
                    self._wake()
                else:
                    incoming.finish()
                    self._end(incoming)
                raise
            except Exception as error:  # noqa: BLE001 - decoding runs code of the user's type
                self._refuse(incoming, error)
                continue
            if incoming.state is WAITING and not self.affinity.is_closed:
                return Request(incoming, message, self)
            self._end(incoming)  # it was cancelled, or the server closed, during decoding
            del message  # not kept alive while the next request is awaited

    def _take_now(self) -> "Request[M] | None":
        """Take a request as `_take` does, but decode even a large one on this thread, and never wait."""
        while self._ready.by_client:
            incoming = self._ready.take()
            try:
                message: M = incoming.decode_now(self._decoder, self._max_body_bytes)
            except Exception as error:  # noqa: BLE001 - decoding runs code of the user's type
                self._refuse(incoming, error)
            else:
                return Request(incoming, message, self)
        return None

    async def arrived(self) -> None:
        """Wait until a request has arrived, without taking it.

        The next step of an iteration then takes the request, unless another task or a cancellation by its
        client comes first. It waits only if a thread must decode a large message; a message that cannot be
        decoded is skipped. Cancellation has no side effects.

        Raises:
            UsageError: this server is not open, or belongs to another thread or event loop.
            ClosedError: this server was closed, perhaps during the call.
        """
        self.affinity.check()
        while not self._ready.by_client:
            await self._waiters.wait()
            self.affinity.check()

    def batches(self, max_batch: int, *, batch_wait_s: float = 0.0) -> "AsyncIterator[list[Request[M]]]":
        """Return an iterator over batches: ``async for batch in server.batches(8)``.

        Each batch is a list of requests. A request waits in the server until its batch is complete, so
        cancelled requests leave the batch, and clients keep their permits. Clients take turns, as for
        requests.

        Args:
            max_batch: the maximum number of requests in a batch.
            batch_wait_s: the time in seconds for which the first request of a batch may wait for others; by
                default, a batch contains the requests that have arrived.

        Raises:
            TypeError: `max_batch` is not an integer.
            ValueError: `max_batch` is not positive, or `batch_wait_s` is negative.
        """
        return Batches(self, max_batch, batch_wait_s)

    @overload
    async def serve(
        self, handler: Callable[[M], Awaitable[object]], *, max_concurrent: int | None = None
    ) -> None: ...

    @overload
    async def serve(
        self,
        handler: Callable[[list[M]], Awaitable[Sequence[object]]],
        *,
        max_batch: int,
        batch_wait_s: float = 0.0,
        max_concurrent: int | None = None,
    ) -> None: ...

    async def serve(
        self,
        handler: Callable[[Any], Awaitable[Any]],
        *,
        max_batch: int | None = None,
        batch_wait_s: float = 0.0,
        max_concurrent: int | None = None,
    ) -> None:
        """Answer every message with the result of a function, called in a separate task.

        The task is cancelled, once, when the client disconnects or cancels its request. A thread for which
        the function waits is not notified: pass it a `threading.Event` that the function sets when it ends.
        An exception in the function is logged, and raised in the client as `RemoteError`.

        With `max_batch`, the function is called with a list of messages, and returns a sequence with a result
        for each of them. A result that is an `Exception` is raised in the client of its message. An exception
        in the function is raised in the clients of all its messages. The task is cancelled once none of the
        requests is wanted any more.

        Args:
            handler: called with each message, or with each list of messages; returns the answer, or a
                sequence of answers.
            max_batch: the maximum number of messages in a batch; None for single messages.
            batch_wait_s: the time in seconds for which the first message of a batch may wait for others; by
                default, a batch contains the messages that have arrived.
            max_concurrent: the maximum number of messages that are handled at once. By default, there is no
                limit for messages, and for batches the limit is `max_batch`, so that there is one at a time.

        Returns when this server is closed and the tasks have ended. Cancellation cancels the tasks, once, and
        waits until they have ended.

        Raises:
            UsageError: this server is not open, or belongs to another thread or event loop.
            ClosedError: this server was closed before the call.
            ValueError: `max_batch` or `max_concurrent` is not positive, `batch_wait_s` is negative, or
                `max_concurrent` is less than `max_batch`.
        """
        max_concurrent = arguments.count_or_none("max_concurrent", max_concurrent)
        largest = 1 if max_batch is None else max_batch
        if max_concurrent is not None and max_concurrent < largest:
            raise ValueError(
                f"max_concurrent must be at least max_batch, which is {max_batch}, got {max_concurrent}"
            )
        self.affinity.check()
        batches = Batches(self, largest, batch_wait_s)
        answer = partial(_answer_one if max_batch is None else _answer_batch, handler)
        max_concurrent = max_concurrent or max_batch
        # The requests stay alive until the end of their task: otherwise they would count as dropped.
        answering: dict[asyncio.Task[None], list[Request[M]]] = {}
        in_hand, ends = 0, Waiters()

        def ended(task: asyncio.Task[None]) -> None:
            nonlocal in_hand
            batch = answering.pop(task)
            in_hand -= len(batch)
            ends.wake()
            for request in batch:
                if task.cancelled() and request._incoming.block is None and request.is_wanted:
                    self._fail(request._incoming, asyncio.CancelledError())  # the task has not begun

        with anyio.CancelScope() as scope:
            async with asyncio.TaskGroup() as group:
                try:
                    while True:
                        while max_concurrent and in_hand + largest > max_concurrent:
                            await ends.wait()
                        if not (batch := await anext(batches, None)):
                            break
                        task = group.create_task(answer(batch))
                        answering[task] = batch
                        in_hand += len(batch)
                        task.add_done_callback(ended)
                        del batch, task  # otherwise, the tensors would live until the next request arrives
                    while answering:
                        await ends.wait()
                except asyncio.CancelledError:
                    # A surrounding scope of anyio would cancel the wait for the tasks in each iteration of
                    # the event loop.
                    scope.shield = True
                    # A reference cycle with the error keeps the requests of the next batch alive.
                    for request in batches.taken:
                        self._fail(request._incoming, asyncio.CancelledError())
                    batches.taken.clear()
                    raise

    def statistics(self) -> ServerStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        return snapshot(
            ServerStatistics,
            self._counts,
            clients=len(self._clients),
            max_clients=self._max_clients,
            waiting=len(self._ready),
            max_waiting=self._max_waiting,
            in_hand=len(self._in_hand),
            mapped_bytes=self._mapped_bytes(self._clients.values()),
            max_mapped_bytes=self._max_mapped_bytes,
            leases=self._mappings.leases,
            arena_bytes=self._memory.gate.limit,
            bytes_in_use=self._memory.gate.in_use,
        )

    async def aclose(self) -> None:
        """Close the server: taken requests raise `PeerLostError`, and tasks in blocks are cancelled.

        Iterations end. Waits at most 1 s until the connections have accepted the answers. Cancellation ends
        the wait. Closing again has no effect.
        """
        self.affinity.check_place()
        if self.affinity.close() and self._listener is not None:
            with self.affinity.leaving():
                await self._close(self._listener)

    async def _close(self, listener: Listener) -> None:
        listener.close()
        self._admission.close()
        self._memory.gate.fail(self.affinity.closed_error)
        clients = list(self._clients.values())
        self._clients.clear()
        try:
            self._mappings.freed.collect_all()
            for client in clients:  # before their requests end, so that other servers get the untaken ones
                client.close()
            for incoming in [*self._ready, *self._in_hand]:
                self._cancel(incoming)
            self._wake()
            await close_sessions(clients, self._memory, self._mappings)
        finally:
            self._log.close()

    def _details(self) -> list[str]:
        details = [f"at {self.address}"]
        if self.affinity.is_open:
            details.append(f"{len(self._clients)} clients, {len(self._ready)} messages waiting")
        return details

    def _segment_closed(self, segment: ForeignSegment) -> None:
        for client in self._clients.values():
            client.detach(segment)

    # Clients

    def _refusal(self, hello: Hello) -> str | None:
        """Return a reason to refuse a client, with a remedy; None if it can be admitted."""
        if not hello.id or not hello.max_messages:
            return "its hello has no id or no permits"
        others = [client for client in self._clients.values() if client.id != hello.id]
        mapped = self._mapped_bytes(others)
        left, most = len(self._leftovers), self._max_clients
        if most is not None and len(others) + left >= most:
            more = f", including {left} disconnected clients with waiting messages" if left else ""
            return (
                f"the server already has max_clients={most} clients{more}: raise max_clients, or close "
                "another client"
            )
        limit = self._max_mapped_bytes
        if limit is not None and mapped + hello.arena_bytes > limit:
            return (
                f"{mapped} bytes of shared memory are reserved for other clients and this client requests "
                f"{hello.arena_bytes}, more than max_mapped_bytes={limit} allows: raise max_mapped_bytes of "
                "the server, or lower arena_bytes of the clients"
            )
        return None

    def _mapped_bytes(self, clients: "Collection[_Client]") -> int:
        """Return the bytes reserved for clients, and for lost clients with waiting messages."""
        self._leftovers = {client: None for client in self._leftovers if client.untaken}
        reserved = sum(client.memory.arena_bytes for client in (*clients, *self._leftovers))
        return reserved + self._mappings.lingering_bytes

    def _refused(self, hello: Hello | None, reason: str) -> None:
        self._counts["clients_refused"] += 1

    def _reports(self) -> list[ServerReport]:
        """Return the statistics, for an inspector."""
        logger.debug("a process inspects this server", extra={"event": "server_inspected"})
        return [ServerReport(bounded(self.statistics()))]

    def _admitted(self, transport: Transport, connection: Connection) -> None:
        client = _Client(transport, connection, self)
        earlier = self._clients.get(client.id)
        if earlier is not None:  # the end of its connection is still unread
            earlier.end(earlier.connection.lost("the client connected again", is_retried=True))
        transport.start(client)
        self._clients[client.id] = client
        if transport.mover is not None:
            self._memory.movers.add(transport.mover)
        connection.admit()
        client.flush()

    def _lost(self, client: "_Client", loss: Loss) -> None:
        """Remove a client, and cancel its requests that want an answer."""
        if self._clients.get(client.id) is client:
            del self._clients[client.id]
        self._counts["clients_lost"] += 1
        wanted = [incoming for incoming in client.requests.values() if incoming.message.asks]
        # The client sends its other messages again if only the connection was lost.
        is_gone = loss.is_clean or (client.transport.is_closed and client.transport.mover is None)
        for incoming in list(client.requests.values()):
            if incoming.message.asks or (not is_gone and incoming.state is WAITING):
                self._cancel(incoming)
        if client.untaken:
            self._leftovers[client] = None
        client.leave()
        self._log.lost(loss, self._route.label, len(wanted))
        self._wake()  # wakes the consumer of a queue, which checks whether producers have ended

    # Requests

    def _wake(self) -> None:
        """Wake all tasks that wait for a request or a change."""
        self._takers.wake()
        self._waiters.wake()

    def _cancel(self, incoming: "Incoming") -> None:
        """End a request whose client cancelled it or is gone, and cancel the task that answers it."""
        self._counts["cancelled"] += 1
        self._end(incoming)
        if incoming.block is not None:
            incoming.block.cancel()

    def _end(self, incoming: "Incoming") -> None:
        """End a request; while it is decoded, it is not in the queue, and belongs to `_take`."""
        if incoming.state is WAITING and self._ready.remove(incoming):
            incoming.finish()
        incoming.state = ENDED
        incoming.request = None  # its end is no longer of interest
        self._in_hand.discard(incoming)
        incoming.session.requests.pop(incoming.message.message, None)

    def _refuse(self, incoming: "Incoming", error: Exception) -> None:
        """Release a message that cannot be decoded, and answer it with the error."""
        incoming.finish()
        if incoming.is_broken:  # its session has ended
            self._end(incoming)
        if incoming.state is not WAITING:
            return
        is_foreseen = isinstance(error, AioTensorError | ValueError)
        is_fault = isinstance(error, ProtocolError) or not is_foreseen
        text = _text_of(error)
        logger.log(
            logging.ERROR if is_fault else logging.INFO,
            "a message from process %s was refused: %s",
            incoming.session.pid,
            text,
            exc_info=None if is_foreseen else error,
            extra={
                "event": "message_refused",
                "peer_pid": incoming.session.pid,
                "error": type(error).__name__,
                "reason": text,
            },
        )
        if not incoming.message.asks:
            incoming.session.fail(incoming.number, error)
        self._fail(incoming, error)

    def _fail(self, incoming: "Incoming", error: BaseException) -> bool:
        """Send an error in place of an answer, and return whether the client still waited for it."""
        was_wanted = incoming.is_wanted
        if was_wanted:
            self._counts["failures"] += 1
            incoming.session.fail(incoming.number, error)
        self._end(incoming)
        return was_wanted

    def _requests_dropped(self, dropped: "list[Incoming]") -> None:
        """Fail the requests that were garbage-collected without an answer."""
        for incoming in dropped:
            if incoming in self._in_hand and not self.affinity.is_closed:
                if incoming.is_wanted:
                    logger.warning(
                        "a request from process %s was dropped without an answer: answer each request in its "
                        "block",
                        incoming.session.pid,
                        extra={"event": "request_dropped", "peer_pid": incoming.session.pid},
                    )
                # Reported as a loss, not as an error of the handler: a signal or a cancellation may arrive
                # after the request was taken, but before its block is entered.
                self._fail(incoming, asyncio.CancelledError("it was dropped without an answer"))


class _Client(MessageSession):
    """The connection of a client.

    Args:
        transport: the connection, which has not been started yet.
        connection: the rules, after the hello of the client.
        server: the server.

    Attributes:
        requests: its messages that have not ended, by their numbers.
        max_body_bytes: the maximum size of the body of an answer in bytes; None for no limit.
    """

    def __init__(self, transport: Transport, connection: Connection, server: MessageServer[Any]) -> None:
        limit = server._max_mapped_bytes
        super().__init__(transport, connection, server._log, server._memory, server._mappings, limit)
        self.id = self.hello.id
        self.name = f"client {self.id}"
        self.memory.arena_bytes = self.hello.arena_bytes
        self.max_body_bytes = self.hello.max_body_bytes
        self.requests: dict[int, Incoming] = {}
        self._server = server

    def taken(self, number: int) -> None:
        """Write at once that the application takes a request.

        A request whose server is lost is sent to another one if the server has not taken it. So the client
        must know before the application begins.
        """
        try:
            for record in self.connection.taken_now(number):
                self.transport.write(record)
        except OSError as error:
            self.unwritable(error)

    def answer(self, answer: "Answer") -> None:
        """Announce an answer whose blocks the client can read."""
        if answer.incoming.state is ENDED:  # it was cancelled while its blocks were moved
            self.unpost(answer)
            return
        connection = self.connection
        number, asked, content = connection.next_message, answer.incoming.message.message, answer.content
        if answer.content_block is None:  # as `frame`, without a call
            frame = Message(number, INLINE, content, len(content), None, answer.trace, False, asked)
        else:
            frame = answer.frame(number, answers=asked)
        try:
            for record in connection.post(frame):
                self.transport.write(record)
        except OSError as error:
            self.unwritable(error)

    async def announced(self, answer: "Answer") -> None:
        """Wait until the blocks of an answer were moved, and it was announced, or the client is lost."""
        try:
            await until(lambda: answer not in self.transfers or self.is_over or None, self._writing)
        except asyncio.CancelledError:
            if answer in self.transfers and not self.is_over:
                self.unpost(answer)
            else:  # it was announced in this iteration of the loop
                self._server._end(answer.incoming)
            raise

    def fail(self, number: int, error: BaseException) -> None:
        """Answer a message with an error."""
        type_name, text = _plain(type(error).__name__, MAX_TYPE_NAME), _plain(_text_of(error), MAX_TEXT)
        is_loss = not isinstance(error, Exception)  # this process stops its work
        self.connection.send(Failure(number, type_name, text, is_loss), len(text.encode()))
        self.schedule_flush()

    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record."""
        server = self._server
        for frame in frames:
            match frame:
                case Message():
                    if frame.answers is not None:
                        raise ProtocolError("it answered a server, which asks nothing")
                    most = server._max_waiting
                    if len(self.requests) >= most and self.connection.in_flight > most:
                        raise ProtocolError(f"more than {most} of its messages wait")
                    incoming = self.requests[frame.message] = Incoming(self, frame)
                    if frame.trace is not None:
                        incoming.trace_context = trace_context_of(frame)
                    self.untaken += 1
                    server._counts["messages_received"] += 1
                    server._ready.by_client.setdefault(self, deque()).append(incoming)
                    if server._takers:
                        server._takers.wake_one()
                    if server._waiters:
                        server._waiters.wake()
                case Discard():
                    cancelled = self.requests.get(frame.message)
                    if cancelled is not None:
                        server._cancel(cancelled)
                        if cancelled.is_taken and cancelled.message.asks:
                            self.connection.discarded(frame.message, confirms=True)
                            self.schedule_flush()
                case _:
                    self.control(frame, descriptors)
            if self.is_over:
                break

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        self._server._lost(self, loss)


class Request(Generic[M]):
    """A message of a client, to be answered once.

    To answer several requests at a time, use a task for each, and enter the request with ``async with``::

        async def answer(request):
            async with request:
                await request.answer(await work(request.message))

    When the client disconnects or cancels its request, the task in the block is cancelled, once, as
    `asyncio.Task.cancel` does: cleanup may wait, and code that catches `asyncio.CancelledError` is not
    cancelled again. The end of the block absorbs this cancellation; any other one, such as that of
    `asyncio.timeout` around the block, propagates.

    An `Exception` in the block is sent to the client as `RemoteError` and logged; leaving the block without
    an answer sends an error, too. Other exceptions propagate: `SystemExit`, `KeyboardInterrupt` and
    `asyncio.CancelledError` mean that this process stops its work, so the client gets `PeerLostError`. If a
    future that the block awaits is cancelled, and not the task itself, the `CancelledError` is logged, too.
    At the end of the block, the message is released with its tensors. If a request is garbage-collected
    without an answer, its client gets `PeerLostError`.
    """

    def __init__(self, incoming: "Incoming", message: M, server: MessageServer[M]) -> None:
        self._box = [message]  # empty when the message was released
        self._incoming = incoming
        self._server = server
        self._is_answered = self._is_entered = False
        self._span: tracing.Span | None = None  # of the block
        self._failure: BaseException | None = None  # the error of `fail`, for the span
        dropped = server._dropped
        incoming.request = weakref.ref(self, lambda _: dropped(incoming))
        incoming.state = IN_HAND
        server._in_hand.add(incoming)
        server._counts["messages_taken"] += 1
        if incoming.trace_context is not None and (tracer := tracing.tracer) is not None:
            tracer.delivered("message", incoming.trace_context, nbytes=incoming.message.nbytes)

    def __repr__(self) -> str:
        state = "answered" if self._is_answered else "unanswered" if self.is_wanted else "not wanted"
        return f"<{type(self).__name__} {state}, of process {self.client_pid}>"

    @property
    def message(self) -> M:
        """The message of the client, with its tensors in place."""
        if not self._box:
            raise UsageError(
                "this request was answered, or its block has ended: its message is no longer available"
            )
        return self._box[0]

    @property
    def client_pid(self) -> int:
        """The process id of the client, as the client reports it."""
        return self._incoming.session.pid or 0

    @property
    def is_wanted(self) -> bool:
        """Whether the client still waits for an answer."""
        return self._incoming.is_wanted

    @property
    def trace_context(self) -> Mapping[str, str] | None:
        """The trace context of the client; None unless tracing is enabled in both processes."""
        return self._incoming.trace_context

    async def answer(self, answer: object) -> bool:
        """Send the answer, and return whether the client still waited for it.

        Sends nothing if the client sent the message with `send`, cancelled the request, or disconnected.

        Afterwards the request releases its message, so that the shared memory of its tensors is free before
        the next message arrives; keep your own references to the parts that you still need.

        Args:
            answer: an object of the client's `answer_type`, with tensors and arrays anywhere in it. Do not
                change any part of it before the call returns. A large answer is encoded in a thread, which
                continues for a moment if the call is cancelled.

        Waits for memory if the answer has large tensors, and while the client does not read. If the call is
        cancelled before the answer is sent, the request can be answered again.

        Raises:
            UsageError: the request was answered before.
            TypeError: part of the answer cannot be encoded, as in `MessageClient.request`; answer again, or
                call `fail`.
            UnsupportedTensorError: a tensor would arrive changed.
            TooLargeError: the tensors exceed the server's `arena_bytes`, or the body exceeds the client's
                `max_body_bytes`; nothing was sent, so answer again, or call `fail`.
            WouldBlockError: all memory is used by answers that wait for more of it.
            OSError: the machine has no shared memory, no descriptors or no threads left.
            ClosedError: the server was closed.
        """
        if self._is_answered:
            raise _answered()
        self._is_answered = True
        box = [answer]
        del answer
        incoming, server, session = self._incoming, self._server, self._incoming.session
        was_wanted = False
        if incoming.state is not ENDED and incoming.message.asks:
            sent = Answer(
                server._memory,
                server._shares_memory,
                server.affinity,
                session.max_body_bytes,
                incoming=incoming,
            )
            try:
                await sent.place(box)
                while not session.transport.is_writable and incoming.state is not ENDED:
                    await session.accepted()
                if incoming.state is ENDED:
                    pass
                elif sent.blocks or session.transfers:
                    session.post(sent, partial(session.answer, sent))
                    if session.transport.mover is not None:
                        await session.announced(sent)
                else:
                    session.answer(sent)
            except BaseException:
                self._is_answered = not incoming.is_wanted
                raise
            finally:
                if sent.blocks or sent.owned:
                    sent.release()
            was_wanted = incoming.state is not ENDED
            server._counts["answers"] += was_wanted
        if not was_wanted:
            server.affinity.check_open()
        server._end(incoming)
        self._box = []
        return was_wanted

    async def fail(self, error: BaseException | str) -> bool:
        """Answer with an error, and return whether the client still waited for an answer.

        Args:
            error: the error or its text. The client raises a `RemoteError` with the name of the error's type
                and its text, or a `PeerLostError` if the error is not an `Exception`, such as `SystemExit`.

        Raises:
            UsageError: the request was answered before.
            ClosedError: the server was closed.
        """
        if self._is_answered:
            raise _answered()
        self._is_answered = True
        if isinstance(error, str):
            error = Exception(error)
        if self._span is not None:
            self._failure = error
        was_wanted = self._server._fail(self._incoming, error)
        if not was_wanted:
            self._server.affinity.check_open()
        return was_wanted

    async def __aenter__(self) -> Self:
        self._enter()
        block = self._incoming.block = CancelOnce()
        block.__enter__()
        if not self._incoming.is_wanted and self._incoming.message.asks:
            block.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        block = self._incoming.block
        if block is None:
            raise AssertionError("the block was entered before it ended")
        if self._server.affinity.is_left_in_child(error):
            return False
        was_cancelled = block.__exit__(kind, error, trace)
        self._end_span(error)
        self._leave(None if was_cancelled else error)
        return was_cancelled or isinstance(error, Exception)

    # The parts of a block that `blocking` has, too: the first two in the thread of the handler

    def _enter(self) -> None:
        if self._is_entered:
            raise UsageError("this request was already entered")
        self._is_entered = True
        if (tracer := tracing.tracer) is not None:
            self._span = tracer.answer(self._incoming.trace_context)

    def _end_span(self, error: BaseException | None) -> None:
        if self._span is not None:
            failure, self._failure = self._failure, None  # its traceback may refer to this request
            self._span.end(failure if error is None else error)

    def _leave(self, error: BaseException | None) -> None:
        """End the block: release the message, and send an error if there was no answer."""
        self._give_up(UsageError("the server's handler ended without an answer") if error is None else error)
        if error is not None:
            pid = self.client_pid
            _log_failure(
                error, f"a request from process {pid}", extra={"event": "request_failed", "peer_pid": pid}
            )

    def _give_up(self, error: BaseException) -> None:
        """Release the message, and send the error if there was no answer."""
        self._box = []
        if not self._is_answered and self._incoming.is_wanted:
            self._server.affinity.check_place()
            self._is_answered = True
            self._server._fail(self._incoming, error)


def _answered() -> UsageError:
    return UsageError("this request was already answered")


async def _answer_one(handler: Callable[[M], Awaitable[object]], batch: list[Request[M]]) -> None:
    """Call a handler with the message of a single request, and answer it with the result."""
    [request] = batch
    async with request:
        await request.answer(await _awaitable(handler(request.message)))


async def _answer_batch(
    handler: Callable[[list[M]], Awaitable[Sequence[object]]], batch: list[Request[M]]
) -> None:
    """Call a handler with the messages of a batch, and answer each request with its result."""
    results: Sequence[object] = ()
    with CancelOnce(len(batch)) as block:
        for request in batch:
            request._incoming.block = block
        try:
            with tracing.TracedBatch([request.trace_context for request in batch]):
                answers = _awaitable(handler([request.message for request in batch]))
                results = checked_results(await answers, len(batch))
        except BaseException as error:
            fail_batch(batch, error)
            if not isinstance(error, Exception):
                raise
        finally:
            for request in batch:
                request._incoming.block = None
    if results:
        async with asyncio.TaskGroup() as answering:  # a client that does not read delays only its answer
            for request, result in zip(batch, results, strict=True):
                answering.create_task(_answer(request, result))


async def _answer(request: Request[Any], result: object) -> None:
    async with request:
        if isinstance(result, Exception):
            await request.fail(result)
        else:
            await request.answer(result)


def _awaitable(result: R) -> R:
    """Return the result of a handler that is a coroutine function."""
    if not hasattr(result, "__await__"):
        raise TypeError(
            f"the handler returned {type(result).__name__!r} in place of a coroutine: "
            "define it with `async def`, or use an aiotensor.blocking.MessageServer"
        )
    return result


def checked_results(results: Sequence[object], count: int) -> Sequence[object]:
    """Return the results of a handler, if there is one for each request of its batch.

    Raises:
        TypeError: the handler returned something else than a sequence.
        ValueError: their number differs.
    """
    if not isinstance(results, Sequence):
        raise TypeError(f"the handler must return a list of {count} results, got {type(results).__name__!r}")
    if len(results) != count:
        raise ValueError(f"the handler returned {len(results)} results for a batch of {count} messages")
    return results


def fail_batch(batch: Sequence[Request[Any]], error: BaseException) -> None:
    """Answer all requests of a batch with the error of their handler, and log it once."""
    for request in batch:
        if (tracer := tracing.tracer) is not None:
            tracer.answer(request.trace_context).end(error)
        request._give_up(error)
    what = f"a batch of {len(batch)} requests"
    _log_failure(error, what, extra={"event": "batch_failed", "requests": len(batch)})


def _log_failure(error: BaseException, what: str, *, extra: dict[str, object]) -> None:
    """Log an error of a handler, but neither the end of the server nor the cancellation of the task."""
    if isinstance(error, asyncio.CancelledError):
        task = None if asyncio._get_running_loop() is None else asyncio.current_task()
        is_fault = task is None or not task.cancelling()  # a future that the handler awaited was cancelled
    else:
        is_fault = isinstance(error, Exception) and not isinstance(error, ClosedError)
    if is_fault:
        details = {"error": type(error).__name__, "reason": _text_of(error), **extra}
        logger.error("answering %s failed", what, exc_info=error, extra=details)


class Batches(Generic[M]):
    """Iterate over the requests of a server in batches; created by `MessageServer.batches`.

    A request waits in the server until its batch is complete. Until then its client keeps its permit, and a
    cancelled request leaves the batch.

    Args:
        server: the server.
        max_batch: the maximum number of requests in a batch.
        batch_wait_s: the time in seconds for which the first request of a batch may wait for others.

    Attributes:
        taken: the requests of the next batch that were taken so far.
    """

    def __init__(self, server: MessageServer[M], max_batch: int, batch_wait_s: float) -> None:
        self._server = server
        self._max_batch = arguments.count("max_batch", max_batch)
        self._wait_s = arguments.seconds("batch_wait_s", batch_wait_s)
        self.taken: list[Request[M]] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Request[M]]:
        """Return the next batch, with at least one request.

        The iteration ends when the server is closed. Cancellation loses no request: the requests that were
        taken already belong to the next batch of this iterator.
        """
        server = self._server
        while not server.affinity.is_closed:
            if not self.taken:
                await self._fill()
            while len(self.taken) < self._max_batch and (taken := await server._take(waits=False)):
                self.taken.append(taken)
            # Decoding a message may have taken long enough for others to be cancelled.
            batch = [request for request in self.taken if request._incoming.state is not ENDED]
            self.taken.clear()
            if batch:
                return batch
        raise StopAsyncIteration

    async def _fill(self) -> None:
        """Wait for the first request, and then for a full batch, at most for the given time."""
        server, ready = self._server, self._server._ready

        def is_full() -> bool | None:
            return not 0 < len(ready) < self._max_batch or server.affinity.is_closed or None

        await until(lambda: bool(ready.by_client) or server.affinity.is_closed or None, server._waiters)
        if self._max_batch > 1:
            with suppress(TimeoutError):
                await until(is_full, server._waiters, self._wait_s)


class State(enum.Enum):
    """The state of a request."""

    WAITING = "waiting"
    IN_HAND = "in hand"
    ENDED = "ended"


# Names of the module, because looking up a member of an enum is slow.
WAITING, IN_HAND, ENDED = State


class Incoming(Arrived[_Client], eq=False):
    """A message of a client, until it has ended.

    Attributes:
        state: the state of the request.
        block: cancels the task that answers the request; None until the task enters it.
        request: a weak reference to the `Request` of the application, while it is in hand.
    """

    state: State = WAITING
    block: CancelOnce | None = None
    request: weakref.ref[object] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the client waits for an answer."""
        return self.message.asks and self.state is not ENDED


def _text_of(error: BaseException) -> str:
    """Return the text of an error, even if its `__str__` raises."""
    try:
        text = str(error)
    except Exception as another:  # noqa: BLE001 - the client gets an answer in any case
        return f"(its text cannot be shown: {type(another).__name__})"
    return text or ("the server's handler was cancelled" if isinstance(error, asyncio.CancelledError) else "")


class FairQueue:
    """Order requests so that clients take turns; the requests of each client stay in order.

    A client with many waiting requests gets no more turns than a client with one.

    Attributes:
        by_client: the waiting requests of each client that has any, in the order of the turns.
    """

    def __init__(self) -> None:
        self.by_client: OrderedDict[_Client, deque[Incoming]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self.by_client.values()))

    def __iter__(self) -> Iterator[Incoming]:
        for requests in self.by_client.values():
            yield from requests

    def put_back(self, incoming: Incoming) -> None:
        """Return a request to the front, as if it had not been taken."""
        self.by_client.setdefault(incoming.session, deque()).appendleft(incoming)
        self.by_client.move_to_end(incoming.session, last=False)

    def take(self) -> Incoming:
        """Take a request of the client whose turn it is; the client then has the last turn.

        Raises:
            KeyError: no request waits.
        """
        client, requests = self.by_client.popitem(last=False)
        incoming = requests.popleft()
        if requests:
            self.by_client[client] = requests
        return incoming

    def remove(self, incoming: Incoming) -> bool:
        """Remove a request, and return whether it waited."""
        requests = self.by_client.get(incoming.session)
        if requests is None or incoming not in requests:
            return False
        requests.remove(incoming)
        if not requests:
            del self.by_client[incoming.session]
        return True


class Answer(Outgoing, kw_only=True, eq=False):
    """An answer that is being sent."""

    incoming: Incoming

    def no_space(self, nbytes: int, *, is_stuck: bool) -> WouldBlockError:
        """Return the error of an answer that gets no memory."""
        memory = self.memory.gate
        reason = "used by answers that wait for more of it" if is_stuck else "in use"
        return WouldBlockError(
            f"all shared memory is {reason} ({memory.in_use} of {memory.limit} bytes in use, {nbytes} bytes "
            "requested): raise arena_bytes of the server",
            bytes=Usage(memory.limit, memory.in_use, nbytes),
        )


def _plain(text: str, length: int) -> str:
    # A lone surrogate cannot be encoded, and the path in an error may contain one.
    return text[:length].encode(errors="backslashreplace").decode()[:length]
