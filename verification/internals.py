"""The implementations behind public objects, for tests that check what no statistics show.

No other module of the tests uses private attributes of senders and receivers.
"""

import socket

from aiotensor import TensorReceiver, TensorSender
from aiotensor.protocol.blocks import Blocks
from aiotensor.receiving.inspectors import InspectorPeer
from aiotensor.receiving.intake import Intake
from aiotensor.receiving.taking import Taking
from aiotensor.runtime.worker import Worker
from aiotensor.sending.in_flight import MessagesInFlight
from aiotensor.sending.memory import Memory
from aiotensor.sending.session import Session
from aiotensor.transports.base import Listener, Transport
from aiotensor.transports.records import SocketTransport
from aiotensor.transports.unix import UnixListener

__all__ = [
    "awaited_replies",
    "blocks_of",
    "connections_at",
    "cut",
    "inspectors_of",
    "intake_of",
    "keep_socket_file",
    "leases_of",
    "listener_of",
    "memory_of",
    "messages_of",
    "session_of",
    "taking_of",
    "unidentified_at",
    "worker_of",
]


def messages_of(sender: TensorSender) -> MessagesInFlight:
    """Return the messages in flight of a sender that was opened."""
    assert sender._pipeline is not None
    return sender._pipeline.messages


def memory_of(sender: TensorSender) -> Memory:
    """Return the shared memory of a sender that was opened."""
    return messages_of(sender).grants.memory


def blocks_of(sender: TensorSender) -> Blocks:
    """Return the blocks in the current segment of a sender's shared memory."""
    return memory_of(sender)._arena._segment.blocks


def leases_of(sender: TensorSender) -> int:
    """Count the blocks of a sender that a receiver has to release."""
    return len(memory_of(sender)._leases)


def worker_of(owner: TensorSender | TensorReceiver) -> Worker:
    """Return the threads that copy or map memory for a sender or a receiver that was opened."""
    if isinstance(owner, TensorSender):
        return memory_of(owner)._worker
    return intake_of(owner).mappings._worker


def session_of(sender: TensorSender) -> Session:
    """Return the session of a connected sender."""
    session = messages_of(sender).sessions.current
    assert session is not None
    return session


def intake_of(receiver: TensorReceiver) -> Intake:
    """Return the connections of a receiver that was opened."""
    assert receiver._taking is not None
    return receiver._taking.intake


def taking_of(receiver: TensorReceiver) -> Taking:
    """Return the object that takes tensors for a receiver that was opened."""
    assert receiver._taking is not None
    return receiver._taking


def inspectors_of(receiver: TensorReceiver) -> list[InspectorPeer]:
    """List the inspectors of a receiver, the oldest first."""
    return list(intake_of(receiver)._inspectors._inspectors)


def awaited_replies(receiver: TensorReceiver) -> list[set[InspectorPeer]]:
    """List the inspectors that wait for the statistics of each sender."""
    return list(intake_of(receiver)._inspectors._waiting.values())


def listener_of(receiver: TensorReceiver) -> Listener:
    """Return the listener of a receiver that was opened."""
    return taking_of(receiver)._listener


def keep_socket_file(receiver: TensorReceiver) -> None:
    """Let the socket file of a receiver remain after its end, as that of a killed process does."""
    listener = listener_of(receiver)
    if isinstance(listener, UnixListener):
        listener._file._identity = None


def cut(transport: Transport) -> None:
    """Shut a connection down, as the kernel does when the peer ends."""
    found = getattr(transport, "_pipe", transport)
    assert isinstance(found, SocketTransport)
    found._sock.shutdown(socket.SHUT_RDWR)


def connections_at(receiver: TensorReceiver) -> int:
    """Count the connections of a receiver, in any role."""
    return len(intake_of(receiver).senders) + unidentified_at(receiver) + len(inspectors_of(receiver))


def unidentified_at(receiver: TensorReceiver) -> int:
    """Count the connections that have sent no frame."""
    return len(intake_of(receiver)._unidentified)
