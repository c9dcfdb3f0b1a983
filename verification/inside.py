"""Functions that read or change the internal state of clients, servers and blocking objects."""

from collections.abc import Callable
from typing import Any

from aiotensor.blocking.portal import BlockingObject
from aiotensor.channel import MessageClient, MessageServer
from aiotensor.channel.client_session import ClientSession, IncomingRequest
from aiotensor.channel.remote_server import RemoteServer
from aiotensor.runtime.worker import Worker

__all__ = [
    "after_next_lock",
    "arriving",
    "clients_of",
    "found",
    "is_opening",
    "ready",
    "rejected",
    "servers_of",
    "unanswered",
    "unsent",
    "waiters_for_requests",
    "waiters_for_server",
    "worker_of",
]


def servers_of(client: MessageClient[Any]) -> list[RemoteServer]:
    """Return the servers of a client, in the order of their addresses."""
    assert client._requests is not None
    return client._requests.servers


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


def clients_of(server: MessageServer[Any]) -> list[ClientSession]:
    """Return the clients of a server."""
    assert server._clients is not None
    return list(server._clients._clients.values())


def ready(server: MessageServer[Any]) -> list[IncomingRequest]:
    """Return the requests whose tensors have arrived."""
    assert server._clients is not None
    return list(server._clients.requests.ready)


def rejected(server: MessageServer[Any]) -> int:
    """Count the clients that were rejected, and are still connected."""
    assert server._clients is not None
    return len(server._clients._rejected)


def arriving(server: MessageServer[Any]) -> int:
    """Count the requests that wait for tensors."""
    assert server._clients is not None
    return len(server._clients.requests._arriving)


def found(server: MessageServer[Any]) -> int:
    """Count the requests whose tensors were taken before a cancellation."""
    assert server._clients is not None
    return len(server._clients.requests._found)


def waiters_for_requests(server: MessageServer[Any]) -> int:
    """Count the tasks that wait for a request."""
    assert server._clients is not None
    requests = server._clients.requests
    return len(requests.takers) + len(requests.waiters)


def worker_of(one: MessageClient[Any] | MessageServer[Any]) -> Worker:
    """Return the thread that frees large messages."""
    if isinstance(one, MessageClient):
        assert one._requests is not None
        return one._requests._memory._worker
    assert one._clients is not None
    return one._clients.requests.memory._worker


def is_opening(blocking: BlockingObject[Any, Any]) -> bool:
    """Return whether the event loop has begun to open an object."""
    return blocking._opening._is_running


def after_next_lock(blocking: BlockingObject[Any, Any], step: Callable[[], object]) -> None:
    """Call a function when a blocking object has just released its lock."""
    blocking._lock = _SteppingLock(blocking, step)  # type: ignore[assignment]


class _SteppingLock:
    """The lock of a blocking object, which it replaces until its first release."""

    def __init__(self, blocking: BlockingObject[Any, Any], step: Callable[[], object]) -> None:
        self._blocking = blocking
        self._lock = blocking._lock
        self._step = step

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._blocking._lock = self._lock
        self._lock.release()
        self._step()
