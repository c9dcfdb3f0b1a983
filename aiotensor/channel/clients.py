"""The clients of a server: their admission, their requests, and the ends of their connections."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from aiotensor.channel.client_session import ClientSession
from aiotensor.channel.incoming_requests import IncomingRequests
from aiotensor.channel.send_queue import SendQueue, flush_all
from aiotensor.errors import ProtocolError
from aiotensor.protocol.exchange import Ask, Cancel, ClientHello
from aiotensor.protocol.server import ClientLimits, ServerConnection
from aiotensor.runtime.logs import RepeatedEvent, logger_of, others
from aiotensor.transports.zeromq.connections import Connections
from aiotensor.transports.zeromq.monitor import SocketEvents
from aiotensor.transports.zeromq.sockets import LoopSocket

__all__ = ["Clients"]

logger = logger_of("channel")

_UNREAD = "it does not read its replies"


class Clients(Connections):
    """Exchange messages with all clients of one socket; belongs to the running loop.

    Args:
        limits: the limits of the server on its clients.
        receiver: the id of the server's receiver; "" for none.
        requests: the requests of the clients. The event loop refers to them through this object, so a task
            that waits for a request keeps the server alive.
        counts: the counters of the server, in which lost and refused clients are counted.
        listen: called with this object; opens and returns the socket, which calls its callbacks.
    """

    def __init__(
        self,
        limits: ClientLimits,
        receiver: str,
        requests: IncomingRequests[Any],
        counts: dict[str, int],
        listen: Callable[[SocketEvents], LoopSocket],
    ) -> None:
        self._limits = limits
        self._receiver = receiver
        self.requests = requests
        self._counts = counts
        self._clients: dict[bytes, ClientSession] = {}
        self._leftovers: dict[ClientSession, None] = {}  # disconnected clients whose requests may still wait
        # The lines are written by functions, not by methods: a pending timer would keep the server alive.
        self._connections_refused = RepeatedEvent(_log_connection_refused)
        self._clients_refused = RepeatedEvent(_log_client_refused)
        self._protocol_broken = RepeatedEvent(_log_protocol_broken)
        self._rejected: dict[bytes, SendQueue] = {}  # still connected, but their messages are ignored
        super().__init__(listen, self._clients, limits.clients)

    def __len__(self) -> int:
        return len(self._clients)

    def close(self) -> None:
        """Notify every client that the server closes, and end all requests and the waits for them."""
        for client in list(self._clients.values()):
            client.queue.close()
            client.queue.post(client.connection.close())
        self._clients.clear()
        self.requests.close()
        for event in (self._connections_refused, self._clients_refused, self._protocol_broken):
            event.close()

    # Messages

    def message_arrived(self, parts: "list[zmq.Frame]") -> None:
        """Handle a message of a peer."""
        client = self._clients.get(parts[0].bytes)
        if client is not None:
            self._receive(client, parts)
        else:
            super().message_arrived(parts)

    def is_ignored(self, identity: bytes) -> bool:
        """Return whether a connection was rejected, so that its messages are ignored."""
        return identity in self._rejected

    def received(self, identity: bytes, parts: "list[zmq.Frame]") -> None:
        """Handle a message of a peer that was unidentified when the message arrived."""
        client = self._clients.get(identity)
        if client is None:
            connection = ServerConnection(self._limits)
            send = partial(self.send, identity)
            client = ClientSession(
                identity, connection, send, self.requests.unfinished, self._disconnect_slow
            )
        self._receive(client, parts)

    def _receive(self, client: ClientSession, parts: "list[zmq.Frame]") -> None:
        try:
            frame, body = client.connection.receive([part.buffer for part in parts[1:]])
        except ProtocolError as error:
            self._protocol_broken.add(client.connection.peer_pid, str(error))
            self._reject(client, f"the client broke the protocol: {error}")
            self._lose(client)
            return
        match frame:
            case Ask():
                self.requests.add(client.add(frame, body))
            case Cancel(number):
                if number in client.requests:
                    self.requests.cancel(client.requests[number])
            case ClientHello():
                self._admit(client)

    def _admit(self, client: ClientSession) -> None:
        """Accept or refuse a client after its hello."""
        connection = client.connection
        reason = connection.refusal or self._full()
        if reason is None:
            self._clients[client.identity] = client
            client.post(connection.accept(os.getpid(), self._receiver))
        else:
            self._clients_refused.add(client.pid, reason)
            self._counts["clients_refused"] += 1
            self._reject(client, reason, is_refusal=True)

    def _full(self) -> str | None:
        """Return the reason to refuse a client if the limit on clients is reached."""
        most = self._limits.clients
        if most is None:
            return None
        for client in tuple(self._leftovers):
            if client.connection.window.waiting == 0:
                del self._leftovers[client]
        for client in tuple(self._leftovers):
            if len(self._clients) + len(self._leftovers) < most:
                break
            if self.requests.cancel_arriving(client):
                del self._leftovers[client]
        if len(self._clients) + len(self._leftovers) < most:
            return None
        left = (
            f", including {len(self._leftovers)} disconnected clients with waiting messages"
            if self._leftovers
            else ""
        )
        return (
            f"the server already has max_clients={most} clients{left}: raise max_clients of the server, or "
            "close another client"
        )

    # Connections

    def connection_refused(self, reason: str) -> None:
        """Log that a connection was refused."""
        self._connections_refused.add(reason)

    def writable(self) -> None:
        """Send messages that the socket did not accept before."""
        flush_all(self._unsent)

    def _unsent(self) -> list[SendQueue]:
        queues = [client.queue for client in self._clients.values() if client.queue]
        return queues + [queue for queue in self._rejected.values() if queue]

    # Ends

    def _reject(self, client: ClientSession, reason: str, *, is_refusal: bool = False) -> None:
        """Send the reason, and ignore further messages; `is_refusal` states that a retry would fail, too."""
        self._rejected[client.identity] = client.queue
        client.queue.post(client.connection.close(reason, is_refusal=is_refusal))

    def _disconnect_slow(self, client: ClientSession) -> None:
        """Disconnect a client that leaves too many messages unread."""
        logger.error(
            "a client (pid %s) was disconnected: %s",
            client.pid,
            _UNREAD,
            extra={"event": "client_cut_off", "peer_pid": client.pid, "reason": _UNREAD},
        )
        client.queue.clear()
        self._reject(client, _UNREAD)
        self._lose(client)

    def ended(self, identity: bytes) -> None:
        """Handle the end of the connection with this identity."""
        self._rejected.pop(identity, None)
        client = self._clients.get(identity)
        if client is not None:
            client.connection.disconnected()
            self._lose(client)

    def _lose(self, client: ClientSession) -> None:
        """Remove a client, and cancel its requests that want an answer."""
        if self._clients.pop(client.identity, None) is None:
            return  # it was removed before, when a send found that it is gone
        self._counts["clients_lost"] += 1
        wanted = sum(incoming.wants_answer for incoming in client.requests.values())
        logger.log(
            logging.WARNING if wanted else logging.INFO,
            "the connection to a client (pid %s) was lost; %s messages no longer need a reply",
            client.pid,
            wanted,
            extra={"event": "client_lost", "peer_pid": client.pid, "messages_lost": wanted},
        )
        for incoming in list(client.requests.values()):
            # A message that wants no answer is still valid, unless its tensors are lost.
            if incoming.wants_answer or self.requests.is_void(incoming):
                self.requests.cancel(incoming)
        if client.connection.window.waiting:
            self._leftovers[client] = None
        client.queue.close()
        if client.identity not in self._rejected:
            client.queue.clear()
        self.requests.wake()  # the consumer of a queue then checks whether its producers have ended


def _log_connection_refused(count: int, reason: str) -> None:
    logger.warning(
        "a connection was refused because %s%s",
        reason,
        others(count),
        extra={"event": "connection_refused", "count": count, "reason": reason},
    )


def _log_client_refused(count: int, pid: int, reason: str) -> None:
    logger.warning(
        "a client (pid %s) was refused: %s%s",
        pid,
        reason,
        others(count),
        extra={"event": "client_refused", "count": count, "peer_pid": pid, "reason": reason},
    )


def _log_protocol_broken(count: int, pid: int | None, reason: str) -> None:
    logger.error(
        "a client (pid %s) broke the protocol and was disconnected: %s%s",
        pid,
        reason,
        others(count),
        extra={"event": "protocol_broken", "count": count, "peer_pid": pid, "reason": reason},
    )
