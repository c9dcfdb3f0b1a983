"""One sender of a receiver: passes frames between its connection object, the mailbox and the mappings."""

from collections.abc import Callable, Sequence
from typing import Protocol

from aiotensor.errors import AioTensorError, PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import Attach, Begin, Discard, End, Put, SenderSummary
from aiotensor.protocol.mailbox import Key, Mailbox
from aiotensor.protocol.receiver import ReceiverConnection
from aiotensor.receiving.arrivals import Arrivals
from aiotensor.receiving.mappings import Mappings, PeerMemory
from aiotensor.receiving.refusals import SenderRefusalLog
from aiotensor.runtime import tracing
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.process_end import ProcessEnd
from aiotensor.runtime.waiting import Waiters
from aiotensor.transports.base import Transport
from aiotensor.types import Delivery, TensorHandle

__all__ = ["SenderPeer"]


class PeerHost(Protocol):
    """The owner of the peers, which `Senders` implements; see there for the attributes."""

    mailbox: Mailbox[Delivery]
    arrivals: Arrivals
    mappings: Mappings
    refusals: SenderRefusalLog
    writing_resumed: Waiters

    def schedule_flush(self, peer: "SenderPeer") -> None:
        """Write the answers to a sender at the end of this iteration of the event loop."""

    def refuse(self, peer: "SenderPeer", reason: str, *, is_refusal: bool) -> None:
        """Close a connection with a reason; `is_refusal` states that a retry would fail, too."""

    def lose(self, peer: "SenderPeer", error: AioTensorError) -> None:
        """Remove a sender that is gone, and drop all its messages."""

    def leave(self, peer: "SenderPeer", close: Close) -> None:
        """Remove a sender that has closed, and keep its whole messages."""


class SenderPeer:
    """Handle the frames of one sender, and answer them.

    Args:
        transport: the transport of the connection.
        connection: the connection object.
        host: the owner of this object.

    Attributes:
        sender: the id of the sender.
        memory: the segments of the sender.
    """

    def __init__(self, transport: Transport, connection: ReceiverConnection, host: PeerHost) -> None:
        self.transport = transport
        self.connection = connection
        self.sender = connection.hello.sender
        self.memory = PeerMemory(connection.hello.arena_bytes, self._release)
        self._host = host
        self._mailbox = host.mailbox

    def watch(self, ended: Callable[[], object]) -> ProcessEnd:
        """Call a function once the process of the sender has ended."""
        return self.transport.watch_peer(ended)

    def summary(self) -> SenderSummary:
        """Return the summary of the sender that a receiver sends to inspectors."""
        hello = self.connection.hello
        return SenderSummary(
            self.sender,
            hello.pid,
            hello.max_concurrent_videos,
            hello.arena_bytes,
            self.connection.messages,
            self.connection.in_flight,
            *self._mailbox.unclaimed_of(self.sender),
            self.memory.leases,
            self.memory.leased_bytes,
        )

    # Answers

    def discard(self, message: int) -> None:
        """Return the permit of a message that no call will take, if the message has begun and not ended."""
        self.connection.discard(message)
        self._host.schedule_flush(self)

    def flush(self) -> None:
        """Write the pending frames now; the sender is lost if that fails."""
        try:
            for record in self.connection.data_to_send():
                self.transport.write(record)
        except OSError as error:
            self._host.refusals.unwritable.add(self.sender, str(error))
            self._host.lose(self, PeerLostError(f"writing failed: {error}"))

    def _release(self, block: int) -> None:
        self.connection.release(block)
        self._host.schedule_flush(self)

    # Events of the transport

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Handle the frames of a record."""
        keys: list[Key] = []
        try:
            for frame in self.connection.receive(data):
                match frame:
                    case Put():
                        keys += self._store(frame)
                    case Begin():
                        if not self._mailbox.wants(self.sender, frame.message):
                            self.discard(frame.message)
                    case End():
                        keys += self._mailbox.end(self.sender, frame.message)
                    case Discard():
                        keys += self._mailbox.discard(self.sender, frame.message)
                    case Attach():
                        self._attach(frame, descriptors)
                    case Close():
                        self._host.leave(self, frame)
                if self.transport.is_closed:
                    break
        except ProtocolError as error:
            self._violated(error)
        finally:
            if keys:
                self._host.arrivals.wake(keys)
            if descriptors:
                close_all(descriptors)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """Handle the end of the connection: the sender is lost."""
        if isinstance(reason, ProtocolError):
            self._violated(reason)
        else:
            self._host.lose(self, PeerLostError(reason))

    def resume_writing(self) -> None:
        """Wake the tasks that wait until the transport accepts records again."""
        self._host.writing_resumed.wake()

    def _violated(self, error: ProtocolError) -> None:
        """End the connection because the sender broke the protocol."""
        self._host.refusals.broken.add(self.sender, self.connection.hello.pid, str(error))
        # A new error, because the mailbox keeps the error of a lost sender: the traceback of the raised one
        # would keep the record and mapped memory alive.
        self._host.lose(self, ProtocolError(*error.args))

    def _store(self, put: Put) -> Sequence[Key]:
        """Open and store a tensor; return the keys of the tensors whose waiting calls must be woken."""
        mailbox, sender = self._mailbox, self.sender
        if not mailbox.wants(sender, put.message):
            self.discard(put.message)
            if put.block is not None:
                self._release(put.block)
            return ()
        tensor = self._host.mappings.open(self.memory, put)
        trace = None
        if put.trace is not None and (tracer := tracing.tracer) is not None:
            trace = tracer.arrived(put.trace)
        handle = TensorHandle(sender, put.message, put.tensor, put.dtype, put.shape, put.device)
        key = Key(sender, put.message, put.tensor)
        return mailbox.put(key, Delivery(handle, tensor, 1, trace), tensor.nbytes, last=put.last)

    def _attach(self, attach: Attach, descriptors: list[int]) -> None:
        try:
            self._host.mappings.attach(self.memory, attach, self.transport.mover, descriptors)
        except RefusedError as error:
            self._host.refuse(self, str(error), is_refusal=True)
        except OSError as error:
            reason = f"its memory cannot be mapped into this process: {error}"
            self._host.refuse(self, reason, is_refusal=False)
