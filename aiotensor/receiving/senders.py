"""The senders of a receiver: their admission, the answers to them, and the ends of their connections.

    Hello --admitted--> connected --Close--> closed      its whole messages can still be taken
      |                     |
      |                     '--violation, failed write, end of the connection--> lost, with its messages
      '-- refused, because of a limit or its version

The admission of a sender covers its maximum use: all messages that it may have in flight, and its arena,
count against the receiver's limits from its hello on, so that no later frame can exceed them.
"""

import asyncio

from aiotensor.errors import AioTensorError, PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    Hello,
    Subscribe,
    Welcome,
)
from aiotensor.protocol.mailbox import Mailbox
from aiotensor.protocol.receiver import AdmissionLimits, ReceiverConnection
from aiotensor.receiving.arrivals import Arrivals
from aiotensor.receiving.intake import InspectorPeer
from aiotensor.receiving.mappings import Mappings
from aiotensor.receiving.refusals import SenderRefusalLog
from aiotensor.receiving.sender_peer import SenderPeer
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.statistics.counters import ErrorCounter, snapshot
from aiotensor.tensors.arena import segment_bytes
from aiotensor.transports.base import Transport
from aiotensor.types import Delivery, ReceiverStatistics

__all__ = ["Senders"]

logger = logger_of("receiver")


class Senders:
    """The senders of one receiver, with their tensors and their memory; belongs to the running loop.

    Args:
        limits: the limits for all senders together.
        counts: the counters of the receiver.
        errors: counts the errors of the receiver's calls.

    Attributes:
        connected: the connected senders, by their ids.
        mailbox: the tensors that have arrived.
        arrivals: the calls and iterations that wait for tensors.
        mappings: the memory of the senders.
        refusals: the log of closed connections.
        writing_resumed: the tasks that wait until a transport accepts records again, or is closed.
    """

    def __init__(self, limits: AdmissionLimits, counts: dict[str, int], errors: ErrorCounter) -> None:
        self.connected: dict[str, SenderPeer] = {}
        self.mailbox: Mailbox[Delivery] = Mailbox()
        self.arrivals = Arrivals()
        self.mappings = Mappings()
        self.refusals = SenderRefusalLog()
        self.writing_resumed = Waiters()
        self.counts = counts
        self._limits = limits
        self._errors = errors
        self._loop = asyncio.get_running_loop()
        self._answered: dict[SenderPeer, None] = {}  # with answers to write at the end of this iteration

    @property
    def mapped_bytes(self) -> int:
        """The bytes of shared memory that count against `max_mapped_bytes`.

        These are the arenas of connected senders, and the memory of other senders that tensors still use.
        """
        arenas = sum(peer.memory.arena_bytes for peer in self.connected.values())
        return self.mappings.lingering_bytes + arenas

    @property
    def promised_messages(self) -> int:
        """The number of messages that count against `max_unclaimed_messages`.

        These are the messages that connected senders may have in flight, and those left by closed senders.
        """
        promised = sum(peer.connection.hello.max_concurrent_videos for peer in self.connected.values())
        return self.mailbox.messages_left + promised

    def statistics(self) -> ReceiverStatistics:
        """Return the current usage of the receiver, and its totals since opening."""
        limits, mailbox, mappings = self._limits, self.mailbox, self.mappings
        return snapshot(
            ReceiverStatistics,
            self.counts,
            senders=len(self.connected),
            max_senders=limits.senders,
            waiting=self.arrivals.waiting,
            unclaimed_tensors=mailbox.unclaimed_tensors,
            unclaimed_bytes=mailbox.unclaimed_bytes,
            mapped_bytes=self.mapped_bytes,
            max_mapped_bytes=limits.mapped_bytes,
            promised_messages=self.promised_messages,
            max_unclaimed_messages=limits.unclaimed_messages,
            leases=mappings.leases,
            leased_bytes=mappings.leased_bytes,
            peak_leased_bytes=mappings.peak_leased_bytes,
            messages_discarded=mailbox.messages_discarded,
            errors=self._errors.counts(),
        )

    # Connections; see `Host`

    opening = Hello
    wrong_role = (
        "a TensorReceiver listens at this address, not a Publisher: open the Publisher at another address, "
        "and pass that address to the Subscriber"
    )

    def transports(self) -> list[Transport]:
        """Return the connections of the senders."""
        return [peer.transport for peer in self.connected.values()]

    def report(self, inspector: InspectorPeer) -> None:
        """Send the statistics of the receiver and the summaries of its senders to an inspector."""
        pid = inspector.connection.peer_pid
        logger.debug(
            "process %s inspects this receiver",
            pid,
            extra={"event": "receiver_inspected", "peer_pid": pid},
        )
        senders = [sender.summary() for sender in self.connected.values()]
        inspector.connection.report(self.statistics(), senders)
        inspector.flush()

    def broken(self, pid: int | None, reason: str) -> None:
        """Log that a connection without a role, or an inspector, broke the protocol."""
        self.refusals.broken.add(None, pid, reason)

    def replaced(self, pid: int | None, connections: int) -> None:
        """Log that an unidentified connection is closed, because the number of newer ones is at the limit."""
        self.counts["senders_refused"] += 1
        self.refusals.replaced.add(pid, connections)

    def refused(self, opening: Hello | Subscribe, reason: str) -> None:
        """Log that a peer is refused."""
        self.counts["senders_refused"] += 1
        name = opening.sender if isinstance(opening, Hello) else opening.subscriber
        self.refusals.refused.add(name, opening.pid, reason)

    def listening_failed(self, error: OSError) -> None:
        """End all waits, since no more records arrive."""
        self.arrivals.fail(error)

    def connect(self, transport: Transport, hello: Hello, welcome: Welcome) -> None:
        """Admit or refuse a sender, and send it the result."""
        sender = hello.sender
        connection = ReceiverConnection(hello, welcome, segment_bytes(hello.arena_bytes))
        peer = SenderPeer(transport, connection, self)
        transport.start(peer)
        refusal = connection.mismatch
        if refusal is None:
            earlier = self.connected.get(sender)
            if earlier is not None:  # it has reconnected, and the end of its old connection is still unread
                self.lose(earlier, PeerLostError("the sender connected again"))
            refusal = self._limits.exceeded_by(
                hello, len(self.connected), self.mapped_bytes, self.promised_messages
            )
        if refusal is not None:
            self.refuse(peer, refusal, is_refusal=True)
            if sender not in self.connected:
                error = RefusedError(refusal, pid=hello.pid)
                self.arrivals.wake(self.mailbox.lose(sender, error, hello.pid))
            return
        try:
            keys = self.mailbox.join(sender, hello.pid, hello.max_concurrent_videos, hello.first_message)
        except ProtocolError as error:
            self.refusals.broken.add(sender, hello.pid, str(error))
            transport.close()
            return
        self.connected[sender] = peer
        connection.admit()
        peer.flush()
        self.arrivals.wake(keys)

    def refuse(self, peer: "SenderPeer", reason: str, *, is_refusal: bool) -> None:
        """Close a connection with a reason; `is_refusal` states that a retry would fail, too."""
        self.refused(peer.connection.hello, reason)
        peer.connection.refuse(reason, is_refusal=is_refusal)
        peer.flush()
        error = RefusedError(reason) if is_refusal else PeerLostError(reason)
        self.lose(peer, error, was_refused=True)

    def lose(self, peer: "SenderPeer", error: AioTensorError, *, was_refused: bool = False) -> None:
        """Remove a sender that is gone, and drop all its messages."""
        if self.connected.get(peer.sender) is not peer:
            peer.transport.close()
            self.writing_resumed.wake()
            return  # it was not admitted, or this receiver is closing
        self._forget(peer)
        self.counts["senders_lost"] += not was_refused
        self.arrivals.wake(self.mailbox.lose(peer.sender, error))
        self.mappings.freed.collect_all()  # the mailbox has just freed the tensors of the sender
        self.mappings.take_over_after(peer.memory, peer.watch)
        peer.transport.close()

    def leave(self, peer: "SenderPeer", close: Close) -> None:
        """Remove a sender that has closed, and keep its whole messages."""
        keys = self.mailbox.leave(peer.sender)
        self._forget(peer)
        if close.uses_memory:
            self.mappings.take_over_after(peer.memory, peer.watch)
        else:
            self.mappings.take_over(peer.memory)
        peer.transport.close()
        self.arrivals.wake(keys)

    def schedule_flush(self, peer: "SenderPeer") -> None:
        """Write the answers to a sender at the end of this iteration of the event loop."""
        if not self._answered:
            self._loop.call_soon(self._flush_answers)
            self.mappings.freed.is_scheduled = True  # `_flush_answers` collects the freed items
        self._answered[peer] = None

    async def close(self) -> None:
        """Notify every sender, and release their memory, which stays mapped while tensors over it live.

        Waits until the last frames to the senders are sent, and the memory is unmapped. Cancellation closes
        the connections immediately.
        """
        peers = list(self.connected.values())
        # First, because the last frames report the blocks that this releases.
        self.mailbox.clear()
        self.mappings.freed.collect_all()
        for peer in peers:
            peer.connection.close(Close())
            peer.flush()
            peer.transport.finish()
        for peer in list(self.connected.values()):
            self._forget(peer)
        try:
            for peer in peers:
                while not (peer.transport.is_writable or peer.transport.is_closed):
                    await self.writing_resumed.wait()
            await self.mappings.settle()
        finally:
            for peer in peers:
                peer.transport.close()
            self.mappings.close()
            self.refusals.close()

    def _flush_answers(self) -> None:
        # If a tensor was freed right after it was taken, its `Release` is sent together with the `Taken`.
        freed = self.mappings.freed
        freed.is_scheduled = False
        try:
            if freed.items:
                freed.collect()
        finally:  # even after an error, since no flush is scheduled while unsent answers remain
            answered, self._answered = self._answered, {}
            for peer in answered:
                peer.flush()

    def _forget(self, peer: "SenderPeer") -> None:
        del self.connected[peer.sender]
        self.mappings.peer_gone(peer.memory)
