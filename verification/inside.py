"""Functions that read or change the internal state of clients, servers and blocking objects."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiotensor.channel import MessageClient, MessageServer
from aiotensor.channel.client import _Session
from aiotensor.channel.server import Incoming, _Client
from aiotensor.runtime.worker import Worker

if TYPE_CHECKING:
    from aiotensor.blocking.portal import BlockingObject


def sessions_of(client: MessageClient[Any]) -> list[_Session]:
    """Return the sessions of a client with its servers, in the order of their addresses."""
    return [engine.session for engine in client._engines if engine.session is not None]


def unanswered(client: MessageClient[Any]) -> int:
    """Count the messages that were announced or wait for an answer, over all servers."""
    return sum(session.in_flight for session in sessions_of(client))


def held_by_client(client: MessageClient[Any]) -> dict[str, int]:
    """Count what a client holds."""
    permits, memory, sessions = client._permits, client._memory, sessions_of(client)
    return {
        "permits": permits.in_use + permits.waiting + len(client._held),
        "bytes of the arena": memory.gate.in_use + memory.gate.waiting,
        "holders of memory": len(memory.gate.held),
        "pinned blocks": len(memory.blocks),
        "leases of answers": client._mappings.leases,
        "messages that wait for a server": len(client._waiting),
        "messages at servers": unanswered(client),
        "answers that are due": sum(len(session.connection._asked) for session in sessions),
        "untaken answers": sum(session.untaken for session in sessions),
        "pins of servers": sum(len(session.pins) for session in sessions),
    }


def clients_of(server: MessageServer[Any]) -> list[_Client]:
    """Return the clients of a server."""
    return list(server._clients.values())


def unidentified_at(server: MessageServer[Any]) -> int:
    """Count the connections of a server that have sent no frame, and its inspectors."""
    return len(server._admission._unidentified) + len(server._admission._inspectors)


def ready(server: MessageServer[Any]) -> list[Incoming]:
    """Return the requests that wait to be taken."""
    return list(server._ready)


def waiters_for_requests(server: MessageServer[Any]) -> int:
    """Count the tasks that wait for a request."""
    return len(server._takers) + len(server._waiters)


def held_by_server(server: MessageServer[Any]) -> dict[str, int]:
    """Count what a server holds."""
    memory, clients = server._memory, clients_of(server)
    return {
        "waiting requests": len(server._ready),
        "requests in hand": len(server._in_hand),
        "bytes of the arena": memory.gate.in_use + memory.gate.waiting,
        "pinned blocks": len(memory.blocks),
        "leases of requests": server._mappings.leases,
        "unmapped later": server._mappings.lingering_bytes,
        "lost clients": sum(bool(client.untaken) for client in server._leftovers),
        "requests of clients": sum(len(client.requests) + client.untaken for client in clients),
        "pins of clients": sum(len(client.pins) for client in clients),
    }


def takers(owner: "BlockingObject[Any, Any]") -> int:
    """Count the threads that wait for an item."""
    return len(owner._takers)


def workers_of(one: MessageClient[Any] | MessageServer[Any]) -> tuple[Worker, Worker]:
    """Return the threads that copy memory, and those that map it."""
    return one._memory._worker, one._mappings._worker


def is_opening(blocking: "BlockingObject[Any, Any]") -> bool:
    """Return whether the event loop has begun to open an object."""
    return blocking._opening._is_running


def after_next_lock(blocking: "BlockingObject[Any, Any]", step: Callable[[], object]) -> None:
    """Call a function when a blocking object has just released its lock."""
    blocking._lock = _SteppingLock(blocking, step)  # type: ignore[assignment]


class _SteppingLock:
    """The lock of a blocking object, which it replaces until its first release."""

    def __init__(self, blocking: "BlockingObject[Any, Any]", step: Callable[[], object]) -> None:
        self._blocking = blocking
        self._lock = blocking._lock
        self._step = step

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._blocking._lock = self._lock
        self._lock.release()
        self._step()
