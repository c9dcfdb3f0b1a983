"""The connections of a receiver: identify and admit them, and forget them at their end.

    accepted --first frame--> sender or inspector
       |          |
       |          '-- refused, because of a limit or its version
       '-- replaced by a newer connection

The admission of a sender covers its maximum use: its messages in flight and its arena count against the
receiver's limits from its hello on, so that no later frame can exceed them.
"""

import os
from collections.abc import Callable
from contextlib import suppress

from aiotensor.errors import AioTensorError, PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.admission import AdmissionLimits
from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import (
    MAX_HELLO_BYTES,
    OPENING,
    VERSION,
    Hello,
    Inspect,
    Opening,
    StatisticsReply,
    Welcome,
    decode,
    encode,
)
from aiotensor.protocol.inspector import InspectedConnection
from aiotensor.protocol.mailbox import Mailbox
from aiotensor.protocol.receiver import ReceiverConnection
from aiotensor.receiving.answers import Answers
from aiotensor.receiving.arrivals import Arrivals
from aiotensor.receiving.inspectors import InspectorPeer, Inspectors
from aiotensor.receiving.mappings import Mappings
from aiotensor.receiving.refusals import SenderRefusalLog
from aiotensor.receiving.sender_peer import SenderPeer
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.tensors.arena import segment_bytes
from aiotensor.transports.base import Transport
from aiotensor.types import Delivery, ReceiverStatistics

__all__ = ["MAX_UNIDENTIFIED", "Intake"]

logger = logger_of("receiver")

# Connections that are not admitted as senders: unidentified ones, and inspectors. A sender of this library
# sends its hello right after it has connected, so the oldest unidentified connection is the least likely to
# be one. Inspectors are closed first: they can ask again.
MAX_UNIDENTIFIED = 64


class Unidentified:
    """A connection before its first frame.

    Args:
        transport: the connection.
        intake: the owner.
    """

    def __init__(self, transport: Transport, intake: "Intake") -> None:
        self.transport = transport
        self._intake = intake

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Identify the connection by its first frame."""
        close_all(descriptors)
        self._intake.first_record_received(self, data)

    def connection_lost(self, reason: str) -> None:
        """Forget the connection."""
        self._intake.unidentified_lost(self)

    def resume_writing(self) -> None:
        """Do nothing: only one frame is ever written."""


class Intake:
    """The connections of one receiver; belongs to the running loop.

    Args:
        receiver: the id of the receiver.
        limits: the limits for all senders together.
        counts: counts the senders that are lost or refused.
        statistics: called for an inspector; returns None if the receiver was garbage-collected. Transports
            refer to this function, so it must not keep the receiver alive.

    Attributes:
        mailbox: the tensors that have arrived, by their senders.
        arrivals: the calls that wait for tensors.
        mappings: the memory of senders.
        senders: the connected senders, by their ids.
    """

    def __init__(
        self,
        receiver: str,
        limits: AdmissionLimits,
        counts: dict[str, int],
        statistics: Callable[[], ReceiverStatistics | None],
    ) -> None:
        self.mailbox: Mailbox[Delivery] = Mailbox()
        self.arrivals = Arrivals(self.mailbox)
        self.mappings = Mappings()
        self.senders: dict[str, SenderPeer] = {}
        self._receiver = receiver
        self._limits = limits
        self._counts = counts
        self._statistics = statistics
        # The release of a tensor that was freed right after it was taken is sent together with that answer.
        self._answers = Answers(self.mappings.collect)
        self._inspectors = Inspectors()
        self._refusals = SenderRefusalLog()
        self._unidentified: dict[Unidentified, None] = {}  # the oldest first
        self._writing_resumed = Waiters()

    @property
    def mapped_bytes(self) -> int:
        """The bytes of arenas that are mapped here, or may be."""
        return self.mappings.lingering_bytes + sum(peer.memory.arena_bytes for peer in self.senders.values())

    @property
    def promised_messages(self) -> int:
        """The messages that connected senders may have unclaimed, and those left by closed senders."""
        return self.mailbox.messages_left + sum(peer.max_messages for peer in self.senders.values())

    def read_now(self) -> None:
        """Read a record of each connection immediately, if there is one."""
        transports = [connection.transport for connection in self._unidentified]
        for transport in (*transports, *(peer.transport for peer in self.senders.values())):
            transport.read_now()

    async def close(self) -> None:
        """Notify every sender, and release their memory; it stays mapped while tensors over it live.

        Waits until the last frames to the senders are sent, and the memory is unmapped.
        """
        peers = list(self.senders.values())
        # Before the last frames, which tell the senders which blocks are free.
        self.mailbox.clear()
        self.mappings.collect_all()
        for peer in peers:
            peer.connection.close()
            peer.flush()
        # The others see only the end of their connections: they might not read, and would delay this.
        self._inspectors.close()
        for connection in list(self._unidentified):
            self._drop_unidentified(connection)
        for peer in list(self.senders.values()):
            self._forget(peer)
        try:
            for peer in peers:
                while not (peer.transport.is_writable or peer.transport.is_closed):
                    await self._writing_resumed.wait()
            await self.mappings.settle()
        finally:
            for peer in peers:
                peer.transport.close()
            self.mappings.close()
            self._refusals.close()

    # Unidentified connections

    def connection_accepted(self, transport: Transport) -> None:
        """Add a connection, and close another one if too many are not admitted as senders."""
        connection = Unidentified(transport, self)
        self._unidentified[connection] = None
        transport.start(connection)
        if len(self._unidentified) + len(self._inspectors) > MAX_UNIDENTIFIED:
            self._replace_oldest()

    def listening_failed(self, error: BaseException) -> None:
        """Fail all waits, since no more records arrive."""
        self.arrivals.fail(error)

    def first_record_received(self, connection: Unidentified, data: memoryview) -> None:
        """Identify a connection."""
        try:
            if len(data) > MAX_HELLO_BYTES:
                raise ProtocolError(f"it sent a record of more than {MAX_HELLO_BYTES} bytes")
            [opening] = decode(OPENING, data)
            self._identify(connection, opening)
        except ProtocolError as error:
            self._refusals.protocol_broken(None, None, str(error))
            self._drop_unidentified(connection)

    def unidentified_lost(self, connection: Unidentified) -> None:
        """Forget a connection that has ended before its first frame."""
        self._unidentified.pop(connection, None)

    def _identify(self, connection: Unidentified, opening: Opening) -> None:
        del self._unidentified[connection]
        match opening:
            case Hello():
                self._connect_sender(connection.transport, opening)
            case Inspect():
                self._connect_inspector(connection.transport, opening)

    def _replace_oldest(self) -> None:
        reason = f"a newer connection replaced it: at most {MAX_UNIDENTIFIED} may be unidentified or inspect"
        inspector = self._inspectors.oldest
        if inspector is not None:
            inspector.connection.close(reason, retry=True)
            inspector.flush()
            self.inspector_lost(inspector)
            return
        oldest = next(iter(self._unidentified))
        self._counts["senders_refused"] += 1
        self._refusals.replaced(oldest.transport.peer_pid, MAX_UNIDENTIFIED)
        with suppress(OSError):
            oldest.transport.write(encode(Close(reason, retry=True)))
        self._drop_unidentified(oldest)

    def _drop_unidentified(self, connection: Unidentified) -> None:
        self._unidentified.pop(connection, None)
        connection.transport.close()

    # Inspectors

    def _connect_inspector(self, transport: Transport, inspect: Inspect) -> None:
        """Send the statistics of the receiver to an inspector, and request those of the senders."""
        logger.debug(
            "process %s inspects this receiver",
            inspect.pid,
            extra={"event": "receiver_inspected", "peer_pid": inspect.pid},
        )
        inspector = InspectorPeer(
            transport, InspectedConnection(inspect, self._welcome(is_admitted=False)), self
        )
        self._inspectors.add(inspector)
        transport.start(inspector)
        mismatch = inspector.connection.mismatch
        if mismatch is not None:
            inspector.connection.close(mismatch, is_refusal=True)
            inspector.flush()
            self.inspector_broke_protocol(inspector, ProtocolError(mismatch))
            return
        statistics = self._statistics()
        if statistics is None:
            return  # the receiver is about to be closed
        senders = list(self.senders.values())
        inspector.connection.report(statistics, [sender.summary() for sender in senders])
        inspector.flush()
        if inspector in self._inspectors:  # not if writing to it failed
            self._inspectors.request(inspector, senders)

    def inspector_broke_protocol(self, peer: InspectorPeer, error: ProtocolError) -> None:
        """Close the connection of an inspector that sent another frame."""
        self._refusals.protocol_broken(None, peer.connection.peer_pid, str(error))
        self.inspector_lost(peer)

    def inspector_lost(self, peer: InspectorPeer) -> None:
        """Forget an inspector."""
        self._inspectors.forget(peer)
        peer.transport.close()

    # Senders

    def _welcome(self, *, is_admitted: bool) -> Welcome:
        return Welcome(VERSION, os.getpid(), self._limits.frame_bytes, self._receiver, is_admitted)

    def _connect_sender(self, transport: Transport, hello: Hello) -> None:
        """Admit a sender or refuse it, and send it the result."""
        connection = ReceiverConnection(
            hello, self._welcome(is_admitted=True), segment_bytes(hello.arena_bytes)
        )
        peer = SenderPeer(
            transport, connection, self.mailbox, self.arrivals, self.mappings, self._answers, self
        )
        transport.start(peer)
        refusal = connection.mismatch
        if refusal is None:
            earlier = self.senders.get(hello.sender)
            if earlier is not None:  # it has reconnected, and the end of its old connection is still unread
                self.sender_lost(earlier, PeerLostError("it connected again"))
            refusal = self._limits.exceeded_by(
                hello, len(self.senders), self.mapped_bytes, self.promised_messages
            )
        if refusal is not None:
            self._refuse(peer, refusal, is_refusal=True)
            if hello.sender not in self.senders:
                error = RefusedError(refusal, pid=hello.pid)
                self.arrivals.wake(self.mailbox.lose(hello.sender, error, hello.pid))
            return
        try:
            keys = self.mailbox.join(
                hello.sender, hello.pid, hello.max_concurrent_videos, hello.first_message
            )
        except ProtocolError as error:
            self._refusals.protocol_broken(hello.sender, hello.pid, str(error))
            transport.close()
            return
        self.senders[hello.sender] = peer
        connection.admit()
        peer.flush()
        self.arrivals.wake(keys)

    def statistics_arrived(self, peer: SenderPeer, reply: StatisticsReply) -> None:
        """Forward the statistics of a sender."""
        self._inspectors.forward(peer, reply)

    def writing_resumed(self) -> None:
        """Handle that a transport accepts records again."""
        self._writing_resumed.wake()

    def sender_closed(self, peer: SenderPeer, close: Close) -> None:
        """Keep the whole messages of a sender that closed."""
        keys = self.mailbox.leave(peer.sender)
        self._forget(peer)
        peer.transport.close()
        if close.uses_memory:
            self.mappings.take_over_after(peer.memory, peer.pid)
        else:
            self.mappings.take_over(peer.memory)
        self.arrivals.wake(keys)

    def sender_broke_protocol(self, peer: SenderPeer, error: ProtocolError) -> None:
        """Drop a sender that violated the protocol."""
        hello = peer.connection.hello
        self._refusals.protocol_broken(peer.sender, hello.pid, str(error))
        # A new error: the traceback of the raised one would keep the record, and mapped memory, while the
        # loss is remembered.
        self._lose(peer, ProtocolError(*error.args))

    def memory_refused(self, peer: SenderPeer, reason: str, *, is_refusal: bool) -> None:
        """Drop a sender whose memory cannot be mapped here."""
        self._refuse(peer, reason, is_refusal=is_refusal)

    def sender_unwritable(self, peer: SenderPeer, error: OSError) -> None:
        """Drop a sender to which nothing more can be written."""
        self._refusals.unwritable(peer.sender, str(error))
        self._lose(peer, PeerLostError(f"writing failed: {error}"))

    def sender_lost(self, peer: SenderPeer, error: AioTensorError) -> None:
        """Drop a sender that is gone."""
        self._lose(peer, error)

    def _refuse(self, peer: SenderPeer, reason: str, *, is_refusal: bool) -> None:
        """Close a connection with a reason; after a refusal, a retry would fail too."""
        self._counts["senders_refused"] += 1
        self._refusals.sender_refused(peer.sender, peer.connection.hello.pid, reason)
        peer.connection.refuse(reason, is_refusal=is_refusal)
        peer.flush()
        error = RefusedError(reason) if is_refusal else PeerLostError(reason)
        self._lose(peer, error, was_refused=True)

    def _lose(self, peer: SenderPeer, error: AioTensorError, *, was_refused: bool = False) -> None:
        peer.transport.close()
        if self.senders.get(peer.sender) is not peer:
            self._writing_resumed.wake()
            return  # it was not admitted, or this receiver is closing
        self._forget(peer)
        self._counts["senders_lost"] += not was_refused
        self.arrivals.wake(self.mailbox.lose(peer.sender, error))
        self.mappings.collect_all()  # losing the sender has freed its tensors that no task has taken
        self.mappings.take_over_after(peer.memory, peer.pid)

    def _forget(self, peer: SenderPeer) -> None:
        if self.senders.get(peer.sender) is peer:
            del self.senders[peer.sender]
        self._inspectors.forget_sender(peer)
        self.mappings.sender_gone(peer.memory)
