"""The clients of a server: their connections, from the first message to the end.

ZeroMQ assigns an identity to each connection, so no client can pose as another.
"""

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from aiotensor.channel.incoming_requests import IncomingRequests
from aiotensor.channel.monitor import SocketEvents
from aiotensor.channel.remote_client import RemoteClient
from aiotensor.channel.send_queue import SendQueue, flush_all
from aiotensor.channel.sockets import LoopSocket, PeerGoneError
from aiotensor.errors import ProtocolError
from aiotensor.protocol.exchange import Ask, Cancel, ClientHello
from aiotensor.protocol.parts import Parts
from aiotensor.protocol.server import ClientLimits, ServerConnection
from aiotensor.runtime.logs import RepeatedEvent, logger_of

__all__ = ["Clients", "ConnectionLimit"]

logger = logger_of("channel")

_REMEMBERED = 1024  # identities of closed connections
_UNREAD = "it reads no answers"

# Connections beside those of clients: their peers have not sent a hello yet, or the server has refused them.
_UNIDENTIFIED = 64


class ConnectionLimit:
    """Keep the connections of a server within their limit; belongs to the running loop.

    Any process that reaches the address can open a connection and keep it open. Such a connection never
    keeps a client out: beyond the limit, the oldest connection that is not a client's is closed. A client
    sends its hello as soon as it can, so it is not among the oldest.

    Args:
        max_clients: the most clients at once; None for no limit.
        is_client: returns whether an identity is that of a client.
    """

    def __init__(self, max_clients: int | None, is_client: Callable[[bytes], bool]) -> None:
        self._max_clients = max_clients
        self._is_client = is_client
        # By their descriptors, the oldest connection first. A descriptor may have several: ZeroMQ may deliver
        # a message of an ended connection after one of the next connection.
        self._identities: dict[int, list[bytes]] = {}

    def opened(self, descriptor: int) -> None:
        """Add a connection."""
        self._identities.pop(descriptor, None)
        self._identities[descriptor] = []

    def closed(self, descriptor: int) -> list[bytes]:
        """Forget a connection, and return its identities: none if no message has arrived on it."""
        return self._identities.pop(descriptor, [])

    def identify(self, descriptor: int, identity: bytes) -> list[bytes] | None:
        """Record the identity of a connection.

        Returns None if the connection has ended, otherwise the earlier identities that it replaces. It keeps
        the identities of clients, because any of them may still be connected.
        """
        before = self._identities.get(descriptor)
        if before is None:
            return None
        self._identities[descriptor] = [*filter(self._is_client, before), identity]
        return [one for one in before if not self._is_client(one)]

    def excess(self) -> list[int]:
        """Return the descriptors of connections beyond the limit: the oldest that are not a client's."""
        others = [
            descriptor
            for descriptor, identities in self._identities.items()
            if not any(map(self._is_client, identities))
        ]
        clients = len(self._identities) - len(others)
        most = _UNIDENTIFIED if self._max_clients is None else _UNIDENTIFIED + self._max_clients - clients
        return others[: max(0, len(others) - most)]


class Clients:
    """Exchange messages with all clients of one socket; belongs to the running loop.

    Args:
        limits: the limits of the server on its clients.
        receiver: the id of the server's receiver; "" for none.
        requests: handles the requests. A task that waits there keeps the server from being
            garbage-collected, since the event loop refers to this.
        counts: the counts of the server, where lost and refused clients are counted.
        listen: opens the socket, which calls back the given object.
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
        self._clients: dict[bytes, RemoteClient] = {}
        self._leftovers: dict[RemoteClient, None] = {}  # disconnected clients with requests that may wait
        # Functions of the module write the lines: a pending timer keeps no server alive.
        self._connections_refused = RepeatedEvent(_log_connection_refused)
        self._clients_refused = RepeatedEvent(_log_client_refused)
        self._protocol_broken = RepeatedEvent(_log_protocol_broken)
        self._limit = ConnectionLimit(limits.clients, self._clients.__contains__)
        self._is_limit_due = False
        self._ending: set[bytes] = set()  # of connections whose last messages may not have been read
        self._rejected: dict[bytes, SendQueue] = {}  # still connected, but their messages are ignored
        # The identities closed last: messages of them may still arrive.
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._socket = listen(self)

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
        identity = parts[0].bytes
        client = self._clients.get(identity)
        if client is not None:
            self._receive(client, parts)
        elif identity not in self._rejected and identity not in self._gone:
            # The operating system reuses descriptors: the end of an earlier connection with this one may
            # have to be handled first.
            self._socket.monitor.after_events(partial(self._first_arrived, identity, parts))

    def _first_arrived(self, identity: bytes, parts: "list[zmq.Frame]") -> None:
        """Handle a message of a peer that was unidentified when the message arrived."""
        client = self._clients.get(identity)
        if client is None:
            if identity in self._rejected or identity in self._gone:
                return
            replaced = self._limit.identify(int(parts[0].get(zmq.SRCFD)), identity)
            if replaced is None:
                return
            for one in replaced:
                self._disconnected(one)
            connection = ServerConnection(self._limits)
            send = partial(self._send, identity)
            client = RemoteClient(identity, connection, send, self.requests.unfinished, self._disconnect_slow)
        self._receive(client, parts)

    def _receive(self, client: RemoteClient, parts: "list[zmq.Frame]") -> None:
        try:
            frame, body = client.connection.receive([part.buffer for part in parts[1:]])
        except ProtocolError as error:
            self._protocol_broken.add(client.connection.peer_pid, str(error))
            self._reject(client, f"it broke the protocol: {error}")
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

    def _admit(self, client: RemoteClient) -> None:
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
        left = f", with {len(self._leftovers)} that left messages to be taken" if self._leftovers else ""
        return (
            f"the server has max_clients={most} clients already{left}: raise max_clients of the server, or "
            "close another client"
        )

    # Connections

    def connected(self, descriptor: int) -> None:
        """Add a connection, and close the oldest unidentified ones if there are too many."""
        self._limit.opened(descriptor)
        if not self._is_limit_due:
            self._is_limit_due = True
            self._socket.monitor.after_events(self._enforce_limit)

    def _enforce_limit(self) -> None:
        self._is_limit_due = False
        for descriptor in self._limit.excess():
            if not self._socket.monitor.reset(descriptor):
                break  # this process has no descriptors left
            self._connections_refused.add("it sent no hello, and other connections need its place")
            for identity in self._limit.closed(descriptor):
                self._disconnected(identity)

    def handshaken(self) -> None:
        """Wait for the hello of the client."""

    def unreachable(self) -> None:
        """Do nothing: a server does not connect."""

    def refused(self, *, is_final: bool, error: int) -> None:
        """Log a peer without the keys, unless it disconnected during the handshake."""
        if is_final:
            self._connections_refused.add("its peer does not have the keys")

    def disconnected(self, descriptor: int) -> None:
        """Handle the end of a connection."""
        for identity in self._limit.closed(descriptor):
            self._end(identity)

    def _end(self, identity: bytes) -> None:
        """Handle the end of the connection with this identity, after the messages that arrived before."""
        if identity not in self._ending:
            self._ending.add(identity)
            self._socket.after_messages(partial(self._disconnected, identity))

    def writable(self) -> None:
        """Send messages that the socket did not accept before."""
        flush_all(self._unsent)

    def _unsent(self) -> list[SendQueue]:
        queues = [client.queue for client in self._clients.values() if client.queue]
        return queues + [queue for queue in self._rejected.values() if queue]

    def _send(self, identity: bytes, parts: Parts, is_retry: bool) -> bool:
        try:
            return self._socket.send([identity, *parts], is_retry)
        except PeerGoneError:
            # The monitor reports this too, but perhaps only after the descriptor has been reused.
            self._end(identity)
            return False

    # Ends

    def _reject(self, client: RemoteClient, reason: str, *, is_refusal: bool = False) -> None:
        """Send a final message, and ignore the peer; after a refusal, a new attempt would fail too."""
        self._rejected[client.identity] = client.queue
        client.queue.post(client.connection.close(reason, is_refusal=is_refusal))

    def _disconnect_slow(self, client: RemoteClient) -> None:
        """Disconnect a client that leaves too many messages unread."""
        logger.error(
            "a client (pid %s) is disconnected: %s",
            client.pid,
            _UNREAD,
            extra={"event": "client_cut_off", "peer_pid": client.pid, "reason": _UNREAD},
        )
        client.queue.clear()
        self._reject(client, _UNREAD)
        self._lose(client)

    def _disconnected(self, identity: bytes) -> None:
        """Handle the end of the connection with this identity."""
        self._ending.discard(identity)
        self._gone[identity] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        self._rejected.pop(identity, None)
        if identity in self._clients:
            self._clients[identity].connection.disconnected()
            self._lose(self._clients[identity])

    def _lose(self, client: RemoteClient) -> None:
        """Remove a client, and cancel its requests that want an answer."""
        if self._clients.pop(client.identity, None) is None:
            return  # removed already, when a send found that it is gone
        self._counts["clients_lost"] += 1
        wanted = sum(incoming.wants_answer for incoming in client.requests.values())
        logger.log(
            logging.WARNING if wanted else logging.INFO,
            "a client (pid %s) is gone; %s messages need no answer any more",
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


def _log_connection_refused(count: int, reason: str) -> None:
    logger.warning(
        "%s connections were refused, the latest because %s",
        count,
        reason,
        extra={"event": "connection_refused", "count": count, "reason": reason},
    )


def _log_client_refused(count: int, pid: int, reason: str) -> None:
    logger.warning(
        "%s clients were refused, the latest (pid %s) because %s",
        count,
        pid,
        reason,
        extra={"event": "client_refused", "count": count, "peer_pid": pid, "reason": reason},
    )


def _log_protocol_broken(count: int, pid: int | None, reason: str) -> None:
    logger.error(
        "%s clients broke the protocol, the latest (pid %s): %s",
        count,
        pid,
        reason,
        extra={"event": "protocol_broken", "count": count, "peer_pid": pid, "reason": reason},
    )
