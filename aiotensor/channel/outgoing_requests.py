"""The requests of a client, from the call until the answer."""

import asyncio
from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

from aiotensor.channel.balancer import Balancer
from aiotensor.channel.disposal import Disposal
from aiotensor.channel.payloads import (
    QUICK_TENSORS,
    Handles,
    Payload,
    ReceivedAnswer,
    check_receiver,
    discard,
    pack,
    unpack,
)
from aiotensor.channel.remote_server import RemoteServer
from aiotensor.channel.session import SentRequest
from aiotensor.channel.zero_copy import ZeroCopyBuffers
from aiotensor.codec import TensorDecoder
from aiotensor.errors import AlreadyTakenError, ClosedError, DiscardedError, PeerLostError, ProtocolError
from aiotensor.receiver import TensorReceiver, has_seen
from aiotensor.sender import OpenMessage, TensorSender, capacity_of
from aiotensor.sending.open_message import owner_of

__all__ = ["OutgoingRequests"]

R = TypeVar("R")


class OutgoingRequests(Generic[R]):
    """Send requests to one or several servers, and return their answers; belongs to the running loop.

    Args:
        senders: the servers, each with the sender for its tensors, if there is one.
        receiver: receives the tensors that servers send by a sender; None for none.
        decoder: the decoder for the answers.
        disposal: frees large messages.
        max_wait_s: seconds after which a wait for a server fails; None for no limit.
        counts: the counts of the client, where sent messages are counted.
    """

    def __init__(
        self,
        senders: Mapping[RemoteServer, TensorSender | None],
        receiver: TensorReceiver | None,
        decoder: TensorDecoder[R],
        disposal: Disposal,
        max_wait_s: float | None,
        counts: dict[str, int],
    ) -> None:
        self._servers = list(senders)
        self._senders = senders
        self._has_senders = senders[self._servers[0]] is not None
        self._receiver = receiver
        self._decoder = decoder
        self._disposal = disposal
        self._counts = counts
        self._buffers = ZeroCopyBuffers()
        capacities = {
            server: None if sender is None else capacity_of(sender) for server, sender in senders.items()
        }
        self._balancer = Balancer(capacities, max_wait_s) if len(senders) > 1 else None
        for server in self._servers:
            server.connect(self._balancer)

    @property
    def servers(self) -> list[RemoteServer]:
        """The servers, in the order of their numbers."""
        return self._servers

    @property
    def waiting(self) -> int:
        """The number of calls that wait for one of several servers."""
        return 0 if self._balancer is None else self._balancer.waiting

    def close(self, linger_s: float) -> None:
        """Fail pending calls. Sent messages get `linger_s` seconds to leave."""
        for server in self._servers:
            server.close(ClosedError("this MessageClient was closed"), linger_s)
        if self._balancer is not None:
            self._balancer.close()

    async def request(self, box: list[object], target: int | None, inside: OpenMessage | None) -> R:
        """Send the message in a box, and return the answer; see `MessageClient.request`."""
        server, request, handles = await self._ask(box, target, inside, wants_answer=True)
        try:
            if request.answer is None:
                raise AssertionError("an answer was requested")
            return await self._open_answer(await request.answer)
        except BaseException:
            request.cancel()
            discard(self._senders[server], handles)
            raise
        finally:
            self._ended(server)
            # The traceback of its error refers to this frame, and to the frames of callers with tensors.
            del request

    async def send(self, box: list[object], target: int | None, inside: OpenMessage | None) -> None:
        """Send the message in a box without requesting an answer; see `MessageClient.send`."""
        server, _, _ = await self._ask(box, target, inside, wants_answer=False)
        self._ended(server)

    def _server(self, target: int | None, inside: OpenMessage | None) -> RemoteServer:
        """Return the server of a certain number, or that of a sender."""
        if inside is not None:
            owners = [
                number
                for number, server in enumerate(self._servers)
                if owner_of(inside) is self._senders[server]
            ]
            if not owners or target not in (None, *owners):
                raise ValueError("`inside` is a message of this client's sender, for the same target")
            target = owners[0] if target is None else target
        number = 0 if target is None else target
        if not 0 <= number < len(self._servers):
            raise ValueError(f"target {target} is none of the {len(self._servers)} servers, from 0")
        return self._servers[number]

    async def _ask(
        self, box: list[object], target: int | None, inside: OpenMessage | None, *, wants_answer: bool
    ) -> tuple[RemoteServer, SentRequest, Handles]:
        """Send a message, and return the server that it was sent to, which counts it as in flight."""
        balancer = self._balancer if target is None and inside is None else None
        payload = await pack(box, has_sender=self._has_senders)
        lost: set[RemoteServer] = set()
        try:
            while True:
                if balancer is None:
                    server = self._server(target, inside)
                    if server.session is None:
                        await server.ready()
                else:
                    needs_sender = self._has_senders and bool(payload.tensors)
                    server = await balancer.choose(needs_sender=needs_sender)
                server.in_flight += 1
                server.being_sent += 1
                sent: tuple[SentRequest, Handles] | None = None
                try:
                    sent = await self._send(server, payload, inside, wants_answer, balancer is not None)
                except PeerLostError:
                    # The sender may detect the loss before the connection does. If its receiver stays gone,
                    # the second loss is raised.
                    if balancer is None or server in lost:
                        raise
                    lost.add(server)
                finally:
                    server.being_sent -= 1
                    if sent is None:
                        server.in_flight -= 1
                    if self._balancer is not None:
                        self._balancer.changed()
                if sent is not None:
                    self._counts["messages_sent"] += 1
                    return server, *sent
        finally:
            payload.tensors.clear()
            self._disposal.free_parts(payload.parts)

    def _ended(self, server: RemoteServer) -> None:
        """Count one message less in flight."""
        server.in_flight -= 1
        if self._balancer is not None:
            self._balancer.changed()

    async def _send(
        self,
        server: RemoteServer,
        payload: Payload,
        inside: OpenMessage | None,
        wants_answer: bool,
        may_move: bool,
    ) -> tuple[SentRequest, Handles] | None:
        """Send a message to one server; return None if it is to be sent to another one instead."""
        session, sender = server.session, self._senders[server]
        if session is None:
            raise AssertionError("a chosen server is connected")
        handles: Handles = ()
        try:
            if sender is not None and (payload.tensors or inside is not None):
                session.connection.check(payload.parts)  # before its tensors are sent
                sending = payload.send_tensors(sender, inside)
                tensors = await (session.sending(sending) if may_move else sending)
                if tensors is None:
                    return None
                handles = tensors
                if session is server.session:
                    check_receiver(handles, session.connection.receiver, sender.receiver_id)
            released = None if wants_answer else self._buffers.watch(payload.parts)
            request = await server.ask(
                session, handles, payload.parts, wants_answer=wants_answer, may_move=may_move
            )
            if request is None:
                discard(sender, handles)
                return None
            if released is not None:
                payload.tensors.clear()
                self._disposal.free_parts(payload.parts)
                await released
        except BaseException:
            discard(sender, handles)
            raise
        return request, handles

    async def _open_answer(self, answer: ReceivedAnswer) -> R:
        """Take the tensors of an answer, and decode it."""
        found: list[torch.Tensor] = []
        if answer.handles:
            receiver = self._receiver
            if receiver is None:
                raise ProtocolError("the server sent tensors to a receiver, and this client has none")
            # The server uses connected senders only, so a sender that is unknown here will never connect.
            if not all(has_seen(receiver, handle.sender) for handle in answer.handles):
                raise ProtocolError(
                    "the server named tensors of a sender that is not connected to this client"
                )
            try:
                for count, handle in enumerate(answer.handles):
                    if count and not count % QUICK_TENSORS:
                        await asyncio.sleep(0)
                    found.append(await receiver.receive(handle))
            except (AlreadyTakenError, DiscardedError, ValueError) as error:
                raise ProtocolError(f"the server named tensors that cannot be taken: {error}") from error
        try:
            message: R = await unpack(self._decoder, answer.parts, found)
        finally:
            self._disposal.free_parts(answer.parts)
        return message
