"""The requests of a client, from the call until the answer."""

import asyncio
from collections.abc import Mapping
from time import monotonic
from typing import Generic, TypeVar

import torch
from msgspec.structs import replace

from aiotensor.channel.balancer import Balancer, Need
from aiotensor.channel.memory import MessageMemory
from aiotensor.channel.payloads import (
    QUICK_TENSORS,
    Handles,
    ReceivedAnswer,
    discard,
    send_tensors,
)
from aiotensor.channel.permits import Permit, message_of
from aiotensor.channel.remote_server import RemoteServer
from aiotensor.channel.server_session import SentRequest
from aiotensor.codec import TensorDecoder
from aiotensor.codec.payload import Payload, pack, unpack
from aiotensor.errors import (
    AlreadyTakenError,
    ClosedError,
    DiscardedError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    UsageError,
)
from aiotensor.protocol.parts import check_parts
from aiotensor.receiver import TensorReceiver, has_seen
from aiotensor.runtime import tracing
from aiotensor.sender import OpenMessage, TensorSender, capacity_of, check_unfinished, owner_of
from aiotensor.statistics import registry
from aiotensor.statistics.counters import ErrorCounter
from aiotensor.transports.address import label_of
from aiotensor.transports.zeromq.context import ZmqContext, end

__all__ = ["OutgoingRequests"]

R = TypeVar("R")


class OutgoingRequests(Generic[R]):
    """Send requests to one or several servers, and return their answers; belongs to the running loop.

    Args:
        context: the context of the sockets.
        senders: the servers, each with the sender for its tensors, or with None.
        receiver: the receiver for the tensors that servers send with a sender; None if there is none.
        decoder: the decoder for the answers.
        memory: the memory of large messages.
        max_wait_s: the time in seconds after which a wait for one of several servers fails; None for no
            limit.
        counts: the counters of the client, in which sent messages are counted.

    Attributes:
        servers: the servers, in the order of their numbers.
    """

    def __init__(
        self,
        context: ZmqContext,
        senders: Mapping[RemoteServer, TensorSender | None],
        receiver: TensorReceiver | None,
        decoder: TensorDecoder[R],
        memory: MessageMemory,
        max_wait_s: float | None,
        counts: dict[str, int],
    ) -> None:
        self.servers = list(senders)
        self._context = context
        self._senders = senders
        self._has_senders = senders[self.servers[0]] is not None
        self._receiver = receiver
        self._decoder = decoder
        self._memory = memory
        self._counts = counts
        capacities = {
            server: None if sender is None else capacity_of(sender) for server, sender in senders.items()
        }
        self._balancer = Balancer(capacities, max_wait_s) if len(senders) > 1 else None
        for server in self.servers:
            server.connect(None if self._balancer is None else self._balancer.changed)
        loop = asyncio.get_running_loop()
        self._entries = [registry.add(one, label_of(one.address.text), loop) for one in self.servers]

    @property
    def waiting(self) -> int:
        """The number of calls that wait for one of several servers."""
        return 0 if self._balancer is None else self._balancer.waiting

    async def close(self, linger_s: float) -> None:
        """Fail pending calls, and wait at most `linger_s` seconds until sent messages have left.

        Cancellation ends the wait.
        """
        for server in self.servers:
            server.close(ClosedError("this MessageClient was closed"), linger_s)
        if self._balancer is not None:
            self._balancer.close()
        try:
            await end(self._context)
        finally:
            self._memory.close()
            for entry in self._entries:
                registry.remove(entry)

    async def ready(self) -> None:
        """Wait until a server can take a request, as `MessageClient.ready` does."""
        while True:
            if self._balancer is None:
                [server] = self.servers
                await server.ready()
            else:
                server = await self._balancer.choose(Need.TENSORS if self._has_senders else Need.MESSAGE)
                self._balancer.changed()  # this call sends no message, so the next one may choose the server
            sender = self._senders[server]
            if sender is not None:
                await sender.ready(nbytes=0)
            if server.session is not None:  # it may have been lost during the wait for a permit
                return

    def permit(self, errors: ErrorCounter) -> Permit:
        """Return a new permit; see `MessageClient.permit`.

        Raises:
            UsageError: this client has no sender.
        """
        if not self._has_senders:
            raise UsageError(
                "this MessageClient has no sender, and only senders have permits: pass "
                "sender=TensorSender(...)"
            )
        balancer = self._balancer

        async def only_server() -> RemoteServer:
            [server] = self.servers
            if server.session is None:
                await tracing.step("wait for a server", server.ready())
            return server

        def sender_of(server: RemoteServer) -> TensorSender:
            sender = self._senders[server]
            if sender is None:
                raise AssertionError("all servers have senders, or none")
            return sender

        return Permit(only_server if balancer is None else balancer.reserve, balancer, sender_of, errors)

    async def request_repeatable(
        self, box: list[object], target: int | None, inside: OpenMessage | Permit | None
    ) -> R:
        """Request an answer as `request` does, and send the message once more if its server is lost."""
        again = box.copy()
        try:
            return await self.request(box, target, inside)
        except PeerLostError:
            self._counts["retries"] += 1
        return await self.request(again, target, None)

    async def request(self, box: list[object], target: int | None, inside: OpenMessage | Permit | None) -> R:
        """Send the message in the list `box`, and return the answer; see `MessageClient.request`."""
        return await self._answer_to(*await self._ask(box, target, inside, wants_answer=True))

    async def request_encoded(self, payload: Payload, turn: asyncio.Lock) -> R:
        """Send an encoded message, and return the answer; the payload can be sent again.

        Args:
            payload: the message.
            turn: held until the message was sent, so that messages are sent in the order of the calls.
        """
        return await self._answer_to(*await self._ask_in_turn(payload, turn))

    async def _ask_in_turn(self, payload: Payload, turn: asyncio.Lock) -> tuple[RemoteServer, SentRequest]:
        async with turn:
            copy = replace(payload, parts=payload.parts.copy(), tensors=payload.tensors.copy())
            return await self._ask(copy, None, None, wants_answer=True)

    async def _answer_to(self, server: RemoteServer, request: SentRequest) -> R:
        """Wait for the answer to a sent message, and return it."""
        began = monotonic()
        try:
            if request.answer is None:
                raise AssertionError("an answer was requested")
            answer = await request.answer
            server.counts["answers"] += 1
            server.replies.add(monotonic() - began)
            return await self._open_answer(answer)
        except BaseException as error:
            server.counts["failures"] += isinstance(error, RemoteError)
            server.counts["requests_lost"] += isinstance(error, PeerLostError)
            request.session.cancel(request)
            discard(self._senders[server], request.handles)
            raise
        finally:
            server.in_flight -= 1
            if self._balancer is not None:
                self._balancer.changed()
            # The request holds an error whose traceback refers to this frame, and to frames with tensors.
            del request

    async def send(self, box: list[object], target: int | None, inside: OpenMessage | Permit | None) -> None:
        """Send the message in the list `box` without requesting an answer; see `MessageClient.send`."""
        server, _ = await self._ask(box, target, inside, wants_answer=False)
        server.in_flight -= 1
        if self._balancer is not None:
            self._balancer.changed()

    def _server(self, target: int | None, inside: OpenMessage | None) -> RemoteServer:
        """Return the server with the index `target`, or the server whose sender owns `inside`."""
        if inside is not None:
            owners = [
                number
                for number, server in enumerate(self.servers)
                if owner_of(inside) is self._senders[server]
            ]
            if not owners or target not in (None, *owners):
                raise ValueError("`inside` must be a message of this client's sender, for the same target")
            target = owners[0] if target is None else target
        number = 0 if target is None else target
        if not 0 <= number < len(self.servers):
            raise ValueError(
                f"target must be the index of one of the {len(self.servers)} servers, got {target}"
            )
        return self.servers[number]

    def _body_limit(self) -> int | None:
        """Return the largest body that a server accepts, in bytes; None for no limit, or an unknown one."""
        sessions = [server.session for server in self.servers]
        limits = [None if session is None else session.connection.limits.body_bytes for session in sessions]
        known = [limit for limit in limits if limit is not None]
        return max(known) if len(known) == len(limits) else None

    async def _ask(
        self,
        message: list[object] | Payload,
        target: int | None,
        inside: OpenMessage | Permit | None,
        *,
        wants_answer: bool,
    ) -> tuple[RemoteServer, SentRequest]:
        """Send a message, count it as in flight at its server, and return the server and the sent message."""
        if isinstance(inside, Permit):
            inside = await message_of(inside)
        if inside is not None:
            check_unfinished(inside)
        balancer = self._balancer if target is None and inside is None else None
        if isinstance(message, Payload):
            payload = message
        else:
            payload = await pack(
                message, has_sender=self._has_senders, body_limit=self._body_limit, peer="server"
            )
        lost: set[RemoteServer] = set()
        try:
            while True:
                if balancer is None:
                    server = self._server(target, inside)
                    if server.session is None:
                        await tracing.step("wait for a server", server.ready())
                else:
                    needs_permit = self._has_senders and bool(payload.tensors)
                    server = await balancer.choose(Need.TENSORS if needs_permit else Need.MESSAGE)
                server.in_flight += 1
                server.being_sent += 1
                request: SentRequest | None = None
                try:
                    request = await self._send(server, payload, inside, wants_answer)
                except PeerLostError:
                    # The sender may detect the loss before the connection does, so another server is chosen.
                    # If the same one is chosen again, and its receiver is still gone, the error is raised.
                    if balancer is None or server in lost:
                        raise
                    lost.add(server)
                finally:
                    server.being_sent -= 1
                    if request is None:
                        server.in_flight -= 1
                    if self._balancer is not None:
                        self._balancer.changed()
                if request is not None:
                    self._counts["messages_sent"] += 1
                    server.counts["messages_sent"] += 1
                    return server, request
                if balancer is None and (payload.tensors or inside is not None):
                    # Its tensors belong to a lost server, so the message does not wait for the next one.
                    raise server.failure or PeerLostError(
                        f"the connection to the server at {server.address.text} was lost while the tensors "
                        "of a message were being sent"
                    )
        finally:
            payload.tensors.clear()
            self._memory.free_parts(payload.parts)

    async def _send(
        self, server: RemoteServer, payload: Payload, inside: OpenMessage | None, wants_answer: bool
    ) -> SentRequest | None:
        """Send a message to one server; return None if the server is lost before the message is sent."""
        session, sender = server.session, self._senders[server]
        if session is None:
            raise AssertionError("a chosen server is connected")
        handles: Handles = ()
        try:
            if sender is not None and (payload.tensors or inside is not None):
                check_parts(payload.parts, session.connection.limits, "server")  # before sending its tensors
                handles = await session.sending(send_tensors(payload, sender, inside)) or ()
                if session is not server.session:
                    discard(sender, handles)
                    return None
                receiver = session.connection.receiver
                if handles and receiver and sender.receiver_id not in (None, receiver):
                    # The tensors would never arrive at the server.
                    raise PeerLostError(
                        "the tensors of this message were sent to a receiver other than the server's: the "
                        "server was replaced in the meantime, or the sender's endpoint is not that of the "
                        "server's receiver"
                    )
            released = None if wants_answer else self._memory.watch(payload.parts)
            request = await session.ask(handles, payload.parts, wants_answer=wants_answer)
            if request is None:
                discard(sender, handles)
                return None
            if released is not None:
                payload.tensors.clear()
                self._memory.free_parts(payload.parts)
                await released
        except BaseException:
            discard(sender, handles)
            raise
        return request

    async def _open_answer(self, answer: ReceivedAnswer) -> R:
        """Take the tensors of an answer, and decode it."""
        found: list[torch.Tensor] = []
        if answer.handles:
            receiver = self._receiver
            if receiver is None:
                raise ProtocolError("the server sent tensors to a receiver, but this client has no receiver")
            # A server only uses connected senders, so a sender that is unknown here will never connect.
            if not all(has_seen(receiver, handle.sender) for handle in answer.handles):
                raise ProtocolError(
                    "the server referred to tensors of a sender that is not connected to this client"
                )
            try:
                for count, handle in enumerate(answer.handles):
                    if count and not count % QUICK_TENSORS:
                        await asyncio.sleep(0)
                    found.append(await receiver.receive(handle))
            except (AlreadyTakenError, DiscardedError, ValueError) as error:
                raise ProtocolError(
                    f"the server referred to tensors that cannot be taken: {error}"
                ) from error
        try:
            message: R = await unpack(self._decoder, answer.parts, found)
        finally:
            self._memory.free_parts(answer.parts)
        return message
