"""One sender of a receiver: its transport, the rules of the protocol, its memory, and its tensors."""

from collections.abc import Sequence
from typing import Protocol

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import Attach, Discard, End, Put, SenderSummary, StatisticsReply
from aiotensor.protocol.mailbox import Key, Mailbox
from aiotensor.protocol.receiver import ReceiverConnection
from aiotensor.receiving.answers import Answers
from aiotensor.receiving.arrivals import Arrivals
from aiotensor.receiving.mappings import Mappings, SenderMemory
from aiotensor.runtime.descriptors import close_all
from aiotensor.tensors.autograd import as_leaf
from aiotensor.tensors.placement import open_tensor
from aiotensor.transports.base import Transport
from aiotensor.types import Delivery, TensorHandle

__all__ = ["SenderPeer", "SenderPeerEvents"]


class SenderPeerEvents(Protocol):
    """The callbacks of a sender's connection."""

    def statistics_arrived(self, peer: "SenderPeer", reply: StatisticsReply) -> None:
        """Forward the statistics of a sender."""

    def sender_closed(self, peer: "SenderPeer", close: Close) -> None:
        """Handle the last frame of a sender."""

    def sender_broke_protocol(self, peer: "SenderPeer", error: ProtocolError) -> None:
        """Handle a sender that violated the protocol."""

    def memory_refused(self, peer: "SenderPeer", reason: str, *, is_refusal: bool) -> None:
        """Handle memory of a sender that cannot be mapped here; see `Close` for `is_refusal`."""

    def sender_lost(self, peer: "SenderPeer", error: PeerLostError) -> None:
        """Handle a sender that is gone."""

    def sender_unwritable(self, peer: "SenderPeer", error: OSError) -> None:
        """Handle a sender to which nothing more can be written."""

    def writing_resumed(self) -> None:
        """Handle that a transport accepts records again."""


class SenderPeer:
    """Handle the frames of one sender, and answer them.

    Args:
        transport: the connection.
        connection: the rules of the protocol on it.
        mailbox: stores the tensors that arrive.
        arrivals: wakes the calls that wait for tensors.
        mappings: maps the memory of the sender.
        answers: writes the answers at the end of an iteration.
        events: the object that is notified.
    """

    def __init__(
        self,
        transport: Transport,
        connection: ReceiverConnection,
        mailbox: Mailbox[Delivery],
        arrivals: Arrivals,
        mappings: Mappings,
        answers: Answers,
        events: SenderPeerEvents,
    ) -> None:
        hello = connection.hello
        self.transport = transport
        self.connection = connection
        self.sender = hello.sender
        self.memory = SenderMemory(hello.arena_bytes, self._release)
        self._mailbox = mailbox
        self._arrivals = arrivals
        self._mappings = mappings
        self._answers = answers
        self._events = events

    @property
    def max_messages(self) -> int:
        """The limit of messages in flight, as the sender stated it."""
        return self.connection.hello.max_concurrent_videos

    @property
    def pid(self) -> int:
        """The process id of the sender according to the kernel, or else as the sender stated it."""
        pid = self.transport.peer_pid
        return self.connection.hello.pid if pid is None else pid

    def summary(self) -> SenderSummary:
        """Return what this receiver knows of the sender."""
        hello, unclaimed = self.connection.hello, self._mailbox.unclaimed_of(self.sender)
        return SenderSummary(
            self.sender,
            hello.pid,
            hello.max_concurrent_videos,
            hello.arena_bytes,
            unclaimed.tensors,
            unclaimed.nbytes,
            self.memory.leases,
            self.memory.leased_bytes,
        )

    # Answers

    def taken(self, message: int) -> None:
        """Return the permit of a message whose tensors were all taken."""
        self.connection.taken(message)
        self._answers.schedule(self)

    def discard(self, message: int) -> None:
        """Return the permit of a message that no task will take."""
        self.connection.discard(message)
        self._answers.schedule(self)

    def request_statistics(self) -> None:
        """Request the statistics of the sender, unless a request is pending."""
        if self.connection.request_statistics():
            self.flush()

    def flush(self) -> None:
        """Write the pending frames now."""
        try:
            for record in self.connection.data_to_send():
                self.transport.write(record)
        except OSError as error:
            self._events.sender_unwritable(self, error)

    def _release(self, block: int) -> None:
        self.connection.release(block)
        self._answers.schedule(self)

    # Events of the transport

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Handle the frames of a record."""
        keys: list[Key] = []
        try:
            for frame in self.connection.receive(data):
                match frame:
                    case Put():
                        keys += self._store(frame)
                    case End():
                        keys += self._mailbox.end(self.sender, frame.message)
                    case Discard():
                        keys += self._mailbox.discard(self.sender, frame.message)[1]
                    case Attach():
                        self._attach(frame, descriptors)
                    case StatisticsReply():
                        self._events.statistics_arrived(self, frame)
                    case Close():
                        self._events.sender_closed(self, frame)
                if self.transport.is_closed:
                    break
        except ProtocolError as error:
            self._events.sender_broke_protocol(self, error)
        finally:
            if keys:
                self._arrivals.wake(keys)
            if descriptors:
                close_all(descriptors)

    def connection_lost(self, reason: str) -> None:
        """Handle a sender that is gone."""
        self._events.sender_lost(self, PeerLostError(reason))

    def resume_writing(self) -> None:
        """Handle that the transport accepts records again."""
        self._events.writing_resumed()

    def _store(self, put: Put) -> Sequence[Key]:
        """Open a tensor that arrived, and store it; return the keys whose waiters are to be woken."""
        mailbox, sender = self._mailbox, self.sender
        if not mailbox.wants(sender, put.message):
            self.discard(put.message)
            if put.block is not None:
                self._release(put.block)
            return ()
        arrived = open_tensor(put.placement, put.payload, put.dtype, put.shape, self.memory.mapped)
        tensor = arrived.tensor
        if put.requires_grad or put.is_parameter:
            tensor = as_leaf(tensor, requires_grad=put.requires_grad, is_parameter=put.is_parameter)
        handle = TensorHandle(sender, put.message, put.tensor, put.dtype, put.shape, put.device)
        key = Key(sender, put.message, put.tensor)
        keys = mailbox.put(key, Delivery(handle, tensor), tensor.nbytes, last=put.last)
        if arrived.owner is not None:
            if put.block is None:
                raise ProtocolError("it placed a tensor in a block without a number")
            self._mappings.lease(self.memory, arrived, put.block)
        return keys

    def _attach(self, attach: Attach, descriptors: list[int]) -> None:
        if not descriptors:
            reason = "its memory did not arrive: no descriptors are left here (ulimit -n)"
            self._events.memory_refused(self, reason, is_refusal=False)
            return
        try:
            self._mappings.attach(self.memory, attach.segment, attach.nbytes, descriptors[0])
        except RefusedError as error:
            self._events.memory_refused(self, str(error), is_refusal=True)
        except OSError as error:
            reason = f"its memory cannot be mapped here: {error}"
            self._events.memory_refused(self, reason, is_refusal=False)
        finally:
            close_all([descriptors.pop(0)])
