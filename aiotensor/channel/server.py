"""The server: receives messages from clients and answers them."""

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import closing, suppress
from typing import Any, Generic, Self, TypeVar

import torch

from aiotensor.channel import options
from aiotensor.channel.asked import Asked, Limits, State, await_tensors, take_tensors
from aiotensor.channel.clients import Clients
from aiotensor.channel.endpoint import Endpoint
from aiotensor.channel.options import Key
from aiotensor.channel.parcels import Disposal, Loans, check_parts, discard, pack, unpack
from aiotensor.channel.request import Answerer, Request, cause_of
from aiotensor.channel.serving import serve
from aiotensor.channel.turns import Turns
from aiotensor.codec import TensorDecoder
from aiotensor.errors import ClosedError, ProtocolError, UsageError
from aiotensor.protocol.exchange import Cause
from aiotensor.receiver import TensorReceiver
from aiotensor.runtime.affinity import FreedItems, LoopAffinity, LoopObject
from aiotensor.runtime.waiting import Waiters
from aiotensor.sender import TensorSender
from aiotensor.statistics.counters import new_counts, snapshot
from aiotensor.transports.address import label_of
from aiotensor.types import ServerStatistics, TensorHandle

__all__ = ["MessageServer"]

M = TypeVar("M")


class MessageServer(LoopObject, Generic[M]):
    """Receive messages that contain tensors from many clients, and answer them in any order.

    Open it with ``async with``, once, and iterate in one or several tasks: ``async for request in server``.
    Or call `serve` to run a function for each message. The iteration takes a message, and the tensors that a
    sender has sent for it, when the next one is requested. Until then the senders keep their permits, so a
    slow server applies backpressure. Clients take turns, so a client with many messages does not delay the
    others. The messages of one client are returned in the order in which they are complete: a message does
    not wait for the tensors of another.

    Opening raises `UsageError` if another server listens at the address, and `OSError` if it cannot listen
    there; at ``ipc://`` it waits as a `TensorReceiver` does.

    Args:
        address: where clients connect: ``ipc://`` and an absolute path, for processes of this user only, or
            ``tcp://`` with a host and a port, 0 for any free one. Opening resolves the name of a host.
        message_type: the type of the messages, as msgspec accepts it; messages are validated against it.
        receiver: an open receiver for the senders of the clients. Do not iterate over it. If the tensors of a
            message do not arrive within its `max_wait_s`, the answer is a `WouldBlockError`.
        sender: an open sender to the receiver of a client, which sends the tensors of answers to that client;
            a sequence for several clients. Without one, an answer contains its tensors.
        max_clients: the most clients at once, including disconnected ones with messages that wait to be
            taken; None for no limit.
        max_waiting: the most messages of each client that wait here to be taken; it then stops sending.
        max_waiting_bytes: the bytes of waiting messages at which a client stops sending, not counting
            tensors that senders have sent.
        high_water_mark: the most messages that ZeroMQ queues, in each direction, for each client. With
            heartbeats it bounds only those to a client; `max_waiting` bounds those from a client.
        max_part_bytes: the largest part of a message in bytes: its body, one tensor beside the body, or all
            small ones there; None for no limit. The server announces it, and clients raise `TooLargeError`
            for a message that exceeds it. A client that sends such a message anyway is disconnected.
        max_body_bytes: the largest body of a message in bytes, which holds everything but tensors and arrays;
            None for no limit but `max_part_bytes`. Clients enforce it in the same way, and a larger body is
            never decoded here. A thread decodes large bodies, but blocks the event loop: for 1 to 16 ms
            for each MiB of numbers, texts and structs, and for up to a second for each MiB of tiny lists.
        heartbeat_interval_s: seconds between heartbeats to a client.
        heartbeat_timeout_s: seconds without a reply to a heartbeat after which a client is lost. On this
            machine the kernel reports at once when a process ends, so heartbeats are sent only if one of
            these two is given. For other machines the defaults are 0.25 and 0.65: a loss is noticed as by a
            `MessageClient`. The largest part must arrive within the timeout: raise it for slow networks.
        secret_key: this server's CURVE key; without one it can listen on this machine only.
        client_keys: the public keys of the clients that may connect; required with `secret_key`.
        linger_s: the most seconds that `aclose` waits for answers to be sent.

    Raises:
        TypeError: an argument is of a wrong type.
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
        secret_key: Key | None = None,
        client_keys: Collection[Key] = (),
        linger_s: float = 1.0,
    ) -> None:
        self._affinity = LoopAffinity("MessageServer")
        keys, allowed = options.server_keys(secret_key, client_keys)
        parsed = options.parse(address, has_keys=bool(keys), how="secret_key and client_keys")
        parts = options.part_limits(max_part_bytes, max_body_bytes)
        limits = options.limits(
            [parsed], high_water_mark, parts.part_bytes, heartbeat_interval_s, heartbeat_timeout_s
        )
        self._endpoint = Endpoint(parsed, {**limits, **keys}, allowed)
        self._linger_s = options.seconds("linger_s", linger_s)
        self._receiver = receiver
        self._senders = (sender,) if isinstance(sender, TensorSender) else tuple(sender)
        self._decoder: TensorDecoder[M] = TensorDecoder(message_type)
        allowance = Limits(
            None if max_clients is None else options.positive("max_clients", max_clients),
            options.positive("max_waiting", max_waiting),
            options.positive("max_waiting_bytes", max_waiting_bytes),
            parts,
        )
        self._arriving: dict[Asked, asyncio.Task[None]] = {}  # waiting for tensors
        self._waiters = Waiters()
        self._counts = new_counts(ServerStatistics)
        receiver_id = "" if receiver is None else receiver.id
        self._clients = Clients(allowance, receiver_id, self, self._waiters, self._counts)
        self._ready = Turns()  # messages whose tensors have arrived
        self._found: dict[Asked, list[torch.Tensor]] = {}  # tensors taken before decoding was cancelled
        self._in_hand: set[Asked] = set()
        self._waiting = self._waiting_bytes = 0

    @property
    def address(self) -> str:
        """Where clients connect, with the actual port if 0 was given."""
        return self._endpoint.address

    async def __aenter__(self) -> Self:
        loop = self._affinity.enter()
        self._loans, self._disposal = Loans(), Disposal()
        self._dropped: FreedItems[Asked] = FreedItems(loop, self._requests_dropped)
        try:
            self._clients.socket = await self._endpoint.open(self._clients)
        except BaseException:
            self._affinity.is_closed = True
            raise
        self._affinity.settle(self, label_of(self.address))
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Request[M]:
        """Return the next request whose tensors have arrived.

        A message that cannot be decoded or is of another type is answered with the error, and skipped.
        Cancelling loses nothing. Ends when this server is closed. Does not suspend if a small request is
        ready.
        """
        if self._affinity.is_closed:
            raise StopAsyncIteration
        self._affinity.check()
        while True:
            while self._ready:
                request = await self._take(self._ready.take())
                if request is not None:
                    return request
            if self._affinity.is_closed:
                raise StopAsyncIteration
            await self._waiters.wait()

    async def serve(
        self, handler: Callable[[M], Awaitable[object]], *, max_concurrent: int | None = None
    ) -> None:
        """Answer every message with the result of a function, called in a separate task.

        The task is cancelled, once, when the client disconnects or cancels its request. A thread that the
        function waits for is not notified: pass it a `threading.Event` that the function sets in the end. An
        exception in the function reaches the client as `RemoteError`, and is logged.

        Args:
            handler: called with each message; returns the answer.
            max_concurrent: the most messages that are handled at once; None for no limit.

        Returns when this server is closed and the tasks have ended. Cancelling cancels the tasks, once, and
        waits until they have ended.

        Raises:
            UsageError: this server is not open, or belongs to another thread or event loop.
            ClosedError: it was closed before.
            ValueError: `max_concurrent` is not positive.
        """
        turns = None
        if max_concurrent is not None:
            turns = asyncio.Semaphore(options.positive("max_concurrent", max_concurrent))
        self._affinity.check()
        await serve(self, handler, turns)

    def statistics(self) -> ServerStatistics:
        """Return the current state and the counters; works after closing too."""
        self._affinity.check_place()
        return snapshot(
            ServerStatistics,
            self._counts,
            clients=len(self._clients),
            max_clients=self._clients.limits.clients,
            waiting=self._waiting,
            max_waiting=self._clients.limits.waiting,
            waiting_bytes=self._waiting_bytes,
            max_waiting_bytes=self._clients.limits.waiting_bytes,
            in_hand=len(self._in_hand),
        )

    async def aclose(self) -> None:
        """Close: clients get `PeerLostError`, blocks of requests are cancelled, iterations end.

        Waits until answers are sent, at most `linger_s` seconds. Cancelling ends the wait. Closing again
        does nothing.
        """
        self._affinity.check_place()
        was_open, self._affinity.is_closed = self._affinity.is_open, True
        if not was_open:
            return
        self._clients.say_farewell()
        for asked in (*self._ready, *self._arriving):  # of clients that have disconnected
            self._drop(asked)
        self._in_hand.clear()
        self._waiters.wake()
        with self._affinity.leaving(), closing(self._disposal):
            await self._endpoint.close(self._linger_s)

    # Events of clients

    def _asked(self, asked: Asked) -> None:
        """Queue a new message, after its tensors have arrived."""
        self._counts["messages_received"] += 1
        self._waiting += 1
        self._waiting_bytes += asked.nbytes
        if not asked.handles:
            self._make_ready(asked)
        elif self._receiver is None:
            self._refuse(asked, ProtocolError("this server has no receiver for tensors that a sender sends"))
        else:
            waiting = await_tensors(asked, self._receiver, weakref.WeakMethod(self._tensors_came))
            task = asyncio.get_running_loop().create_task(waiting)
            if not task.done():  # an eager task may be
                self._arriving[asked] = task

    def _unwanted(self, asked: Asked, state: State) -> None:
        """Release a message that was given up, and cancel the block of its request."""
        self._counts["cancelled"] += 1
        if state is State.WAITING:
            self._stop_waiting(asked)
        else:
            request = None if asked.request is None else asked.request()
            self._let_go(asked)
            if isinstance(request, Request):
                request._cancel()

    def _is_arriving(self, asked: Asked) -> bool:
        return asked in self._arriving

    def _is_in_vain(self, asked: Asked) -> bool:
        """Return whether a message waits for tensors of a sender that has never connected."""
        receiver = self._receiver
        if receiver is None or asked not in self._arriving:
            return False
        return not all(receiver._knows(handle.sender) for handle in asked.handles)

    def _tensors_came(self, asked: Asked, error: Exception | None) -> None:
        self._arriving.pop(asked, None)
        if error is None:
            self._make_ready(asked)
        else:
            self._refuse(asked, error)

    def _make_ready(self, asked: Asked) -> None:
        self._ready.add(asked)
        self._waiters.wake()

    # Taking

    async def _take(self, asked: Asked) -> Request[M] | None:
        """Return the request for a message, or None if it has ended; cancelling puts it back in front."""
        try:
            found = self._found.pop(asked, None) or []
            try:
                if asked.handles and self._receiver is not None:
                    await take_tensors(self._receiver, asked.handles, found)
                message: M = await unpack(self._decoder, asked.parts, found)
            except asyncio.CancelledError:
                if asked.state is State.WAITING and self._affinity.is_closed:
                    self._drop(asked)
                elif asked.state is State.WAITING:
                    self._found[asked] = found
                    self._ready.put_back(asked)
                    self._waiters.wake()
                raise
        except Exception as error:  # noqa: BLE001 - decoding runs code of the user's type
            self._refuse(asked, error)
            return None
        if asked.state is State.WAITING and self._affinity.is_closed:
            self._drop(asked)
        if asked.state is not State.WAITING:
            # It was given up during decoding.
            box = [message]
            del message
            self._free(asked, box)
            return None
        asked.state = State.IN_HAND
        self._in_hand.add(asked)
        request = Request(asked, message, Answerer(self._answer, self._fail, self._free, self._affinity))
        dropped = self._dropped
        asked.request = weakref.ref(request, lambda _: dropped(asked))  # does not keep this server alive
        self._count_out(asked)  # last: sending credit may reveal that the client is gone
        return request

    def _refuse(self, asked: Asked, error: Exception) -> None:
        """Answer a waiting message with an error, and release it."""
        if asked.state is State.WAITING:
            cause = cause_of(error)
            asked.client.note_refusal(error, cause.text)
            self._counts["failures"] += 1
            self._clients.fail(asked, cause)
            self._stop_waiting(asked)

    def _drop(self, asked: Asked) -> None:
        """Release a waiting message without notifying its client."""
        self._clients.end(asked)
        self._stop_waiting(asked)

    def _stop_waiting(self, asked: Asked) -> None:
        """Release a waiting message and its tensors."""
        self._count_out(asked)
        self._found.pop(asked, None)
        task = self._arriving.pop(asked, None)
        if task is not None:
            task.cancel()
        self._ready.remove(asked)
        if self._receiver is not None and asked.handles:
            with suppress(ClosedError, ValueError):
                self._receiver.discard(asked.handles[0])

    def _count_out(self, asked: Asked) -> None:
        self._waiting -= 1
        self._waiting_bytes -= asked.nbytes
        self._disposal.let_go(asked.parts)
        self._clients.take(asked)

    # Answering

    async def _answer(self, asked: Asked, box: list[object]) -> bool:
        """Send the answer in a box, and return whether a client waited for it."""
        self._affinity.check()
        sender = asked.client.sender_among(self._senders)
        was_wanted = asked.is_wanted and await self._send_answer(asked, box, sender)
        if not was_wanted:
            self._affinity.check()  # the server may have been closed
        self._counts["answers"] += was_wanted
        self._let_go(asked)
        return was_wanted

    def _fail(self, asked: Asked, cause: Cause) -> bool:
        """Send a failure in place of an answer, and return whether the client still waited for it."""
        self._affinity.check()
        was_wanted = self._clients.fail(asked, cause)
        self._counts["failures"] += was_wanted
        self._let_go(asked)
        return was_wanted

    async def _send_answer(self, asked: Asked, box: list[object], sender: TensorSender | None) -> bool:
        parcel = await pack(box, has_sender=sender is not None)
        parts = parcel.parts
        handles: tuple[TensorHandle, ...] = ()
        try:
            check_parts(parts, asked.client.limits, "client")
            if sender is None and self._senders and len(parts) > 1:
                asked.client.note_detour()
            if sender is not None and parcel.tensors:
                handles = await parcel.send_tensors(sender)
            loan = self._loans.lend(parts)
            was_wanted = await self._clients.answer(asked, parts, handles)
        finally:
            parcel.tensors.clear()
            self._disposal.let_go(parts)
            if not asked.is_answered:
                discard(sender, handles)
        if loan is not None and was_wanted:
            await loan
        return was_wanted

    def _free(self, asked: Asked, box: list[Any]) -> None:
        """Empty a box that holds a client's message, in a thread if freeing it may take long."""
        if asked.is_large:
            self._disposal.free(box)

    def _let_go(self, asked: Asked) -> None:
        """Mark a message as finished."""
        asked.request = None
        self._in_hand.discard(asked)
        self._clients.end(asked)

    def _requests_dropped(self, dropped: list[Asked]) -> None:
        """Fail the requests that were garbage-collected without an answer."""
        for asked in dropped:
            if asked in self._in_hand and not self._affinity.is_closed:
                if asked.is_wanted:
                    asked.client.note_dropped_request()
                # A signal or a cancellation may come between taking a request and entering its block.
                self._fail(
                    asked, Cause(UsageError.__name__, "it was dropped without an answer", is_loss=True)
                )

    def _details(self) -> list[str]:
        held = f"{len(self._clients)} clients, {self._waiting} messages waiting"
        return [f"at {label_of(self.address)}", *([held] if self._affinity.is_open else [])]
