"""All clients of a server, and what each has asked: the server's side of the protocol.

A message that was asked, as the server sees it:

    WAITING --taken by whoever iterates--> IN_HAND --answered, failed--> ENDED
       |                                      |
       '--------------------------------------'--cancelled, or its client lost--> ENDED

A client has the identity that ZeroMQ gives to its connection, so none can pass for another.
"""

import asyncio
import enum
import logging
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import zmq

from aiotensor.channel.sockets import LoopSocket, PeerGoneError
from aiotensor.errors import ProtocolError
from aiotensor.gates import Waiters
from aiotensor.protocol.exchange import (
    VERSION,
    Ask,
    Cancel,
    ClientHello,
    Farewell,
    FromClient,
    FromServer,
    ServerHello,
    failure,
    read_from_client,
    write,
)
from aiotensor.types import TensorHandle

__all__ = ["Asked", "Client", "Clients", "ClientsEvents", "State"]

logger = logging.getLogger("aiotensor.channel")


class State(enum.Enum):
    """Where a message is."""

    WAITING = "waiting"
    IN_HAND = "in hand"
    ENDED = "ended"


class Asked:
    """A message of a client.

    Args:
        client: whose.
        number: its number there.
        wants_answer: whether it is to be answered.
        handles: of its tensors that travel by a sender.
        parts: its body, and the buffers beside it.
    """

    __slots__ = ("client", "handles", "nbytes", "number", "parts", "state", "taken", "wants_answer")

    def __init__(
        self,
        client: "Client",
        number: int,
        handles: tuple[TensorHandle, ...],
        parts: list[memoryview],
        *,
        wants_answer: bool,
    ) -> None:
        self.client = client
        self.number = number
        self.wants_answer = wants_answer
        self.handles = handles
        self.parts = parts
        self.nbytes = sum(map(len, parts))
        self.state = State.WAITING
        self.taken: weakref.ref[object] | None = None  # what whoever answers it has

    @property
    def is_wanted(self) -> bool:
        """Say whether somebody waits for an answer."""
        return self.wants_answer and self.state is not State.ENDED


class Client:
    """A client that is connected.

    Args:
        identity: of its connection, by which ZeroMQ knows it.
        hello: what it said of itself.
    """

    def __init__(self, identity: bytes, hello: ClientHello) -> None:
        self.identity = identity
        self.pid = hello.pid
        self.receiver = hello.receiver
        self.takes_detour = False  # its tensors travel in the answers, though there are senders
        self.next_number = 0
        self.asked: dict[int, Asked] = {}  # what has not ended
        self.unsent: deque[bytes] = deque()  # headers, for want of room


class ClientsEvents(Protocol):
    """What a server wants to be told."""

    def asked(self, asked: Asked) -> None:
        """Take a message."""

    def given_up(self, asked: Asked, state: State) -> None:
        """Note that nobody wants a message any more, which was in this state."""


class Clients:
    """Speak with all clients of one socket; belongs to the running loop.

    Args:
        max_clients: the most at once; None for no limit.
        receiver: the id of the server's receiver; "" for none.
        events: who is told.
    """

    def __init__(self, max_clients: int | None, receiver: str, events: ClientsEvents) -> None:
        self.max_clients = max_clients
        self._receiver = receiver
        self.lost = self.refused_clients = 0
        self._events = events
        self._clients: dict[bytes, Client] = {}
        self._connections: dict[int, set[bytes]] = {}  # by their descriptors, and who is there
        self._turned_away: set[bytes] = set()  # still connected, and not listened to
        self._room = Waiters()
        self.socket: LoopSocket  # given by the server, which opens it

    def __len__(self) -> int:
        return len(self._clients)

    # What is said

    async def answer(self, asked: Asked, parts: Sequence[bytes | memoryview]) -> bool:
        """Send an answer once there is room for it, and say whether anybody wanted it.

        Args:
            asked: what it is the answer to; ends with this.
            parts: the header, and the buffers beside the body.
        """
        client = asked.client
        while asked.is_wanted:
            if not client.unsent and self._send(client, parts):
                self._end(asked)
                return True
            if asked.is_wanted:
                await self._room.wait()
        self._end(asked)
        return False

    def fail(self, asked: Asked, type_name: str, text: str) -> bool:
        """Say that there is no answer, and whether anybody wanted one."""
        was_wanted = asked.is_wanted
        self._end(asked)
        if was_wanted:
            self._post(asked.client, failure(asked.number, type_name, text))
        return was_wanted

    def say_farewell(self) -> None:
        """Tell every client that this is the end, and give up what they have asked."""
        for client in list(self._clients.values()):
            self._post(client, Farewell())
            self._give_up_all(client)
        self._clients.clear()
        self._room.wake()

    # What is heard

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Take what a client says."""
        identity = parts[0].bytes
        client = self._clients.get(identity)
        if client is None and (identity in self._turned_away or not self._is_here(identity, parts[0])):
            return
        try:
            header = read_from_client(parts[1].buffer if len(parts) > 1 else b"")
            if client is None:
                self._introduced(identity, header)
                return
            match header:
                case Ask(number, body, handles, wants_answer):
                    if number != client.next_number:
                        raise ProtocolError(f"it sent message {number} in place of {client.next_number}")
                    client.next_number += 1
                    message = [body, *[part.buffer for part in parts[2:]]]
                    asked = Asked(client, number, handles, message, wants_answer=wants_answer)
                    client.asked[number] = asked
                    self._events.asked(asked)
                case Cancel(number):
                    if number >= client.next_number:
                        raise ProtocolError(f"it cancelled message {number}, which it never sent")
                    if number in client.asked:
                        self._give_up(client.asked[number])
                case ClientHello():
                    raise ProtocolError("it introduced itself twice")
        except ProtocolError as error:
            pid = None if client is None else client.pid
            logger.error("a client (pid %s) broke the protocol: %s", pid, str(error))
            self._turn_away(identity, f"it broke the protocol: {error}")
            if client is not None:
                self._lose(client)

    def connected(self, descriptor: int) -> None:
        """Note a connection."""
        self._connections[descriptor] = set()

    def handshaken(self) -> None:
        """Wait for the client to introduce itself."""

    def refused(self, *, is_final: bool) -> None:
        """Note that somebody does not have the keys."""
        logger.warning("a client that does not have the keys was refused")

    def disconnected(self, descriptor: int) -> None:
        """Note that a client is gone."""
        # Later, since a message may just be taken in.
        asyncio.get_running_loop().call_soon(self._lose_all, self._connections.pop(descriptor, set()))

    def _lose_all(self, identities: set[bytes]) -> None:
        self.socket.read_all()  # what they said before still counts
        for identity in identities:
            self._turned_away.discard(identity)
            client = self._clients.get(identity)
            if client is not None:
                self._lose(client)

    def has_room(self) -> None:
        """Send what there was no room for."""
        for client in list(self._clients.values()):
            self._flush(client)
        self._room.wake()

    def _is_here(self, identity: bytes, part: "zmq.Frame") -> bool:
        """Say whether somebody new is still connected, and remember by which descriptor."""
        # These are used again: what became of this one before the message came has to be known first.
        self.socket.look_for_events()
        here = self._connections.get(int(part.get(zmq.SRCFD)))
        if here is None:
            return False
        here.add(identity)
        return True

    def _introduced(self, identity: bytes, hello: FromClient) -> None:
        if not isinstance(hello, ClientHello):
            raise ProtocolError("it did not introduce itself")
        if hello.version != VERSION:
            raise ProtocolError(f"it speaks version {hello.version}, this server speaks {VERSION}")
        if self.max_clients is not None and len(self._clients) >= self.max_clients:
            reason = f"the server has max_clients={self.max_clients} clients already"
            logger.warning("a client (pid %s) is refused: %s", hello.pid, reason)
            self.refused_clients += 1
            self._turn_away(identity, reason)
            return
        client = self._clients[identity] = Client(identity, hello)
        self._post(client, ServerHello(VERSION, os.getpid(), self._receiver))

    # Ends

    def _turn_away(self, identity: bytes, reason: str) -> None:
        """Say goodbye, and listen no more."""
        self._turned_away.add(identity)
        try:
            self.socket.send([identity, write(Farewell(reason[:1024]))])
        except PeerGoneError:
            return

    def _lose(self, client: Client) -> None:
        """Forget a client; nobody waits for what it asked."""
        del self._clients[client.identity]
        self.lost += 1
        wanted = sum(asked.wants_answer for asked in client.asked.values())
        logger.log(
            logging.WARNING if wanted else logging.INFO,
            "a client (pid %s) is gone; %s messages need no answer any more",
            client.pid,
            wanted,
        )
        self._give_up_all(client)
        self._room.wake()

    def _give_up_all(self, client: Client) -> None:
        for asked in list(client.asked.values()):
            # What wanted no answer is as good as before; if its tensors went too, that is found out later.
            if asked.wants_answer:
                self._give_up(asked)

    def _give_up(self, asked: Asked) -> None:
        state = asked.state
        self._end(asked)
        self._events.given_up(asked, state)

    def _end(self, asked: Asked) -> None:
        asked.state = State.ENDED
        asked.client.asked.pop(asked.number, None)

    # The socket

    def _send(self, client: Client, parts: Sequence[bytes | memoryview]) -> bool:
        try:
            return self.socket.send([client.identity, *parts])
        except PeerGoneError:
            if client.identity in self._clients:
                self._lose(client)
            return False

    def _post(self, client: Client, header: FromServer) -> None:
        """Send a header now, or when there is room."""
        client.unsent.append(write(header))
        self._flush(client)

    def _flush(self, client: Client) -> None:
        while client.unsent and self._send(client, [client.unsent[0]]):
            client.unsent.popleft()
