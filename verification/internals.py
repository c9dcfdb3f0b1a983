"""Internal state of open senders and receivers, which no statistics contain.

Tests use private attributes of senders and receivers only through these functions.
"""

import asyncio
import socket
from collections.abc import Collection
from typing import Any

from aiotensor import TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.broadcast.arrived import Arrived
from aiotensor.broadcast.session import Session as SubscriberSession
from aiotensor.protocol.audience import Backlog
from aiotensor.protocol.blocks import Blocks
from aiotensor.protocol.frames import Hello
from aiotensor.ranks import RankPipe
from aiotensor.receiving.intake import InspectorPeer, Intake
from aiotensor.receiving.senders import Senders
from aiotensor.runtime.descriptors import copy_of, file_of
from aiotensor.runtime.worker import Worker
from aiotensor.sending.gates import Gate
from aiotensor.sending.memory import Memory
from aiotensor.sending.pipeline import Pipeline
from aiotensor.sending.posting import Posts
from aiotensor.sending.session import Session
from aiotensor.tensors.segments import Segment
from aiotensor.transports.base import Listener, Transport
from aiotensor.transports.records import SocketTransport
from aiotensor.transports.tcp.connector import _Attempt
from aiotensor.transports.tcp.transport import TcpTransport
from aiotensor.transports.unix import UnixListener

__all__ = [
    "arrived_at",
    "backlogs_of",
    "blocks_of",
    "connections_at",
    "cut",
    "drainers_of",
    "end_first_wait",
    "has_ended",
    "held_by_pipe",
    "held_by_publisher",
    "held_by_receiver",
    "held_by_sender",
    "inspectors_of",
    "intake_of",
    "is_trimming",
    "jobs_of",
    "keep_socket_file",
    "landed_bytes",
    "lanes_of",
    "leases_of",
    "listener_of",
    "memory_of",
    "pause_reading",
    "pipeline_of",
    "posts_of",
    "publisher_of",
    "read_next",
    "resume_reading",
    "segment_of",
    "segments_of",
    "senders_of",
    "session_of",
    "session_of_subscriber",
    "shrink_send_buffer",
    "transports_between",
    "unidentified_at",
    "unidentified_at_publisher",
    "worker_of",
]


def pipeline_of(sender: TensorSender) -> Pipeline:
    """Return the pipeline of a sender that was opened."""
    assert sender._pipeline is not None
    return sender._pipeline


def posts_of(sender: TensorSender) -> Posts:
    """Return the posted messages of a sender that was opened."""
    assert sender._posts is not None
    return sender._posts


def memory_of(owner: TensorSender | Publisher) -> Memory:
    """Return the shared memory of a sender or publisher that was opened."""
    if isinstance(owner, Publisher):
        assert owner._publishing is not None
        return owner._publishing.memory
    return pipeline_of(owner).grants.memory


def segment_of(sender: TensorSender) -> Segment:
    """Return the current segment of a sender's shared memory."""
    return memory_of(sender)._arena._segment


def blocks_of(sender: TensorSender) -> Blocks:
    """Return the blocks in the current segment of a sender's shared memory."""
    return segment_of(sender).blocks


def leases_of(sender: TensorSender) -> int:
    """Count the blocks of a sender that a receiver has to release."""
    return len(memory_of(sender).leases)


def drainers_of(sender: TensorSender) -> Collection["asyncio.Future[None]"]:
    """Return the futures of the calls that wait for a sender to drain."""
    return pipeline_of(sender).grants.drainers


def held_by_sender(sender: TensorSender) -> dict[str, int]:
    """Count the waits, holders and messages of a sender that are not part of its statistics."""
    pipeline = pipeline_of(sender)
    grants, session = pipeline.grants, pipeline.sessions.current
    gates: list[Gate[Any]] = [grants.permits, grants.memory.gate]
    return {
        "waiters at the gates": sum(len(gate._waits) for gate in gates),
        "holders at the gates": sum(len(gate.budget.held) for gate in gates),
        "blocks whose sends wait": len(grants._await_permits) + len(grants._await_bytes),
        "drainers": len(drainers_of(sender)),
        "copies": len(grants.memory._copies._copies) + jobs_of(worker_of(grants.memory)),
        "announced messages": 0 if session is None else len(session.announced),
        "waiters for a receiver": len(grants.changes),
        "messages that are copied": len(posts_of(sender)._copying) + len(posts_of(sender)._tasks),
        "waiters for posted tensors": len(posts_of(sender)._changes),
    }


def end_first_wait(gate: Gate[Any]) -> None:
    """End the longest wait at a gate as its timer does."""
    gate._end_wait(*next(iter(gate._waits.items())))


def is_trimming(memory: Memory) -> bool:
    """Return whether a release of idle memory is scheduled."""
    return memory._trimming is not None


def worker_of(owner: TensorSender | TensorReceiver | Publisher | Subscriber[Any] | Memory) -> Worker:
    """Return the threads that copy or map memory for an object that was opened."""
    match owner:
        case Memory():
            return owner._worker
        case TensorSender() | Publisher():
            return worker_of(memory_of(owner))
        case Subscriber():
            assert owner._subscription is not None
            return owner._subscription._mappings._worker
        case TensorReceiver():
            return senders_of(owner).mappings._worker


def jobs_of(worker: Worker) -> int:
    """Count the jobs of a worker that have not ended."""
    return worker._running


def landed_bytes(owner: TensorReceiver | Subscriber[Any]) -> int:
    """Return the bytes of the blocks that connected peers on other machines have here."""
    if isinstance(owner, TensorReceiver):
        memories = [peer.memory for peer in senders_of(owner).connected.values()]
    else:
        session = session_of_subscriber(owner)
        memories = [] if session is None or session.is_over else [session.memory]
    return sum(landing._nbytes for memory in memories for landing in memory.landings.values())


def lanes_of(worker: Worker) -> tuple[Any, Any]:
    """Return the thread for short jobs, and the one for long jobs."""
    return worker._short, worker._long


def session_of(sender: TensorSender) -> Session:
    """Return the session of a connected sender."""
    session = pipeline_of(sender).sessions.current
    assert session is not None
    return session


def backlogs_of(publisher: Publisher) -> list[Backlog]:
    """Return the backlogs of the subscribers of a publisher that was opened."""
    assert publisher._publishing is not None
    return list(publisher._publishing.subscribers.audience.backlogs.values())


def held_by_publisher(publisher: Publisher) -> dict[str, int]:
    """Count what a publisher holds and does not report."""
    publishing = publisher._publishing
    assert publishing is not None
    return {
        "turns": publishing._turns.budget.in_use,
        "pinned blocks": len(publishing.memory.leases),
        "departures": len(publishing.subscribers.departures._departures),
        "calls that wait for subscribers": len(publishing.subscribers.changes),
    }


def held_by_pipe(pipe: RankPipe) -> dict[str, int]:
    """Count what an end of a pipe holds and does not report."""
    session = pipe._session
    if session is None:
        return {}
    return {
        "pinned blocks": len(session.outgoing.memory.leases),
        "bytes of the arena": session.outgoing.memory.gate.budget.in_use,
        "calls that wait for changes": len(session.outgoing._changes),
        "answers that are due": len(session._connection._untaken),
    }


def publisher_of(subscriber: Subscriber[Any]) -> str:
    """Return the id of the publisher to which a subscriber is connected; "" if there is none."""
    session = session_of_subscriber(subscriber)
    return "" if session is None or session.is_over else session.publisher


def transports_between(publisher: Publisher, subscriber: Subscriber[Any]) -> tuple[Transport, Transport]:
    """Return the transport of a connected subscriber at its publisher, and its own."""
    assert publisher._publishing is not None
    session = session_of_subscriber(subscriber)
    assert session is not None
    return publisher._publishing.subscribers.connected[subscriber.id].transport, session.transport


def session_of_subscriber(subscriber: Subscriber[Any]) -> SubscriberSession | None:
    """Return the latest session of a subscriber that was opened."""
    assert subscriber._subscription is not None
    return subscriber._subscription._session


def arrived_at(subscriber: Subscriber[Any]) -> list[Arrived]:
    """List the publications that have arrived at a subscriber, the oldest first."""
    assert subscriber._subscription is not None
    return [item for item in subscriber._subscription._inbox if isinstance(item, Arrived)]


def has_ended(subscriber: Subscriber[Any]) -> bool:
    """Return whether the end of a session is still to be reported, or no publisher is searched for."""
    subscription = subscriber._subscription
    assert subscription is not None
    is_queued = any(not isinstance(item, Arrived) for item in subscription._inbox)
    return is_queued or subscription._failure is not None


def unidentified_at_publisher(publisher: Publisher) -> int:
    """Count the connections of a publisher that have sent no frame, and its inspectors."""
    intake = publisher._intake
    assert intake is not None
    return len(intake._unidentified) + len(intake._inspectors)


def segments_of(publisher: Publisher) -> list[Segment]:
    """Return the segments of a publisher that was opened, the present one first."""
    assert publisher._publishing is not None
    return list(publisher._publishing.memory.segments())


def senders_of(receiver: TensorReceiver) -> Senders:
    """Return the senders of a receiver that was opened."""
    assert receiver._taking is not None
    return receiver._taking.senders


def intake_of(receiver: TensorReceiver) -> Intake[Hello]:
    """Return the connections of a receiver that was opened."""
    assert receiver._taking is not None
    return receiver._taking.intake


def held_by_receiver(receiver: TensorReceiver) -> dict[str, int]:
    """Count the waits, claims and answers of a receiver that are not part of its statistics."""
    senders = senders_of(receiver)
    return {
        "queues of waiters": len(senders.arrivals.waiters),
        "claims": bool(senders.mailbox.claims.by_message),
        "arrivals": len(senders.mailbox._whole),
        "answers": len(senders._answered),
    }


def inspectors_of(receiver: TensorReceiver) -> list[InspectorPeer]:
    """List the inspectors of a receiver, the oldest first."""
    return list(intake_of(receiver)._inspectors)


def listener_of(receiver: TensorReceiver) -> Listener:
    """Return the listener of a receiver that was opened."""
    assert receiver._taking is not None
    return receiver._taking._listener


def keep_socket_file(receiver: TensorReceiver) -> None:
    """Leave the socket file of a receiver behind, as a killed process does."""
    listener = listener_of(receiver)
    if isinstance(listener, UnixListener):
        listener._leave = listener._sock.close


def cut(transport: Transport) -> None:
    """Shut a connection down, as the kernel does when the peer ends.

    Args:
        transport: the transport of either end; between machines, that of the connecting end.
    """
    if isinstance(transport, TcpTransport):
        attempt = getattr(transport._shut, "__self__", None)
        assert isinstance(attempt, _Attempt)
        for descriptor, known in attempt._socket.monitor._connections.items():  # one, or none after its end
            if file_of(descriptor) == known._file:  # otherwise ZeroMQ has closed it
                with copy_of(descriptor) as sock:
                    sock.shutdown(socket.SHUT_RDWR)
    else:
        _over_socket(transport)._sock.shutdown(socket.SHUT_RDWR)


def pause_reading(transport: Transport) -> None:
    """Stop reading from the socket of a transport."""
    asyncio.get_running_loop().remove_reader(_over_socket(transport)._sock.fileno())


def read_next(transport: Transport) -> None:
    """Read from the socket of a transport once."""
    _over_socket(transport).read_now()


def resume_reading(transport: Transport) -> None:
    """Read from the socket of a transport again."""
    end = _over_socket(transport)
    asyncio.get_running_loop().add_reader(end._sock.fileno(), end.read_now)


def shrink_send_buffer(transport: Transport) -> None:
    """Set the smallest send buffer that the kernel allows on the socket of a transport."""
    _over_socket(transport)._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def _over_socket(transport: Transport) -> SocketTransport:
    assert isinstance(transport, SocketTransport)
    return transport


def connections_at(receiver: TensorReceiver) -> int:
    """Count the connections of a receiver, in any role."""
    return len(senders_of(receiver).connected) + unidentified_at(receiver) + len(inspectors_of(receiver))


def unidentified_at(receiver: TensorReceiver) -> int:
    """Count the connections that have sent no frame."""
    return len(intake_of(receiver)._unidentified)
