"""The server: receives messages from clients and answers them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import closing, nullcontext
from functools import partial
from typing import Any, Generic, Self, TypeVar, overload

from aiotensor.channel import options
from aiotensor.channel.batches import Batches, answer_batch, not_awaitable
from aiotensor.channel.clients import Clients
from aiotensor.channel.incoming_requests import IncomingRequests
from aiotensor.channel.request import Request
from aiotensor.channel.serving import serve
from aiotensor.codec import TensorDecoder
from aiotensor.errors import UsageError
from aiotensor.protocol.parts import Parts
from aiotensor.protocol.server import ClientLimits
from aiotensor.receiver import TensorReceiver
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import count, count_or_none, instances, seconds
from aiotensor.sender import TensorSender
from aiotensor.statistics.counters import new_counts, snapshot
from aiotensor.transports.address import label_of
from aiotensor.transports.zeromq.addresses import parse
from aiotensor.transports.zeromq.keys import listening_keys
from aiotensor.transports.zeromq.listener import MessageListener
from aiotensor.types import CurveKey, ServerStatistics

__all__ = ["MessageServer", "changed", "receive_now", "receive_ready", "take_ready", "wake"]

M = TypeVar("M")


class MessageServer(LoopObject, Generic[M]):
    """Receive messages that contain tensors from many clients, and answer them in any order.

    Open it with ``async with``, once, and iterate in one or several tasks: ``async for request in server``.
    Or call `serve` to run a function for each message. The iteration takes a message, and the tensors that a
    sender has sent for it, when the next one is requested. Until then the senders keep their permits, so a
    slow server applies backpressure. Clients take turns, so a client with many messages does not delay the
    others. The messages of one client are returned in the order in which they become complete: a message does
    not wait for the tensors of another.

    Opening raises `UsageError` if another server listens at the address, and `OSError` if this server cannot
    listen there; at ``ipc://``, it first waits while another process holds the lock of the folder.

    Args:
        address: the address to which clients connect: ``ipc://`` and an absolute path, for processes of this
            user only; ``engine://`` and the absolute path of a folder, which is also the address of the
            receiver, and is created if necessary; or ``tcp://`` with a host and a port, 0 for any free one.
            Opening resolves host names.
        message_type: the type of the messages, as msgspec accepts it; messages are validated against it.
        receiver: an open receiver for the senders of the clients. Do not iterate over it. If the tensors of a
            message do not arrive within its `max_wait_s`, the answer is a `WouldBlockError`.
        sender: an open sender to the receiver of a client, which sends the tensors of answers to that client;
            a sequence for several clients. Without one, an answer contains its tensors.
        max_clients: the maximum number of clients at once, including disconnected ones with messages that
            wait to be taken; None for no limit.
        max_waiting: the maximum number of messages of each client that wait to be taken; the client then
            stops sending.
        max_waiting_bytes: the number of bytes of waiting messages at which a client stops sending; tensors
            that senders have sent do not count.
        high_water_mark: the maximum number of messages that ZeroMQ queues for each client in each direction.
            With heartbeats, it limits only messages to a client; `max_waiting` limits messages from a client.
        max_part_bytes: the maximum size of a part of a message in bytes; None for no limit. A part is the
            body, one tensor beside the body, or all small tensors beside the body. The server announces the
            limit, and clients raise `TooLargeError` for a message that exceeds it. A client that sends such a
            message anyway is disconnected.
        max_body_bytes: the maximum size of the body of a message in bytes; None for no limit but
            `max_part_bytes`. The body contains everything but tensors and arrays; of these, it contains at
            most 64 KiB in total. Clients enforce the limit in the same way, and a larger body is never
            decoded here. A thread decodes large bodies, but blocks the event loop: for 1 to 16 ms for each
            MiB of numbers, texts and structs, and for up to a second for each MiB of tiny lists.
        heartbeat_interval_s: the time between heartbeats to a client, in seconds.
        heartbeat_timeout_s: the time in seconds without a reply to a heartbeat after which a client is lost.
            On this machine the kernel reports at once when a process ends, so heartbeats are sent only if one
            of these two arguments is given. For other machines the defaults are 0.25 and 0.65: a loss is
            noticed as fast as by a `MessageClient`. The largest part must arrive within the timeout: raise it
            for slow networks.
        secret_key: the CURVE secret key of this server; without one, it can listen on this machine only.
        client_keys: the CURVE public keys of the clients that may connect; required with `secret_key`.
        linger_s: the maximum time in seconds for which `aclose` waits until answers are sent.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the address is invalid, or is reachable from other machines and there are no keys, or a
            limit is not positive.
    """

    def __init__(
        self,
        address: str,
        message_type: type[M],
        *,
        receiver: TensorReceiver | None = None,
        sender: TensorSender | Sequence[TensorSender] = (),
        max_clients: int | None = 64,
        max_waiting: int = 64,
        max_waiting_bytes: int = 64 << 20,
        high_water_mark: int = 16,
        max_part_bytes: int | None = 1 << 30,
        max_body_bytes: int | None = 1 << 20,
        heartbeat_interval_s: float | None = None,
        heartbeat_timeout_s: float | None = None,
        secret_key: CurveKey | None = None,
        client_keys: Collection[CurveKey] = (),
        linger_s: float = 1.0,
    ) -> None:
        self.affinity = LoopAffinity("MessageServer")
        keys, allowed = listening_keys(secret_key, client_keys)
        parsed = parse(address, has_keys=bool(keys))
        parts = options.part_limits(max_part_bytes, max_body_bytes)
        limits = options.limits(
            [parsed], high_water_mark, parts.part_bytes, heartbeat_interval_s, heartbeat_timeout_s
        )
        self._listener = MessageListener(parsed, {**limits, **keys}, allowed)
        self._linger_s = seconds("linger_s", linger_s)
        self._receiver = receiver
        if receiver is not None:
            instances("receiver", receiver, TensorReceiver, "aiotensor.TensorReceiver")
        self._senders = tuple(instances("sender", sender, TensorSender, "aiotensor.TensorSender"))
        self._decoder: TensorDecoder[M] = TensorDecoder(message_type)
        self._limits = ClientLimits(
            count_or_none("max_clients", max_clients),
            count("max_waiting", max_waiting),
            count("max_waiting_bytes", max_waiting_bytes),
            parts,
        )
        self._counts = new_counts(ServerStatistics)
        self._clients: Clients | None = None  # None before opening

    @property
    def address(self) -> str:
        """The address to which clients connect, with the actual port if 0 was given."""
        return self._listener.address

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        receiver = "" if self._receiver is None else self._receiver.id
        try:
            await self._listener.open()
            self.affinity.check()  # another task may have closed it in the meantime
            requests = IncomingRequests(
                self._decoder, self._receiver, self._senders, self.affinity, self._counts
            )
            self._clients = Clients(self._limits, receiver, requests, self._counts, self._listener.listen)
        except BaseException:
            await self._listener.close(0.0)
            self.affinity.close()
            raise
        self.affinity.settle(self, label_of(self.address))
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Request[M]:
        """Return the next request whose tensors have arrived.

        A message that cannot be decoded or is of another type is answered with the error, and skipped.
        Cancellation loses no request. The iteration ends when this server is closed. The call does not
        suspend if a small request is ready.
        """
        if self.affinity.is_closed:
            raise StopAsyncIteration
        taken = await self._take(self._opened())
        if taken is None:
            raise StopAsyncIteration
        return taken

    async def _take(self, requests: IncomingRequests[Any], *, waits: bool = True) -> Request[M] | None:
        """Take a request, and wait for it if `waits`; return None if none waits or the server is closed."""
        while True:
            while requests.ready.by_client:
                taken = await requests.take()
                if taken is not None:
                    return Request(*taken, requests, self)
            if not waits or self.affinity.is_closed:
                return None
            try:
                await requests.takers.wait()
            except asyncio.CancelledError:
                requests.wake_taker()  # in place of this task, which may have been woken
                raise

    def _opened(self) -> IncomingRequests[Any]:
        if asyncio._get_running_loop() is not self.affinity.open_in:
            self.affinity.check()
        if self._clients is None:
            raise UsageError("this MessageServer is being opened: wait until `async with` has entered it")
        return self._clients.requests

    async def arrived(self) -> None:
        """Wait until a request has arrived with its tensors, without taking it.

        The next step of an iteration then takes the request, unless another task or a cancellation by its
        client comes first. It waits only if a thread must decode a large message; a message that cannot be
        decoded is skipped. Cancellation has no side effects.

        Raises:
            UsageError: this server is not open, or belongs to another thread or event loop.
            ClosedError: this server was closed, perhaps during the call.
        """
        while not (requests := self._opened()).ready.by_client:
            await requests.waiters.wait()

    def batches(self, max_batch: int, *, batch_wait_s: float = 0.0) -> AsyncIterator[list[Request[M]]]:
        """Return an iterator over batches: ``async for batch in server.batches(8)``.

        Each batch is a list of requests. A request waits in the server until its batch is complete, so
        cancelled requests leave the batch, and senders keep their permits. Clients take turns, as for
        requests.

        Args:
            max_batch: the maximum number of requests in a batch.
            batch_wait_s: the time in seconds for which the first request of a batch may wait for others; by
                default, a batch contains the requests that are ready.

        Raises:
            TypeError: `max_batch` is not an integer.
            ValueError: `max_batch` is not positive, or `batch_wait_s` is negative.
        """

        async def take() -> Request[M] | None:
            return await self._take(self._opened(), waits=False)

        def requests() -> IncomingRequests[Any] | None:
            return None if self.affinity.is_closed else self._opened()

        return Batches(take, requests, max_batch, batch_wait_s)

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
                default, a batch contains the messages that are ready.
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
        max_concurrent = count_or_none("max_concurrent", max_concurrent)
        if max_concurrent is not None and max_concurrent < (max_batch or 1):
            raise ValueError(
                f"max_concurrent must be at least max_batch, which is {max_batch}, got {max_concurrent}"
            )
        requests = self._opened()
        if max_batch is None:

            async def take() -> list[Request[M]]:
                request = await self._take(requests)
                return [] if request is None else [request]

            async def answer(one: list[Request[M]]) -> None:
                [request] = one
                async with request:
                    result = handler(request.message)
                    if not hasattr(result, "__await__"):
                        raise not_awaitable(result)
                    await request.reply(await result)

            await serve(take, answer, 1, max_concurrent)
        else:
            batches = self.batches(max_batch, batch_wait_s=batch_wait_s)

            async def take_batch() -> list[Request[M]]:
                return await anext(batches, [])

            await serve(take_batch, partial(answer_batch, handler), max_batch, max_concurrent or max_batch)

    def statistics(self) -> ServerStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        clients = self._clients
        requests = None if clients is None else clients.requests
        return snapshot(
            ServerStatistics,
            self._counts,
            clients=0 if clients is None else len(clients),
            max_clients=self._limits.clients,
            waiting=0 if requests is None else requests.waiting,
            max_waiting=self._limits.waiting,
            waiting_bytes=0 if requests is None else requests.waiting_bytes,
            max_waiting_bytes=self._limits.waiting_bytes,
            in_hand=0 if requests is None else requests.in_hand,
        )

    async def aclose(self) -> None:
        """Close the server: clients raise `PeerLostError`, tasks in blocks are cancelled, and iterations end.

        Waits until answers are sent, at most `linger_s` seconds. Cancellation ends the wait. Closing again
        has no effect.
        """
        self.affinity.check_place()
        was_open = self.affinity.close()
        if not was_open:
            return
        clients = self._clients
        if clients is not None:  # None: it is being opened by another task
            clients.close()
        with (
            self.affinity.leaving(),
            nullcontext() if clients is None else closing(clients.requests.memory),
        ):
            await self._listener.close(self._linger_s)

    def _details(self) -> list[str]:
        details = [f"at {label_of(self.address)}"]
        if self.affinity.is_open and self._clients is not None:
            waiting = self._clients.requests.waiting
            details.append(f"{len(self._clients)} clients, {waiting} messages waiting")
        return details


async def take_ready(server: MessageServer[M]) -> Request[M] | None:
    """Take a request that is ready, without waiting; return None if there is none; for `blocking`."""
    return await server._take(server._opened(), waits=False)


# For `queues`, whose requests are answered when they are taken.


async def receive_ready(server: MessageServer[M], answer: Parts) -> list[M]:
    """Take a request that is ready, and answer it in the same iteration of the loop.

    Returns a list with the message, or an empty list if no request is ready. Waits only while a thread
    decodes a large message. Cancellation loses no request.

    Args:
        server: the server.
        answer: the encoded answer.
    """
    requests = server._opened()
    while requests.ready.by_client:
        taken = await requests.take()
        if taken is not None:
            requests.answer_now(taken[0], answer)
            return [taken[1]]
    return []


def receive_now(server: MessageServer[M], answer: Parts) -> list[M]:
    """Take and answer a request as `receive_ready` does, but decode even a large message on this thread."""
    requests = server._opened()
    while requests.ready.by_client:
        taken = requests.take_now()
        if taken is not None:
            requests.answer_now(taken[0], answer)
            return [taken[1]]
    return []


async def changed(server: MessageServer[Any]) -> None:
    """Wait until a request may be ready, which the caller takes, or the server or a client has closed."""
    requests = server._opened()
    try:
        await requests.takers.wait()
    except asyncio.CancelledError:
        requests.wake_taker()
        raise


def wake(server: MessageServer[Any]) -> None:
    """End all waits of `changed`."""
    server._opened().wake()
