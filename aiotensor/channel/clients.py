"""The clients of a server: their connections, from the first message to the end.

ZeroMQ assigns an identity to each connection, so no client can pose as another.
"""

import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

from aiotensor.channel.connection_limit import ConnectionLimit
from aiotensor.channel.incoming_requests import IncomingRequests
from aiotensor.channel.refusal_log import ClientRefusalLog
from aiotensor.channel.remote_client import IncomingRequest, Load, RemoteClient
from aiotensor.channel.send_queue import SendQueue, flush_all
from aiotensor.channel.sockets import LoopSocket, PeerGoneError, SocketEvents
from aiotensor.errors import ProtocolError
from aiotensor.protocol.exchange import Ask, Cancel, ClientHello
from aiotensor.protocol.parts import Parts
from aiotensor.protocol.server import ClientLimits, ServerConnection
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters

__all__ = ["Clients"]

logger = logger_of("channel")

_REMEMBERED = 1024  # identities of closed connections
_UNREAD = "it reads no answers"


class Clients:
    """Exchange messages with all clients of one socket; belongs to the running loop.

    Args:
        limits: the limits of the server on its clients.
        receiver: the id of the server's receiver; "" for none.
        requests: handles the requests. This refers to them weakly, since the event loop refers to this, and
            an unused server is garbage-collected.
        waiters: the tasks that wait for a request, which keep the server from being garbage-collected.
        counts: the counts of the server, where lost and refused clients are counted.
        listen: opens the socket, which calls back the given object.
    """

    def __init__(
        self,
        limits: ClientLimits,
        receiver: str,
        requests: IncomingRequests[Any],
        waiters: Waiters,
        counts: dict[str, int],
        listen: Callable[[SocketEvents], LoopSocket],
    ) -> None:
        self._limits = limits
        self._receiver = receiver
        self._requests = weakref.ref(requests)
        self._waiters = waiters
        self._counts = counts
        self._load = Load()
        self._clients: dict[bytes, RemoteClient] = {}
        self._leftovers: dict[RemoteClient, None] = {}  # disconnected clients with requests that may wait
        self._refusals = ClientRefusalLog()
        self._limit = ConnectionLimit(limits.clients, self._clients.__contains__, self._reset, self._refusals)
        self._is_limit_due = False
        self._ending: set[bytes] = set()  # of connections whose last messages may not have been read
        self._rejected: dict[bytes, SendQueue] = {}  # still connected, but their messages are ignored
        # The identities closed last: messages of them may still arrive.
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._socket = listen(self)

    def __len__(self) -> int:
        return len(self._clients)

    def close(self) -> None:
        """Notify every client that the server closes, and end all requests."""
        for client in list(self._clients.values()):
            client.queue.close()
            client.queue.post(client.connection.close())
            self._cancel_all(client, and_those_without_answer=True)
        self._clients.clear()
        self._refusals.close()

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
            self._socket.after_events(partial(self._first_arrived, identity, parts))

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
            client = RemoteClient(identity, connection, send, self._load, self._disconnect_slow)
        self._receive(client, parts)

    def _receive(self, client: RemoteClient, parts: "list[zmq.Frame]") -> None:
        try:
            frame, body = client.connection.receive([part.buffer for part in parts[1:]])
        except ProtocolError as error:
            self._refusals.protocol_broken(client.connection.peer_pid, str(error))
            self._reject(client, f"it broke the protocol: {error}")
            self._lose(client)
            return
        match frame:
            case Ask():
                requests = self._requests()
                incoming = client.add(frame, body)
                if requests is not None:  # None: garbage-collected, and about to be closed
                    requests.add(incoming)
            case Cancel(number):
                if number in client.requests:
                    self._cancel(client.requests[number])
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
            self._refusals.client_refused(client.pid, reason)
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
            requests = self._requests()
            if requests is not None and requests.cancel_arriving(client):
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
            self._socket.after_events(self._enforce_limit)

    def _enforce_limit(self) -> None:
        self._is_limit_due = False
        for identity in self._limit.enforce():
            self._disconnected(identity)

    def _reset(self, descriptor: int) -> bool:
        return self._socket.reset(descriptor)

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
        client.queue.post(client.connection.reject(reason, is_refusal=is_refusal))

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
        self._cancel_all(client)
        if client.connection.window.waiting:
            self._leftovers[client] = None
        client.queue.close()
        if client.identity not in self._rejected:
            client.queue.clear()

    def _cancel_all(self, client: RemoteClient, *, and_those_without_answer: bool = False) -> None:
        requests = self._requests()
        for incoming in list(client.requests.values()):
            # A message that wants no answer is still valid, unless its tensors are lost.
            is_void = incoming.wants_answer or and_those_without_answer
            if is_void or requests is None or requests.is_void(incoming):
                self._cancel(incoming)

    def _cancel(self, incoming: IncomingRequest) -> None:
        requests = self._requests()
        if requests is None:
            incoming.client.end(incoming)
        else:
            requests.cancel(incoming)
