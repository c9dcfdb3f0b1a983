"""The client: sends messages to servers and returns their answers."""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Generic, Self, TypeVar

import torch

from aiotensor.channel import options, parcels
from aiotensor.channel.connection import Connection
from aiotensor.channel.context import Context, begin, end
from aiotensor.channel.options import Key
from aiotensor.channel.parcels import Answered, Asked, Disposal, Handles, Loans, Parcel
from aiotensor.channel.servers import Servers
from aiotensor.codec import TensorDecoder
from aiotensor.errors import (
    AlreadyTakenError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
)
from aiotensor.receiver import TensorReceiver
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.waiting import seconds_or_never
from aiotensor.sender import OpenMessage, TensorSender
from aiotensor.statistics.counters import ErrorCounter, new_counts, snapshot
from aiotensor.transports.address import label_of
from aiotensor.types import ClientStatistics

__all__ = ["MessageClient"]

R = TypeVar("R")


class MessageClient(LoopObject, Generic[R]):
    """Send messages that contain tensors to a server, and await its answers.

    Open it with ``async with``, once, and share it between the tasks of that event loop. Opening does not
    wait for the server: messages wait until it has started. After a server is lost, the client connects to
    the next one at that address; requests to the lost server fail with `PeerLostError`.

    With a `sender`, the tensors of a message go through shared memory, as one message of the sender with one
    permit; tensors of a few KiB are part of the encoded message. Without a sender all tensors are, and ZeroMQ
    sends large ones without copying them.

    Threads encode and decode large messages. But msgspec holds the GIL, so the event loop waits: decoding
    takes 1 to 16 ms for each MiB of numbers, texts and structs, and up to a second for each MiB of tiny
    lists; encoding takes less than half as long. Put large data into tensors or arrays, which need neither.

    Args:
        address: of the server: ``ipc://`` and an absolute path, or ``tcp://`` with a host and a port. A
            sequence of them for several servers. Threads resolve the name of a host, again each second while
            no server is found; a name that cannot be resolved counts as a server that has not started.
        sender: an open sender to that server's receiver; close it after this client. For several servers, a
            sequence of one sender for each, in the same order.
        receiver: an open receiver for the tensors of answers, if the server has a sender to it. Do not
            iterate over it.
        reply_type: the type of the answers, as msgspec accepts it; answers are validated against it.
        high_water_mark: the most messages that ZeroMQ queues for each server, and without heartbeats also
            from it. While the queue to a server is full, `request` and `send` wait.
        max_part_bytes: the largest part of an answer in bytes: its body, one tensor beside the body, or all
            small ones there; None for no limit. The client announces it, and a request whose answer exceeds
            it raises `RemoteError`.
        max_body_bytes: the largest body of an answer in bytes, which holds everything but tensors and arrays;
            None for no limit but `max_part_bytes`. The server enforces it in the same way.
        heartbeat_interval_s: seconds between heartbeats to a server.
        heartbeat_timeout_s: seconds without a reply to a heartbeat after which a server is lost. On this
            machine the kernel reports at once when a process ends, so heartbeats are sent only if one of
            these two is given. For other machines the defaults are 0.25 and 0.65: a loss is noticed within
            1 s, or 1.5 s if packets are lost in one direction only. The largest part of a message must be
            transferred within the timeout: raise it for large tensors on a slow network.
        secret_key: this client's CURVE key, for servers on other machines; from `zmq.curve_keypair`.
        server_key: the servers' public key.
        max_wait_s: seconds after which a wait for a connection, or for a server to accept the message, raises
            `WouldBlockError`; each wait counts separately. None for no limit. Waiting for an answer is not
            limited.
        linger_s: the most seconds that `aclose` waits for messages to be sent.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an address is invalid, or is not local and there are no keys, a limit is not positive, or
            there are not as many senders as addresses.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        sender: TensorSender | Sequence[TensorSender] | None = None,
        receiver: TensorReceiver | None = None,
        reply_type: type[R],
        high_water_mark: int = 16,
        max_part_bytes: int | None = 1 << 30,
        max_body_bytes: int | None = 1 << 20,
        heartbeat_interval_s: float | None = None,
        heartbeat_timeout_s: float | None = None,
        secret_key: Key | None = None,
        server_key: Key | None = None,
        max_wait_s: float | None = None,
        linger_s: float = 1.0,
    ) -> None:
        self._affinity = LoopAffinity("MessageClient")
        self._errors = ErrorCounter()
        keys = options.client_keys(secret_key, server_key)
        texts = [address] if isinstance(address, str) else list(address)
        self._addresses = [
            options.parse(text, has_keys=bool(keys), how="secret_key and server_key", is_client=True)
            for text in texts
        ]
        self._senders: list[TensorSender | None] = (
            [sender] if sender is None or isinstance(sender, TensorSender) else list(sender)
        )
        if sender is None:
            self._senders *= len(texts)
        if not texts or len(self._senders) != len(texts):
            raise ValueError(
                f"got {len(self._senders)} senders and {len(texts)} addresses: there is one sender for each "
                "server, or none; with several addresses, give a list of senders in their order"
            )
        self._limits = options.part_limits(max_part_bytes, max_body_bytes)
        largest = self._limits.part_bytes
        self._options = {
            **options.limits(
                self._addresses, high_water_mark, largest, heartbeat_interval_s, heartbeat_timeout_s
            ),
            **keys,
        }
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        self._linger_s = options.seconds("linger_s", linger_s)
        self._receiver = receiver
        self._decoder: TensorDecoder[R] = TensorDecoder(reply_type)
        self._connections: list[Connection] = []
        self._sender_to: dict[Connection, TensorSender | None] = {}
        self._servers: Servers | None = None  # None for a single server
        self._context: Context | None = None
        self._counts = new_counts(ClientStatistics)

    async def __aenter__(self) -> Self:
        self._affinity.enter()
        self._loans, self._disposal = Loans(), Disposal()
        try:
            self._context = begin()
        except OSError:
            self._affinity.is_closed = True
            raise
        receiver = "" if self._receiver is None else self._receiver.id
        self._connections = [
            Connection(
                self._context,
                address,
                self._options,
                receiver,
                self._limits,
                self._max_wait_s,
                partial(parcels.drop_answer, self._disposal, self._receiver),
            )
            for address in self._addresses
        ]
        self._sender_to = dict(zip(self._connections, self._senders, strict=True))
        if len(self._connections) > 1:
            self._servers = Servers(self._sender_to, self._max_wait_s)
        for connection in self._connections:
            connection.connect(self._servers)
        self._affinity.settle(self, ",".join(label_of(address.text) for address in self._addresses))
        return self

    async def request(
        self, message: object, *, target: int | None = None, inside: OpenMessage | None = None
    ) -> R:
        """Send a message, and return the answer to it.

        Args:
            message: a msgspec Struct, a dataclass, a list or a dict, with tensors and arrays anywhere in it.
                Do not change any of it before this returns. A large message is encoded in a thread, which
                continues for a moment if this is cancelled.
            target: the number of one of several servers, from 0; by default the least loaded connected
                server that can take the message immediately. While there is none, the message waits
                for the first one, and if that is lost before the message is sent, for the next.
            inside: an open message of the sender, for callers that acquire the permit before they make the
                tensors, so that it limits video decoding, for example: ``async with sender.message() as
                permit: ... await client.request(message, inside=permit)``. It is complete when all tensors
                are sent, and discarded if the request fails after sending one.

        Waits for the server, for a permit and memory if it has tensors, for credit and queue space, and for
        the answer. Cancelling notifies the server, which cancels its task, and discards the tensors, so their
        permit and memory are released. The server may have finished its work by then.

        Raises:
            RemoteError: the server's handler raised an exception, or the server could not decode this
                message or receive its tensors; `type_name` is the type of the error.
            PeerLostError: the server died or closed before it answered, or its handler was cancelled or ended
                by an exception such as `SystemExit`; it may have done the work.
            RefusedError: the server, or the receiver of the sender, refused this client because of a limit or
                of its version. The next call tries again.
            AccessDeniedError: the server belongs to another user, or does not accept this client's key.
            ProtocolError: the answer is not of `reply_type`, or its tensors cannot be received.
            WouldBlockError: all of the sender's memory is held by messages that wait for more of it, or a
                wait exceeded the `max_wait_s` of this client, the sender or the receiver.
            OSError: the machine has no shared memory, no descriptors or no threads left.
            TypeError: part of the message cannot be encoded; `TensorEncoder.encode` lists further errors.
            UnsupportedTensorError: a tensor would arrive changed; no permit or memory was used for it.
            TooLargeError: a tensor exceeds the sender's `arena_bytes`, the body the server's
                `max_body_bytes`, a tensor in the message its `max_part_bytes`, or there are too many tensors;
                nothing was sent.
            ClosedError: this client was closed, perhaps during the call.
            ValueError: there is no such target, or `inside` is a message of another sender.
        """
        try:
            box = [message]
            del message
            # This takes the message out of the box, so only the caller holds its tensors during the wait.
            connection, asked, handles = await self._ask(box, target, inside, wants_answer=True)
            del inside
            try:
                answer = await self._answer_to(connection, asked, handles)
            finally:
                self._ended(connection)
                # Its error's traceback refers to this frame, and to the frames of callers with tensors.
                del asked
        except BaseException as error:
            self._errors.add(error)
            self._counts["failures"] += isinstance(error, Exception)
            self._counts["cancelled"] += isinstance(error, asyncio.CancelledError)
            raise
        self._counts["answers"] += 1
        return answer

    async def send(
        self, message: object, *, target: int | None = None, inside: OpenMessage | None = None
    ) -> None:
        """Send a message without requesting an answer.

        After it returns, the caller may change the tensors, and the message may still be lost with the
        server. Arguments, waiting and errors are those of `request`, except for the answer. Cancelling
        discards the message unless it was sent.
        """
        with self._errors:
            box = [message]
            del message
            connection, _, _ = await self._ask(box, target, inside, wants_answer=False)
            self._ended(connection)

    def statistics(self) -> ClientStatistics:
        """Return the messages in flight and the counters; works after closing too."""
        self._affinity.check_place()
        return snapshot(
            ClientStatistics,
            self._counts,
            servers=sum(connection.is_ready for connection in self._connections),
            in_flight=tuple(connection.in_flight for connection in self._connections),
            waiting=0 if self._servers is None else self._servers.waiting,
            servers_lost=sum(connection.session for connection in self._connections),
            errors=self._errors.counts(),
        )

    async def aclose(self) -> None:
        """Close: pending calls raise `ClosedError`.

        Waits until sent messages have left, at most `linger_s` seconds. Cancelling ends the wait. Closing
        again does nothing.
        """
        self._affinity.check_place()
        was_open, self._affinity.is_closed = self._affinity.is_open, True
        if not was_open or self._context is None:
            return
        for connection in self._connections:
            connection.close(ClosedError("this MessageClient was closed"), self._linger_s)
        if self._servers is not None:
            self._servers.close()
        with self._affinity.leaving(), closing(self._disposal):
            await end(self._context)

    # One message

    async def _choose(self, target: int | None, inside: OpenMessage | None) -> Connection:
        """Wait until a certain server is connected, and return its connection."""
        if inside is not None:
            owners = [number for number, sender in enumerate(self._senders) if inside.sender is sender]
            if not owners or target not in (None, *owners):
                raise ValueError("`inside` is a message of this client's sender, for the same target")
            target = owners[0] if target is None else target
        number = 0 if target is None else target
        if not 0 <= number < len(self._connections):
            raise ValueError(f"target {target} is none of the {len(self._connections)} servers, from 0")
        connection = self._connections[number]
        if not connection.is_ready:
            await connection.ready()
        return connection

    async def _ask(
        self, box: list[object], target: int | None, inside: OpenMessage | None, *, wants_answer: bool
    ) -> tuple[Connection, Asked, Handles]:
        """Send a message, and return the connection that sent it and counts it as in flight."""
        self._affinity.check()
        servers = self._servers if target is None and inside is None else None
        has_sender = self._senders[0] is not None
        parcel = await parcels.pack(box, has_sender=has_sender)
        lost: set[Connection] = set()
        try:
            while True:
                connection = (
                    await self._choose(target, inside)
                    if servers is None
                    else await servers.choose(needs_sender=has_sender and bool(parcel.tensors))
                )
                connection.in_flight += 1
                connection.leaving += 1
                sent: tuple[Asked, Handles] | None = None
                try:
                    sent = await self._send(connection, parcel, inside, wants_answer, servers is not None)
                except PeerLostError:
                    # The sender may detect the loss before the connection does. If its receiver stays gone,
                    # the second loss is raised.
                    if servers is None or connection in lost:
                        raise
                    lost.add(connection)
                finally:
                    connection.leaving -= 1
                    if sent is None:
                        connection.in_flight -= 1
                    if self._servers is not None:
                        self._servers.changed()
                if sent is not None:
                    self._counts["messages_sent"] += 1
                    return connection, *sent
        finally:
            parcel.tensors.clear()
            self._disposal.let_go(parcel.parts)

    def _ended(self, connection: Connection) -> None:
        """Count one message less in flight."""
        connection.in_flight -= 1
        if self._servers is not None:
            self._servers.changed()

    async def _send(
        self,
        connection: Connection,
        parcel: Parcel,
        inside: OpenMessage | None,
        wants_answer: bool,
        may_move: bool,
    ) -> tuple[Asked, Handles] | None:
        """Send a message to one server; return None if it is to be sent to another one instead."""
        session, sender = connection.session, self._sender_to[connection]
        handles: Handles = ()
        try:
            if sender is not None and (parcel.tensors or inside is not None):
                parcels.check_parts(parcel.parts, connection.pipeline.limits, "server")  # before sending
                sending = parcel.send_tensors(sender, inside)
                sent = await (connection.pipeline.sending(sending) if may_move else sending)
                if sent is None:
                    return None
                handles = sent
                if not may_move or session == connection.session:
                    parcels.check_road(handles, connection.leads_to, sender.receiver_id)
            loan = None if wants_answer else self._loans.lend(parcel.parts)
            asked = await connection.ask(
                session, handles, parcel.parts, wants_answer=wants_answer, may_move=may_move
            )
            if asked is None:
                parcels.discard(sender, handles)
                return None
            if loan is not None:
                parcel.tensors.clear()
                self._disposal.let_go(parcel.parts)
                await loan
        except BaseException:
            parcels.discard(sender, handles)
            raise
        return asked, handles

    async def _answer_to(self, connection: Connection, asked: Asked, handles: Handles) -> R:
        """Wait for an answer; if that fails, cancel the request and discard its tensors."""
        try:
            if asked.answered is None:
                raise AssertionError("an answer was asked for")
            return await self._open_answer(await asked.answered)
        except BaseException:
            connection.pipeline.cancel(asked)
            parcels.discard(self._sender_to[connection], handles)
            raise
        finally:
            del asked  # as in `request`

    async def _open_answer(self, answered: Answered) -> R:
        found: list[torch.Tensor] = []
        if answered.handles:
            receiver = self._receiver
            if receiver is None:
                raise ProtocolError("the server sent tensors to a receiver, and this client has none")
            # The server uses connected senders only, so a sender that is unknown here will never connect.
            if not all(receiver._knows(handle.sender) for handle in answered.handles):
                raise ProtocolError(
                    "the server named tensors of a sender that is not connected to this client"
                )
            try:
                for count, handle in enumerate(answered.handles):
                    if count and not count % parcels.QUICK_TENSORS:
                        await asyncio.sleep(0)
                    found.append(await receiver.receive(handle))
            except (AlreadyTakenError, DiscardedError, ValueError) as error:
                raise ProtocolError(f"the server named tensors that cannot be taken: {error}") from error
        try:
            answer: R = await parcels.unpack(self._decoder, answered.parts, found)
        finally:
            self._disposal.let_go(answered.parts)
        return answer

    def _details(self) -> list[str]:
        addresses = ",".join(label_of(address.text) for address in self._addresses)
        in_flight = sum(connection.in_flight for connection in self._connections)
        return [f"at {addresses}", *([f"{in_flight} messages in flight"] if self._affinity.is_open else [])]
