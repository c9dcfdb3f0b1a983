"""Functions that return the internal state of open clients and servers, which no statistics contain."""

from collections.abc import Callable
from typing import Any

import zmq

from aiotensor.channel import MessageClient, MessageServer
from aiotensor.channel.remote_client import IncomingRequest, RemoteClient
from aiotensor.channel.remote_server import RemoteServer
from aiotensor.channel.sockets import LoopSocket
from aiotensor.runtime.worker import Worker

__all__ = [
    "arriving",
    "clients_of",
    "found",
    "note_messages",
    "ready",
    "rejected",
    "servers_of",
    "socket_of",
    "unanswered",
    "unsent",
    "waiters_for_requests",
    "waiters_for_server",
    "worker_of",
]


def servers_of(client: MessageClient[Any]) -> list[RemoteServer]:
    """Return the servers of a client, in the order of their addresses."""
    assert client._parts is not None
    return client._parts.requests.servers


def waiters_for_server(client: MessageClient[Any]) -> int:
    """Count the calls that wait for a certain server, over all servers."""
    return sum(len(server._waiters) for server in servers_of(client))


def unsent(client: MessageClient[Any]) -> int:
    """Count the messages and cancellations that have not been sent, over all servers."""
    sessions = [server.session for server in servers_of(client) if server.session is not None]
    return sum(len(session._queue) + len(session._cancellations) for session in sessions)


def unanswered(client: MessageClient[Any]) -> int:
    """Count the requests that were sent and have no answer, over all servers."""
    return sum(server.session.unanswered for server in servers_of(client) if server.session is not None)


def clients_of(server: MessageServer[Any]) -> list[RemoteClient]:
    """Return the clients of a server."""
    assert server._parts is not None
    return list(server._parts.clients._clients.values())


def rejected(server: MessageServer[Any]) -> int:
    """Count the clients that were rejected, and are still connected."""
    assert server._parts is not None
    return len(server._parts.clients._rejected)


def socket_of(server: MessageServer[Any]) -> LoopSocket:
    """Return the socket of a server."""
    assert server._parts is not None
    return server._parts.clients._socket


def note_messages(
    server: MessageServer[Any], note: Callable[[list[zmq.Frame]], object]
) -> Callable[[list[zmq.Frame]], None]:
    """Call a function with each message that a server receives; return the server's own handler."""
    assert server._parts is not None
    clients = server._parts.clients
    handle = clients.message_arrived

    def noted(parts: list[zmq.Frame]) -> None:
        note(parts)
        handle(parts)

    clients.message_arrived = noted  # type: ignore[method-assign]
    return handle


def ready(server: MessageServer[Any]) -> list[IncomingRequest]:
    """Return the requests whose tensors have arrived."""
    assert server._parts is not None
    return list(server._parts.requests.ready)


def arriving(server: MessageServer[Any]) -> int:
    """Count the requests that wait for tensors."""
    assert server._parts is not None
    return len(server._parts.requests._arriving)


def found(server: MessageServer[Any]) -> int:
    """Count the requests whose tensors were taken before a cancellation."""
    assert server._parts is not None
    return len(server._parts.requests._found)


def waiters_for_requests(server: MessageServer[Any]) -> int:
    """Count the tasks that wait for a request."""
    assert server._parts is not None
    return len(server._parts.requests.waiters)


def worker_of(one: MessageClient[Any] | MessageServer[Any]) -> Worker:
    """Return the thread that frees large messages."""
    assert one._parts is not None
    disposal = one._parts.disposal if isinstance(one, MessageClient) else one._parts.requests.disposal
    return disposal._worker
