"""The clients of a server and their unanswered messages: the server's side of the protocol.

ZeroMQ assigns an identity to each connection, so no client can pose as another.
"""

import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import zmq

from aiotensor.channel.accepted import Accepted
from aiotensor.channel.asked import Asked, Client, Limits, State
from aiotensor.channel.outbox import Outbox, flush_all
from aiotensor.channel.parcels import Handles, body_and_buffers
from aiotensor.channel.refusals import Refusals
from aiotensor.channel.sockets import MAX_PARTS, LoopSocket, PeerGoneError
from aiotensor.errors import ProtocolError
from aiotensor.protocol.exchange import (
    BODY_BYTES,
    VERSION,
    Answer,
    Ask,
    Cancel,
    Cause,
    ClientHello,
    Farewell,
    FromClient,
    FromServer,
    ServerHello,
    Taken,
    failure,
    read_from_client,
    write,
)
from aiotensor.protocol.versions import mismatch
from aiotensor.protocol.window import Tally
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters

__all__ = ["MAX_UNREAD", "Clients", "ClientsEvents"]

logger = logger_of("channel")


# The most messages that may queue for a client that does not read them: answers, each with a task that waits
# until it is sent, and failures, for which no task waits.
MAX_UNREAD = 4096

_REMEMBERED = 1024  # identities of closed connections


class ClientsEvents(Protocol):
    """The callbacks of a server."""

    def _asked(self, asked: Asked) -> None:
        """Handle a new message."""

    def _unwanted(self, asked: Asked, state: State) -> None:
        """Handle a message that was given up, and the state that it had before."""

    def _is_arriving(self, asked: Asked) -> bool:
        """Return whether a message still waits for tensors."""

    def _is_in_vain(self, asked: Asked) -> bool:
        """Return whether the tensors of a disconnected client's message will never arrive."""


class Clients:
    """Exchange messages with all clients of one socket; belongs to the running loop.

    Args:
        limits: the most clients, and the most waiting messages of each.
        receiver: the id of the server's receiver; "" for none.
        events: the server, whose callbacks are called.
        waiters: the tasks that wait for a message. The socket refers to them and not to the server, so an
            unused server is garbage-collected, but not while a task waits for it.
        counts: the counts of the server, where lost and refused clients are counted.
    """

    def __init__(
        self, limits: Limits, receiver: str, events: ClientsEvents, waiters: Waiters, counts: dict[str, int]
    ) -> None:
        self.limits = limits
        self._receiver = receiver
        self._counts = counts
        self._asked = 0  # unfinished messages of all clients
        self._events = weakref.ref(events)
        self._waiters = waiters
        self._clients: dict[bytes, Client] = {}
        self._leftovers: dict[Client, None] = {}  # disconnected clients with messages that wait to be taken
        self._refusals = Refusals()
        self._accepted = Accepted(limits.clients, self._clients.__contains__, self._cut, self._refusals)
        self._is_making_room = False
        self._ending: set[bytes] = set()  # of connections whose last messages may not have been read
        self._turned_away: dict[bytes, Outbox] = {}  # still connected, but their messages are ignored
        self._gone: OrderedDict[bytes, None] = OrderedDict()  # closed last: messages of them may still arrive
        self.socket: LoopSocket  # set by the server, which opens it

    def __len__(self) -> int:
        return len(self._clients)

    # Sending

    async def answer(self, asked: Asked, parts: Sequence[bytes | memoryview], handles: Handles) -> bool:
        """Send an answer once ZeroMQ accepts it, and return whether the client still waited for it.

        Args:
            asked: the message to answer; sending the answer ends it.
            parts: the body of the answer, and the buffers beside it.
            handles: the handles of its tensors that a sender has sent.
        """
        if not asked.is_wanted:
            return False
        tally = asked.client.tally
        body = None if len(parts[0]) >= BODY_BYTES else memoryview(parts[0])
        others = self._asked_beside(asked.client)
        header = Answer(asked.number, body, handles, tally.taken, tally.taken_bytes, others)

        def has_left() -> None:  # not called if the answering task is cancelled first
            tally.told(header.taken, header.taken_bytes)
            asked.is_answered = True
            self.end(asked)

        following = parts if body is None else parts[1:]
        return await asked.client.outbox.put([write(header), *following], on_sent=has_left)

    def fail(self, asked: Asked, cause: Cause) -> bool:
        """Send a failure in place of an answer, and return whether the client still waited for it."""
        was_wanted = asked.is_wanted
        self.end(asked)
        if was_wanted:
            client, tally = asked.client, asked.client.tally
            others = self._asked_beside(client)
            self._post(client, failure(asked.number, cause, tally.taken, tally.taken_bytes, others))
            tally.told(tally.taken, tally.taken_bytes)
        return was_wanted

    def take(self, asked: Asked) -> None:
        """Return the credit for a message that no longer waits: it was taken, or never will be."""
        client = asked.client
        client.tally.take(asked.nbytes)
        if not client.tally.waiting:
            self._leftovers.pop(client, None)
        asked.parts = []
        if client.tally.is_due and client.identity in self._clients:
            others = self._asked_beside(client)
            self._post(client, Taken(client.tally.taken, client.tally.taken_bytes, others))
            client.tally.told(client.tally.taken, client.tally.taken_bytes)

    def end(self, asked: Asked) -> None:
        """Mark a message as finished."""
        asked.state = State.ENDED
        if asked.client.asked.pop(asked.number, None) is not None:
            self._asked -= 1

    def _asked_beside(self, client: Client) -> int:
        """Count the unfinished messages of other clients."""
        return self._asked - len(client.asked)

    def say_farewell(self) -> None:
        """Notify every client that the server closes, and give up all messages."""
        for client in list(self._clients.values()):
            client.outbox.end()
            self._post(client, Farewell())
            self._give_up_all(client, and_those_without_answer=True)
        self._clients.clear()
        self._refusals.close()

    # Receiving

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Handle a message of a peer."""
        identity = parts[0].bytes
        client = self._clients.get(identity)
        if client is not None:
            self._take(identity, client, parts)
        elif identity not in self._turned_away and identity not in self._gone:
            # The operating system reuses descriptors: the end of an earlier connection with this one may
            # have to be handled first.
            self.socket.after_events(partial(self._arrived_first, identity, parts))

    def _arrived_first(self, identity: bytes, parts: "list[zmq.Frame]") -> None:
        """Handle a message of a peer that was unidentified when the message arrived."""
        client = self._clients.get(identity)
        if client is None:
            if identity in self._turned_away or identity in self._gone:
                return
            replaced = self._accepted.identify(int(parts[0].get(zmq.SRCFD)), identity)
            if replaced is None:
                return
            for one in replaced:
                self._went(one)
        self._take(identity, client, parts)

    def _take(self, identity: bytes, client: Client | None, parts: "list[zmq.Frame]") -> None:
        try:
            if len(parts) > MAX_PARTS:
                raise ProtocolError(f"it sent a message of more than {MAX_PARTS} parts")
            header = read_from_client(parts[1].buffer if len(parts) > 1 else b"")
            if client is None:
                self._introduced(identity, header)
                return
            match header:
                case Ask(number, body, handles, wants_answer):
                    if number < client.next_number:
                        raise ProtocolError(
                            f"it sent message {number} after message {client.next_number - 1}"
                        )
                    client.next_number = number + 1
                    message = body_and_buffers(body, parts[2:], self.limits.parts)
                    asked = Asked(client, number, handles, message, wants_answer=wants_answer)
                    client.tally.arrived(asked.nbytes)
                    client.asked[number] = asked
                    self._asked += 1
                    events = self._events()
                    if events is not None:  # None: garbage-collected, and about to be closed
                        events._asked(asked)
                case Cancel(number):
                    if number >= client.next_number:
                        raise ProtocolError(f"it cancelled message {number}, which it never sent")
                    if number in client.asked:
                        self._give_up(client.asked[number])
                case ClientHello():
                    raise ProtocolError("it introduced itself twice")
        except ProtocolError as error:
            self._refusals.protocol_broken(None if client is None else client.pid, str(error))
            self._turn_away(identity, f"it broke the protocol: {error}")
            if client is not None:
                self._lose(client)

    def connected(self, descriptor: int) -> None:
        """Add a connection, and close the oldest unidentified ones if there are too many."""
        self._accepted.opened(descriptor)
        if not self._is_making_room:
            self._is_making_room = True
            self.socket.after_events(self._make_room)

    def _make_room(self) -> None:
        self._is_making_room = False
        for identity in self._accepted.make_room():
            self._went(identity)

    def _cut(self, descriptor: int) -> bool:
        return self.socket.cut(descriptor)

    def handshaken(self) -> None:
        """Wait for the hello of the client."""

    def unreachable(self) -> None:
        """Do nothing: a server does not connect."""

    def refused(self, *, is_final: bool, error: int) -> None:
        """Log a peer without the keys, unless it disconnected during the handshake."""
        if is_final:
            self._refusals.connection_refused("its peer does not have the keys")

    def disconnected(self, descriptor: int) -> None:
        """Handle the end of a connection."""
        for identity in self._accepted.closed(descriptor):
            self._ended(identity)

    def _ended(self, identity: bytes) -> None:
        """Handle the end of the connection with this identity, after the messages that arrived before."""
        if identity not in self._ending:
            self._ending.add(identity)
            self.socket.after_messages(partial(self._went, identity))

    def has_room(self) -> None:
        """Send messages that the socket did not accept before."""
        flush_all(self._waiting)

    def _waiting(self) -> list[Outbox]:
        outboxes = [client.outbox for client in self._clients.values() if client.outbox]
        return outboxes + [outbox for outbox in self._turned_away.values() if outbox]

    def _introduced(self, identity: bytes, hello: FromClient) -> None:
        if not isinstance(hello, ClientHello):
            raise ProtocolError("it did not introduce itself")
        limits = self.limits
        if hello.version != VERSION:
            self._refuse(identity, hello, mismatch(hello.version, VERSION))
            return
        if self._is_full():
            reason = f"the server has max_clients={limits.clients} clients already"
            if self._leftovers:
                reason += f", with {len(self._leftovers)} that left messages to be taken"
            self._refuse(
                identity, hello, f"{reason}: raise max_clients of the server, or close another client"
            )
            return
        tally = Tally(limits.waiting, limits.waiting_bytes)
        client = self._clients[identity] = Client(identity, hello, tally, self._outbox_to(identity))
        self._post(
            client,
            ServerHello(
                VERSION, os.getpid(), self._receiver, limits.waiting, limits.waiting_bytes, *limits.parts
            ),
        )

    def _is_full(self) -> bool:
        """Return whether the limit on clients is reached."""
        most = self.limits.clients
        if most is None:
            return False
        for client in tuple(self._leftovers):
            if len(self._clients) + len(self._leftovers) < most:
                break
            # Tensors are sent before their message, so tensors that are still missing may never arrive.
            left = [asked for asked in client.asked.values() if asked.state is State.WAITING]
            events = self._events()
            if events is not None and all(map(events._is_arriving, left)):
                for asked in left:
                    self._give_up(asked)
        return len(self._clients) + len(self._leftovers) >= most

    # Ends

    def _refuse(self, identity: bytes, hello: ClientHello, reason: str) -> None:
        """Refuse a client after its hello."""
        self._refusals.client_refused(hello.pid, reason)
        self._counts["clients_refused"] += 1
        self._turn_away(identity, reason, is_refusal=True)

    def _turn_away(self, identity: bytes, reason: str, *, is_refusal: bool = False) -> None:
        """Send a final message, and ignore the peer; after a refusal, a retry would fail too."""
        client = self._clients.get(identity)
        outbox = self._outbox_to(identity) if client is None else client.outbox
        self._turned_away[identity] = outbox
        outbox.post([write(Farewell(reason[:1024], is_refusal))])

    def _went(self, identity: bytes) -> None:
        """Handle the end of the connection with this identity."""
        self._ending.discard(identity)
        self._gone[identity] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        self._turned_away.pop(identity, None)
        if identity in self._clients:
            self._lose(self._clients[identity])

    def _lose(self, client: Client) -> None:
        """Remove a client, and give up its messages that want an answer."""
        if self._clients.pop(client.identity, None) is None:
            return  # removed already, when a send found that it is gone
        self._counts["clients_lost"] += 1
        wanted = sum(asked.wants_answer for asked in client.asked.values())
        logger.log(
            logging.WARNING if wanted else logging.INFO,
            "a client (pid %s) is gone; %s messages need no answer any more",
            client.pid,
            wanted,
            extra={"event": "client_lost", "peer_pid": client.pid, "messages_lost": wanted},
        )
        self._give_up_all(client)
        if client.tally.waiting:
            self._leftovers[client] = None
        client.outbox.end()
        if client.identity not in self._turned_away:
            client.outbox.clear()

    def _give_up_all(self, client: Client, *, and_those_without_answer: bool = False) -> None:
        events = self._events()
        for asked in list(client.asked.values()):
            # A message that wants no answer is still valid, unless its tensors are lost.
            is_in_vain = asked.wants_answer or and_those_without_answer
            if is_in_vain or events is None or events._is_in_vain(asked):
                self._give_up(asked)

    def _give_up(self, asked: Asked) -> None:
        state = asked.state
        self.end(asked)
        events = self._events()
        if events is not None:
            events._unwanted(asked, state)

    # The socket

    def _outbox_to(self, identity: bytes) -> Outbox:
        return Outbox(partial(self._send, identity))

    def _send(self, identity: bytes, parts: Sequence[bytes | memoryview], is_retry: bool) -> bool:
        try:
            return self.socket.send([identity, *parts], is_retry=is_retry)
        except PeerGoneError:
            # The monitor reports this too, but perhaps only after the descriptor has been reused.
            self._ended(identity)
            return False

    def _post(self, client: Client, header: FromServer) -> None:
        """Send or queue a header; disconnect a client that leaves too many messages unread."""
        client.outbox.post([write(header)])
        if len(client.outbox) > MAX_UNREAD and client.identity in self._clients:
            logger.error(
                "a client (pid %s) is cut off: it reads no answers",
                client.pid,
                extra={"event": "client_cut_off", "peer_pid": client.pid, "reason": "it reads no answers"},
            )
            client.outbox.clear()
            self._turn_away(client.identity, "it reads no answers")
            self._lose(client)
