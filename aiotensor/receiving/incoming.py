"""The senders of a receiver: admit them, open the tensors that they send, and pass these to the mailbox.

The admission of a sender covers its maximum use: its messages in flight and its arena count against the
receiver's limits from its hello on, so that no later frame can exceed them.
"""

import asyncio
import os
from collections.abc import Callable, Sequence

from aiotensor.errors import AioTensorError, PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.frames import (
    MAX_HELLO_BYTES,
    VERSION,
    Account,
    Attach,
    Bye,
    Detach,
    Discard,
    End,
    Hello,
    Look,
    Put,
    SenderRow,
    ToReceiver,
    Welcome,
    decode_to_receiver,
    encode,
)
from aiotensor.protocol.limits import Limits
from aiotensor.protocol.mailbox import Key, Mailbox
from aiotensor.protocol.versions import mismatch
from aiotensor.receiving.answers import Answers
from aiotensor.receiving.arrivals import Arrivals
from aiotensor.receiving.inspectors import Observers, reports
from aiotensor.receiving.mappings import Mappings, Segments
from aiotensor.receiving.refusals import Refusals
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.logs import logger_of
from aiotensor.tensors.autograd import as_leaf
from aiotensor.tensors.placement import ARENA, open_tensor
from aiotensor.transports.base import ReceiverLink
from aiotensor.types import Delivery, ReceiverStatistics, TensorHandle

__all__ = ["MAX_UNIDENTIFIED", "Incoming"]

logger = logger_of("receiver")

# Connections that are not admitted as senders: unidentified ones, and inspectors. A sender of this library
# sends its hello right after it has connected, so the oldest unidentified connection is the least likely to
# be one. Inspectors are closed first: they can ask again.
MAX_UNIDENTIFIED = 64


class _Peer:
    """A connection."""

    def __init__(self, link: ReceiverLink) -> None:
        self.link = link
        self.sender: str | None = None  # None until the sender is admitted
        self.pid = 0  # 0 until the hello
        self.max_messages = 0
        self.segments = Segments(link)


class Incoming:
    """Handle the connections and frames of a receiver's senders; belongs to the event loop's thread.

    Args:
        receiver: the receiver's id.
        limits: the limits for all senders together.
        statistics: called for an inspector; returns None if the receiver was garbage-collected. Connections
            refer to this function, so it must not keep the receiver alive.
    """

    def __init__(
        self,
        receiver: str,
        limits: Limits,
        statistics: Callable[[], ReceiverStatistics | None],
    ) -> None:
        self._receiver = receiver
        self.limits = limits
        self.mailbox: Mailbox[Delivery] = Mailbox()
        self.arrivals = Arrivals(self.mailbox)
        self.mappings = Mappings()
        self.senders_lost = self.senders_refused = 0
        self._wake = self.arrivals.wake
        self._statistics = statistics
        self._observers = Observers()
        self._refusals = Refusals()
        self._unidentified: dict[ReceiverLink, _Peer] = {}  # the oldest first
        self._peers: dict[ReceiverLink, _Peer] = {}
        self._senders: dict[str, _Peer] = {}

    def open(self) -> None:
        """Start in the running loop."""
        # The release of a tensor that was freed right after it was taken is sent together with that answer.
        self.answers = Answers(asyncio.get_running_loop(), self.mappings.collect)
        self.mappings.open(self.answers.released)

    @property
    def senders(self) -> int:
        """Count the connected senders."""
        return len(self._senders)

    @property
    def mapped_bytes(self) -> int:
        """Count the bytes of arenas that are mapped here, or may be."""
        return self.mappings.lingering_bytes + sum(
            peer.segments.arena_bytes for peer in self._senders.values()
        )

    @property
    def promised_messages(self) -> int:
        """Count the messages that connected senders may have unclaimed, and those left by closed senders."""
        return self.mailbox.messages_left + sum(peer.max_messages for peer in self._senders.values())

    def link_of(self, sender: str) -> ReceiverLink | None:
        """Return the link to a sender, if it is connected."""
        peer = self._senders.get(sender)
        return None if peer is None else peer.link

    async def close(self) -> None:
        """Notify every sender, and release their memory; it stays mapped while views of it live.

        Waits until the last frames to the senders are sent, and the memory is unmapped.
        """
        # Observers only see the end of their connection, because they might not read and would delay this.
        peers = [peer for peer in self._peers.values() if peer.link not in self._observers]
        # Before the last frames, which tell the senders which blocks are free.
        self.mailbox.clear()
        self.mappings.collect_all()
        for peer in peers:
            self.answers.goodbye(peer.link)
        self.answers.flush()
        for peer in list(self._peers.values()):
            self._forget(peer)
        try:
            for peer in peers:
                await peer.link.flush()
            await self.mappings.settle()
        finally:
            self.mappings.close()
            self._refusals.close()

    # Events of links

    def link_opened(self, link: ReceiverLink) -> None:
        """Add a connection, and close one if too many are not admitted as senders."""
        self._peers[link] = self._unidentified[link] = _Peer(link)
        if len(self._unidentified) + len(self._observers) > MAX_UNIDENTIFIED:
            oldest = self._observers.oldest
            if oldest is None:
                oldest = next(iter(self._unidentified))
                self.senders_refused += 1
                self._refusals.replaced(oldest.peer_pid, MAX_UNIDENTIFIED)
            self._replace(self._peers[oldest])

    def _replace(self, peer: _Peer) -> None:
        """Close a connection that may be opened again."""
        reason = f"a newer connection replaced it: at most {MAX_UNIDENTIFIED} may be unidentified or inspect"
        peer.link.write(encode(Bye(reason, retry=True)))
        self._forget(peer)
        peer.link.close()

    def record_arrived(
        self, link: ReceiverLink, data: bytes | memoryview, descriptors: Sequence[int]
    ) -> None:
        """Handle a record of frames from a sender."""
        peer = self._peers.get(link)
        if peer is None:
            close_all(descriptors)
            return
        unclaimed = list(descriptors) if descriptors else []
        changed: list[Key] = []
        try:
            max_bytes = MAX_HELLO_BYTES if peer.sender is None else self.limits.frame_bytes
            if len(data) > max_bytes:
                raise ProtocolError(f"it sent a record of more than {max_bytes} bytes")
            for frame in decode_to_receiver(data):
                changed += self._handle(peer, frame, unclaimed)
                if link not in self._peers:
                    break  # it left, or was refused
        except ProtocolError as error:
            self._refusals.protocol_broken(peer.sender, peer.pid or None, str(error))
            # A new error: the traceback of the raised one would keep the record, and mapped memory, while the
            # loss is remembered.
            self._lose(peer, ProtocolError(*error.args))
            link.close()
        finally:
            if changed:
                self._wake(changed)
            if unclaimed:
                close_all(unclaimed)

    def link_lost(self, link: ReceiverLink, reason: str) -> None:
        """Handle the loss of a sender."""
        peer = self._peers.get(link)
        if peer is not None:
            self._lose(peer, PeerLostError(reason))

    def listener_failed(self, error: BaseException) -> None:
        """Fail all waits, since no more records arrive."""
        self.arrivals.fail(error)

    # Frames

    def _handle(self, peer: _Peer, frame: ToReceiver, descriptors: list[int]) -> Sequence[Key]:
        """Process a frame, and return the keys whose waiters are to be woken."""
        sender = peer.sender
        if sender is None:
            return self._hear_stranger(peer, frame)
        match frame:
            case Put():
                return self._file(peer, sender, frame)
            case End():
                return self.mailbox.end(sender, frame.message, frame.count)
            case Discard():
                return self.mailbox.withdraw(sender, frame.message)
            case Attach():
                self._attach(peer, frame, descriptors)
            case Detach():
                self.mappings.detach(peer.segments, frame.segment)
            case Bye():
                keys = self.mailbox.leave(sender)
                self._forget(peer)
                peer.link.close()
                if frame.uses_memory:
                    self._take_over_later(peer)
                else:
                    self.mappings.take_over(peer.segments)
                return keys
            case Account():
                self._observers.answered(peer.link, sender, frame)
            case Hello() | Look():
                raise ProtocolError("it introduced itself twice")
        return ()

    def _hear_stranger(self, peer: _Peer, frame: ToReceiver) -> Sequence[Key]:
        if peer.link in self._observers:
            raise ProtocolError("it looks at this receiver, and may not say anything more")
        match frame:
            case Hello():
                return self._admit(peer, frame)
            case Look():
                self._show(peer, frame)
                return ()
        raise ProtocolError("it sent a frame before it introduced itself")

    def _show(self, peer: _Peer, look: Look) -> None:
        """Send the statistics of the receiver to an inspector, and request those of the senders."""
        logger.debug(
            "process %s looks at this receiver",
            look.pid,
            extra={"event": "receiver_inspected", "peer_pid": look.pid},
        )
        del self._unidentified[peer.link]
        self._observers.add(peer.link)
        self._welcome(peer)
        if look.version != VERSION:
            raise ProtocolError(f"it speaks version {look.version}, this receiver speaks {VERSION}")
        senders = list(self._senders.items())
        rows = [self._row_of(sender, peer) for sender, peer in senders]
        statistics = self._statistics()
        if statistics is None:
            return  # the receiver is about to be closed
        for report in reports(statistics, rows):
            peer.link.write(encode(report))
        if peer.link in self._peers:  # not if writing to it failed
            self._observers.ask(peer.link, [peer.link for _, peer in senders])

    def _row_of(self, sender: str, peer: _Peer) -> SenderRow:
        unclaimed = self.mailbox.unclaimed_of(sender)
        return SenderRow(
            sender,
            peer.pid,
            peer.max_messages,
            peer.segments.arena_bytes,
            unclaimed.tensors,
            unclaimed.nbytes,
            peer.segments.leases,
            peer.segments.leased_bytes,
        )

    def _welcome(self, peer: _Peer, *, is_admitted: bool = False) -> None:
        welcome = Welcome(VERSION, os.getpid(), self.limits.frame_bytes, self._receiver, is_admitted)
        peer.link.write(encode(welcome))

    def _admit(self, peer: _Peer, hello: Hello) -> Sequence[Key]:
        """Admit a sender or refuse it, and send it the result."""
        peer.pid = hello.pid
        if hello.version != VERSION:
            self._turn_away(peer, hello, mismatch(hello.version, VERSION))
            return ()
        earlier = self._senders.get(hello.sender)
        if earlier is not None:  # it has reconnected, and the end of its old connection is still unread
            self._lose(earlier, PeerLostError("it connected again"))
            earlier.link.close()
        exceeded = self.limits.exceeded_by(
            hello, len(self._senders), self.mapped_bytes, self.promised_messages
        )
        if exceeded is not None:
            self._turn_away(peer, hello, exceeded)
            return ()
        keys = self.mailbox.join(hello.sender, hello.pid, hello.max_concurrent_videos, hello.first_message)
        del self._unidentified[peer.link]
        peer.sender = hello.sender
        peer.max_messages = hello.max_concurrent_videos
        peer.segments.arena_bytes = hello.arena_bytes
        self._senders[hello.sender] = peer
        self._welcome(peer, is_admitted=True)
        return keys

    def _turn_away(self, peer: _Peer, hello: Hello, reason: str) -> None:
        """Refuse a sender after its hello, and fail the waits for its tensors."""
        self._welcome(peer)  # first: the two sides may speak different versions
        if peer.link in self._peers:  # not if writing to it failed
            self._refuse(peer, reason, hello.sender, is_refusal=True)
        if hello.sender not in self._senders:
            error = RefusedError(reason, pid=hello.pid)
            self._wake(self.mailbox.lose(hello.sender, error, hello.pid))

    def _attach(self, peer: _Peer, frame: Attach, descriptors: list[int]) -> None:
        if frame.placement != ARENA:
            raise ProtocolError(f"it attached memory for {frame.placement!r}, which is unknown here")
        self.mappings.check(peer.segments, frame.segment, frame.nbytes)
        if not descriptors:
            self._refuse(peer, "its memory did not arrive: no descriptors are left here (ulimit -n)")
            return
        descriptor = descriptors.pop(0)
        try:
            self.mappings.attach(peer.segments, frame.segment, frame.nbytes, descriptor)
        except RefusedError as error:
            self._refuse(peer, str(error), is_refusal=True)
        except OSError as error:
            self._refuse(peer, f"its memory cannot be mapped here: {error}")
        finally:
            close_all([descriptor])

    def _file(self, peer: _Peer, sender: str, put: Put) -> Sequence[Key]:
        """Open a tensor that arrived, and add it to the mailbox."""
        mailbox = self.mailbox
        if not mailbox.expects(sender, put.message):
            self.answers.discarded(peer.link, put.message)
            if put.block is not None:
                self.answers.released(peer.link, put.block)
            return ()
        opened = open_tensor(put.placement, put.payload, put.dtype, put.shape, peer.segments.mapped)
        tensor = opened.tensor
        if put.requires_grad or put.is_parameter:
            tensor = as_leaf(tensor, requires_grad=put.requires_grad, is_parameter=put.is_parameter)
        handle = TensorHandle(sender, put.message, put.tensor, put.dtype, put.shape, put.device)
        key = Key(sender, put.message, put.tensor)
        keys = mailbox.put(key, Delivery(handle, tensor), tensor.nbytes, last=put.last)
        if opened.owner is not None:
            if put.block is None:
                raise ProtocolError("it placed a tensor in a block without a number")
            self.mappings.lease(peer.segments, opened, put.block)
        return keys

    # Ends

    def _refuse(
        self, peer: _Peer, reason: str, newcomer: str | None = None, *, is_refusal: bool = False
    ) -> None:
        """Close a connection with a reason; after a refusal, a retry would fail too."""
        self.senders_refused += 1
        self._refusals.sender_refused(peer.sender or newcomer, peer.pid or None, reason)
        peer.link.write(encode(Bye(reason, is_refusal=is_refusal)))
        error = RefusedError(reason) if is_refusal else PeerLostError(reason)
        self._lose(peer, error, was_refused=True)
        peer.link.close()

    def _lose(self, peer: _Peer, error: AioTensorError, *, was_refused: bool = False) -> None:
        self._forget(peer)
        if peer.sender is not None:
            self.senders_lost += not was_refused
            self._wake(self.mailbox.lose(peer.sender, error))
        self.mappings.collect_all()  # losing the sender has freed its tensors that no task has taken
        self._take_over_later(peer)

    def _take_over_later(self, peer: _Peer) -> None:
        # A sender whose connection broke may be alive, and use its memory.
        pid = peer.link.peer_pid
        self.mappings.take_over_after(peer.segments, peer.pid if pid is None else pid)

    def _forget(self, peer: _Peer) -> None:
        self._peers.pop(peer.link, None)
        self._unidentified.pop(peer.link, None)
        self.answers.forget(peer.link)
        self._observers.forget(peer.link)
        if peer.sender is not None:
            self._senders.pop(peer.sender, None)
        self.mappings.let_go(peer.segments)
