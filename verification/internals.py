"""Internal state of open senders and receivers, which no statistics contain.

Tests use private attributes of senders and receivers only through these functions.
"""

import asyncio
import os
import socket
from typing import Any

from aiotensor import TensorReceiver, TensorSender
from aiotensor.broadcast import Publisher, Subscriber
from aiotensor.broadcast.subscriber import _ArrivedPublication, _Publisher
from aiotensor.link.admission import Admission, _Inspector
from aiotensor.memory import mapping
from aiotensor.memory.gates import Gate
from aiotensor.memory.mappings import Mappings
from aiotensor.memory.memory import Memory
from aiotensor.memory.tensors import Watch
from aiotensor.protocol.audience import Backlog
from aiotensor.protocol.credits import Budget
from aiotensor.ranks import RankPipe
from aiotensor.receiver import _Sender
from aiotensor.runtime.affinity import FreedItems
from aiotensor.runtime.descriptors import copy_of, file_of
from aiotensor.runtime.worker import Worker
from aiotensor.sender import SentMessage, _Receiver
from aiotensor.transports.base import Listener, Transport
from aiotensor.transports.records import SocketTransport
from aiotensor.transports.tcp.connector import _Attempt
from aiotensor.transports.tcp.transport import TcpTransport
from aiotensor.transports.unix import UnixListener


def open_pagemap() -> None:
    """Open the file that stays open from the first forwarded or copied page on."""
    mapping._pagemap_of(os.getpid())


def permits_of(sender: TensorSender) -> Budget[None]:
    """Return the permits of a sender."""
    return sender._permits


def begin_posted(sender: TensorSender) -> SentMessage:
    """Begin a posted message of several tensors."""
    return sender._begin_nowait(0)


def memory_of(owner: TensorSender | Publisher) -> Memory:
    """Return the shared memory of a sender or publisher that was opened."""
    return owner._memory


def held_by_sender(sender: TensorSender) -> dict[str, int]:
    """Count the waits, holders and messages of a sender that are not part of its statistics."""
    session, memory = sender._session, sender._memory
    gates: list[Gate[Any]] = [sender._permits, memory.gate]
    return {
        "waiters at the gates": sum(len(gate._waits) for gate in gates),
        "holders at the gates": sum(len(gate.held) for gate in gates),
        "blocks whose sends wait": len(sender._await_permits) + len(sender._await_bytes),
        "copies": len(memory._copies) + jobs_of(worker_of(memory)),
        "announced messages": 0 if session is None else len(session.announced),
        "pins of the receiver": 0 if session is None else len(session.pins),
        "waiters for a receiver": len(sender._changes),
        "messages that are copied": len(sender._copying),
        "waiters for ends": len(sender._ends),
    }


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
            return owner._mappings._worker
        case TensorReceiver():
            return mappings_of(owner)._worker


def jobs_of(worker: Worker) -> int:
    """Count the jobs of a worker that have not ended."""
    return worker._running


def lanes_of(worker: Worker) -> tuple[Any, Any]:
    """Return the thread for short jobs, and the one for long jobs."""
    return worker._short, worker._long


def session_of(sender: TensorSender) -> _Receiver:
    """Return the session of a connected sender."""
    session = sender._session
    assert session is not None
    return session


def backlogs_of(publisher: Publisher) -> list[Backlog]:
    """Return the backlogs of the subscribers of a publisher that was opened."""
    return list(publisher._audience.backlogs.values())


def held_by_publisher(publisher: Publisher) -> dict[str, int]:
    """Count what a publisher holds and does not report."""
    return {
        "turns": publisher._turns.in_use,
        "pinned blocks": len(publisher._memory.blocks),
        "departures": len(publisher._memory._departures),
        "calls that wait for subscribers": len(publisher._changes),
    }


def held_by_pipe(pipe: RankPipe) -> dict[str, int]:
    """Count what an end of a pipe holds and does not report."""
    connection = None if pipe._session is None else pipe._session.connection
    return {
        "pinned blocks": len(pipe._memory.blocks),
        "bytes of the arena": pipe._memory.gate.in_use,
        "calls that wait for changes": len(pipe._changes),
        "answers that are due": 0 if connection is None else connection.in_flight,
    }


def publisher_of(subscriber: Subscriber[Any]) -> str:
    """Return the id of the publisher to which a subscriber is connected; "" if there is none."""
    session = session_of_subscriber(subscriber)
    return "" if session is None or session.is_over else session.publisher


def transports_between(publisher: Publisher, subscriber: Subscriber[Any]) -> tuple[Transport, Transport]:
    """Return the transport of a connected subscriber at its publisher, and its own."""
    session = session_of_subscriber(subscriber)
    assert session is not None
    return publisher._subscribers[subscriber.id].transport, session.transport


def session_of_subscriber(subscriber: Subscriber[Any]) -> _Publisher | None:
    """Return the latest session of a subscriber that was opened."""
    return subscriber._session


def has_ended(subscriber: Subscriber[Any]) -> bool:
    """Return whether the end of a session is still to be reported, or no publisher is searched for."""
    is_queued = any(not isinstance(item, _ArrivedPublication) for item in subscriber._inbox)
    return is_queued or subscriber._failure is not None


def unidentified_at_publisher(publisher: Publisher) -> int:
    """Count the connections of a publisher that have sent no frame, and its inspectors."""
    admission = publisher._admission
    return len(admission._unidentified) + len(admission._inspectors)


def freed_of(pipe: RankPipe) -> FreedItems[Watch]:
    """Return the freed tensors of a pipe whose blocks have not been released yet."""
    return pipe._mappings.freed


def lost_bytes_of(publisher: Publisher) -> int:
    """Return the bytes that only lost subscribers may still read, whose processes live on."""
    return publisher._memory._arena.lost_bytes


def senders_of(receiver: TensorReceiver) -> dict[str, _Sender]:
    """Return the connected senders of a receiver, by their ids."""
    return receiver._senders


def mappings_of(receiver: TensorReceiver) -> Mappings:
    """Return the memory that a receiver has mapped."""
    return receiver._mappings


def admission_of(receiver: TensorReceiver) -> Admission:
    """Return the connections of a receiver that belong to no sender."""
    return receiver._admission


def held_by_receiver(receiver: TensorReceiver) -> dict[str, int]:
    """Count the waits, claims and messages of a receiver that are not part of its statistics."""
    return {
        "keys of waiting calls": len(receiver._calls),
        "claims": bool(receiver._mailbox.claims.by_message),
        "whole messages": len(receiver._mailbox._whole),
        "messages in flight": sum(sender.connection.in_flight for sender in senders_of(receiver).values()),
    }


def inspectors_of(receiver: TensorReceiver) -> list[_Inspector]:
    """List the inspectors of a receiver, the oldest first."""
    return list(admission_of(receiver)._inspectors)


def listener_of(receiver: TensorReceiver) -> Listener:
    """Return the listener of a receiver that was opened."""
    assert receiver._listener is not None
    return receiver._listener


def keep_socket_file(receiver: TensorReceiver) -> None:
    """Leave the socket file of a receiver behind, as a killed process does."""
    listener = listener_of(receiver)
    if isinstance(listener, UnixListener):
        listener._file = None


def cut(transport: Transport) -> None:
    """Shut a connection down, as the kernel does when the peer ends.

    Args:
        transport: the transport of either end; between machines, that of the connecting end.
    """
    if isinstance(transport, TcpTransport):
        attempt = getattr(transport._shut, "__self__", None)
        assert isinstance(attempt, _Attempt)
        for descriptor, known in attempt._connections.items():  # one, or none after its end
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
    return len(senders_of(receiver)) + unidentified_at(receiver) + len(inspectors_of(receiver))


def unidentified_at(receiver: TensorReceiver) -> int:
    """Count the connections that have sent no frame."""
    return len(admission_of(receiver)._unidentified)
