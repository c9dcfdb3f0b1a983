"""The server: accepts the connections of clients, and passes their requests to the application."""

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Self, TypeVar, overload

import anyio

from aiotensor.channel.batches import Batches, answer_batch, not_awaitable
from aiotensor.channel.request import Request, fail_unstarted
from aiotensor.channel.requests import WAITING, ClientSession, Requests, closed
from aiotensor.codec import TensorDecoder
from aiotensor.link.admission import Admission
from aiotensor.link.events import PeerLog
from aiotensor.link.session import all_accepted
from aiotensor.memory.arena import whole_pages
from aiotensor.memory.mappings import ForeignSegment, Mappings
from aiotensor.memory.memory import Memory
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.frames import (
    VERSION,
    Hello,
    ServerReport,
    bounded,
)
from aiotensor.runtime import arguments
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.logs import logger_of
from aiotensor.statistics.counters import new_counts, snapshot
from aiotensor.transports.address import TcpArguments
from aiotensor.transports.base import Listener, Transport
from aiotensor.transports.endpoints import Endpoint, route_to
from aiotensor.types import MAX_NUMBER, CurveKey, ServerStatistics

logger = logger_of("server")

M = TypeVar("M")

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
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("MessageServer")
        given = TcpArguments(False, secret_key, None, client_keys, peer_timeout_s, finds_port=True)
        self._route = route_to(endpoint, given)
        self._max_bytes = arguments.count("arena_bytes", arena_bytes)
        self._arena_bytes = whole_pages(self._max_bytes)
        self._max_clients = arguments.count_or_none("max_clients", max_clients)
        self._max_waiting = arguments.count("max_waiting", max_waiting)
        self._max_mapped_bytes = arguments.count_or_none("max_mapped_bytes", max_mapped_bytes)
        self._max_body_bytes = arguments.count_or_none("max_body_bytes", max_body_bytes)
        self._counts = new_counts(ServerStatistics)
        self._log = PeerLog("server")
        self._memory = Memory(
            self._arena_bytes, _KEEP_WARM_S, self._counts, segment_closed=self._segment_closed
        )
        self._mappings = Mappings()
        self._clients: dict[str, _Client] = {}  # the connected ones, by their ids
        self._leftovers: dict[_Client, None] = {}  # lost clients whose messages still wait
        self._requests: Requests[M] = Requests(
            TensorDecoder(message_type),
            self._memory,
            self.affinity,
            self._counts,
            self._max_body_bytes,
            shares_memory=not self._route.label.startswith("tcp:"),
        )
        self._listener: Listener | None = None
        hello = Hello(
            VERSION,
            os.getpid(),
            "server",
            self._id,
            MAX_NUMBER,  # each answer belongs to a request
            self._arena_bytes,
            max_waiting=self._max_waiting,
            max_body_bytes=self._max_body_bytes,
        )
        self._admission = Admission(
            hello,
            "client",
            self._log,
            self._refusal,
            self._admitted,
            self._refused,
            self._reports,
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
            self._requests.dropped.bind()
            self._listener = await self._route.listen(self._admission.connection_accepted)
            if self.affinity.is_closed:  # by another task, during the wait
                await self._close(self._listener)
                raise closed()
        except BaseException:
            self.affinity.close()
            self._memory.close()
            self._mappings.close()
            raise
        self.affinity.settle(self, self._route.label)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Request[M]:
        """Return the next request.

        A message that cannot be decoded or is of another type is answered with the error, and skipped.
        Cancellation loses no request. The iteration ends when this server is closed. The call does not
        suspend if a small request has arrived.
        """
        if asyncio._get_running_loop() is not self.affinity.open_in:
            if self.affinity.is_closed:
                raise StopAsyncIteration
            self.affinity.check()
        requests = self._requests
        taken = await requests.take()
        if taken is None:
            raise StopAsyncIteration
        return Request(*taken, requests)

    async def _take(self, *, waits: bool = True) -> Request[M] | None:
        self._check()
        taken = await self._requests.take(waits=waits)
        return None if taken is None else Request(*taken, self._requests)

    async def arrived(self) -> None:
        """Wait until a request has arrived, without taking it.

        The next step of an iteration then takes the request, unless another task or a cancellation by its
        client comes first. It waits only if a thread must decode a large message; a message that cannot be
        decoded is skipped. Cancellation has no side effects.

        Raises:
            UsageError: this server is not open, or belongs to another thread or event loop.
            ClosedError: this server was closed, perhaps during the call.
        """
        self._check()
        while not self._requests.ready.by_client:
            await self._requests.waiters.wait()
            self._check()

    def batches(self, max_batch: int, *, batch_wait_s: float = 0.0) -> AsyncIterator[list[Request[M]]]:
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
        return Batches(self._requests, max_batch, batch_wait_s)

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
        if max_concurrent is not None and max_concurrent < (max_batch or 1):
            raise ValueError(
                f"max_concurrent must be at least max_batch, which is {max_batch}, got {max_concurrent}"
            )
        self._check()
        if max_batch is None:

            async def take() -> list[Request[M]]:
                request = None if self.affinity.is_closed else await self._take()
                return [] if request is None else [request]

            async def answer(one: list[Request[M]]) -> None:
                [request] = one
                async with request:
                    result = handler(request.message)
                    if not hasattr(result, "__await__"):
                        raise not_awaitable(result)
                    await request.answer(await result)

            await _serve(take, answer, 1, max_concurrent)
        else:
            batches = self.batches(max_batch, batch_wait_s=batch_wait_s)

            async def take_batch() -> list[Request[M]]:
                return await anext(batches, [])

            await _serve(take_batch, partial(answer_batch, handler), max_batch, max_concurrent or max_batch)

    def statistics(self) -> ServerStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        return snapshot(
            ServerStatistics,
            self._counts,
            clients=len(self._clients),
            max_clients=self._max_clients,
            waiting=len(self._requests.ready),
            max_waiting=self._max_waiting,
            in_hand=len(self._requests.in_hand),
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
        self._memory.gate.fail(closed)
        clients = list(self._clients.values())
        self._clients.clear()
        try:
            self._mappings.freed.collect_all()
            for client in clients:  # before their requests end, so that other servers get the untaken ones
                client.close()
            for incoming in [*self._requests.ready, *self._requests.in_hand]:
                self._requests.cancel(incoming)
            self._requests.wake()
            await all_accepted(clients)
            for client in clients:
                client.keep_pins(self._memory)
            await self._memory.aclose()
            await self._mappings.settle()
        finally:
            for client in clients:
                client.abort()
            self._memory.close()
            self._mappings.close()
            self._log.close()

    def _details(self) -> list[str]:
        details = [f"at {self.address}"]
        if self.affinity.is_open:
            details.append(f"{len(self._clients)} clients, {len(self._requests.ready)} messages waiting")
        return details

    def _check(self) -> None:
        if asyncio._get_running_loop() is not self.affinity.open_in:
            self.affinity.check()

    def _segment_closed(self, segment: ForeignSegment) -> None:
        for client in self._clients.values():
            client.detach(segment)

    # Clients

    def _refusal(self, hello: Hello) -> str | None:
        """Return a reason to refuse a client, with a remedy; None if it can be admitted."""
        if not hello.id or not hello.max_messages:
            return "its hello has no id or no permits"
        for client in tuple(self._leftovers):
            if not client.untaken:
                del self._leftovers[client]
        others = [client for client in self._clients.values() if client.id != hello.id]
        left, most = len(self._leftovers), self._max_clients
        if most is not None and len(others) + left >= most:
            more = f", including {left} disconnected clients with waiting messages" if left else ""
            return (
                f"the server already has max_clients={most} clients{more}: raise max_clients, or close "
                "another client"
            )
        mapped = self._mapped_bytes(others)
        limit = self._max_mapped_bytes
        if limit is not None and mapped + hello.arena_bytes > limit:
            return (
                f"{mapped} bytes of shared memory are reserved for other clients and this client requests "
                f"{hello.arena_bytes}, more than max_mapped_bytes={limit} allows: raise max_mapped_bytes of "
                "the server, or lower arena_bytes of the clients"
            )
        return None

    def _mapped_bytes(self, clients: "Collection[_Client]") -> int:
        left = [client for client in self._leftovers if client.untaken]
        reserved = sum(client.memory.arena_bytes for client in (*clients, *left))
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
                self._requests.cancel(incoming)
        if client.untaken:
            self._leftovers[client] = None
        if client.transport.mover is not None:
            self._memory.movers.discard(client.transport.mover)
        client.keep_pins(self._memory)
        client.release_memory()
        self._log.lost(loss, self._route.label, len(wanted))
        self._requests.wake()  # wakes the consumer of a queue, which checks whether producers have ended


class _Client(ClientSession):
    """The connection of a client of this server."""

    def __init__(self, transport: Transport, connection: Connection, server: MessageServer[Any]) -> None:
        limits = server._max_waiting, server._max_mapped_bytes
        super().__init__(transport, connection, server._log, server._mappings, server._requests, *limits)
        self._owner = server

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        super().lost(loss)
        self._owner._lost(self, loss)


async def _serve(
    take: Callable[[], Awaitable[list[Request[M]]]],
    answer: Callable[[list[Request[M]]], Coroutine[Any, Any, None]],
    largest: int,
    max_concurrent: int | None,
) -> None:
    """Answer requests in tasks until the server is closed and all tasks have ended.

    Cancellation cancels the tasks, once, and waits until they have ended.

    Args:
        take: waits for the next requests, which one task answers; returns an empty list once the server is
            closed.
        answer: answers these requests.
        largest: the maximum number of requests that `take` returns.
        max_concurrent: the maximum number of requests at once, at least `largest`; None for no limit.
    """
    slots = asyncio.Semaphore(sys.maxsize if max_concurrent is None else max_concurrent)
    answering: set[asyncio.Task[None]] = set()

    def ended(batch: list[Request[M]], task: asyncio.Task[None]) -> None:
        answering.discard(task)
        _release(slots, len(batch))
        if task.cancelled():
            for request in batch:  # `ended` kept them alive: otherwise they would count as dropped
                fail_unstarted(request)

    async with asyncio.TaskGroup() as group:
        try:
            while True:
                for _ in range(largest):
                    await slots.acquire()
                batch = await take()
                if not batch:
                    break
                _release(slots, largest - len(batch))
                task = group.create_task(answer(batch))
                answering.add(task)
                task.add_done_callback(partial(ended, batch))
                del batch, task  # otherwise, the tensors would live until the next request arrives
            while answering:
                await asyncio.wait(answering)
        except asyncio.CancelledError:
            # Not in a loop: before Python 3.13, the error and its traceback refer to each other, so a
            # variable of this frame would keep the last task, with its request.
            list(map(asyncio.Task.cancel, answering))
            # A surrounding scope of anyio would cancel this wait again in each iteration of the loop.
            with anyio.CancelScope(shield=True):
                while answering:
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait(answering)
            raise


def _release(slots: asyncio.Semaphore, count: int) -> None:
    for _ in range(count):
        slots.release()
