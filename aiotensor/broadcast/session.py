"""One connection of a subscriber to a publisher: the transport, and the rules of the protocol on it.

A session begins when the transport connects, and ends when the connection ends. Its publications outlive it:
their memory stays mapped until the application has taken them.
"""

import asyncio
from typing import Protocol

from aiotensor.errors import PeerLostError, ProtocolError, RefusedError
from aiotensor.protocol.broadcast import Admit, Detach, Publish
from aiotensor.protocol.connection import Close, Loss
from aiotensor.protocol.frames import Attach, Discard, Subscribe
from aiotensor.protocol.subscriber import SubscriberConnection
from aiotensor.receiving.mappings import Mappings, PeerMemory
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.logs import logger_of
from aiotensor.transports.base import Transport

__all__ = ["Session", "SessionEvents"]

logger = logger_of("subscriber")

# The maximum number of records read before a publication is taken. Each takes a few microseconds.
_MAX_PENDING_RECORDS = 256


class SessionEvents(Protocol):
    """The callbacks of a session."""

    def admitted(self, session: "Session") -> None:
        """Called when the publisher has admitted this subscriber."""

    def arrived(self, session: "Session", publish: Publish) -> None:
        """Called when a publication has arrived."""

    def withdrawn(self, session: "Session", number: int) -> None:
        """Called when the publisher withdraws a publication, which may already have been taken."""

    def ended(self, session: "Session", loss: Loss) -> None:
        """Called when the session has ended."""

    def writing_resumed(self) -> None:
        """Called when the transport accepts records again."""


class Session:
    """Receive and answer the publications of one connection.

    Args:
        subscribe: the first frame.
        transport: this end of the connection.
        mappings: maps the memory of the publisher.
        max_mapped_bytes: the limit on the arena of the publisher in bytes; None for no limit.
        events: the object that is notified.

    Attributes:
        publications: the number of publications that the application has not taken completely.
        is_over: whether the session has ended.
        publisher: the id of the publisher; "" until it has admitted this subscriber.
        first: the number of the first publication that the publisher may send, over this connection or over
            an earlier one.
        drops: whether the publisher may withdraw publications.

    Raises:
        OSError: the first record could not be written.
    """

    def __init__(
        self,
        subscribe: Subscribe,
        transport: Transport,
        mappings: Mappings,
        max_mapped_bytes: int | None,
        events: SessionEvents,
    ) -> None:
        self.transport = transport
        self.connection = SubscriberConnection(subscribe)
        self.memory = PeerMemory(0, self._release)
        self.publications = 0
        self.is_over = False
        self.publisher = ""
        self.first = 0
        self.drops = False
        self._records = 0  # the number of received records
        self._subscriber = subscribe.subscriber
        self._mappings = mappings
        self._max_mapped_bytes = max_mapped_bytes
        self._events = events
        self._loop = asyncio.get_running_loop()
        self._is_flush_scheduled = False
        transport.start(self)
        for record in self.connection.data_to_send():
            transport.write(record)

    # Answers

    def taken(self, number: int) -> None:
        """Answer that the application takes a publication; freeing its tensors releases its blocks."""
        self.connection.taken(number)
        self._schedule_flush()

    def dropped(self, number: int) -> None:
        """Answer that the application will not take a publication."""
        self.connection.dropped(number)
        self.finished()
        self._schedule_flush()

    def finished(self) -> None:
        """Forget a publication; after the last one of an ended session, release its memory."""
        self.publications -= 1
        if self.is_over and not self.publications:
            self._mappings.peer_gone(self.memory)

    def read_withdrawals(self) -> None:
        """Read the pending records of a publisher that drops publications.

        If the application has blocked its event loop, it then takes the newest publications, because
        publications that the publisher has dropped in the meantime are withdrawn first.
        """
        for _ in range(_MAX_PENDING_RECORDS):
            before = self._records
            if not self.is_over:
                self.transport.read_now()
            if self._records == before:
                return

    def violated(self, error: ProtocolError) -> None:
        """End the session, because the publisher broke the protocol."""
        if self.is_over:
            return
        pid = self.connection.peer_pid
        logger.error(
            "the publisher (pid %s) broke the protocol: %s",
            pid,
            error,
            extra={
                "event": "protocol_broken",
                "subscriber_id": self._subscriber,
                "peer_pid": pid,
                "reason": str(error),
            },
        )
        self._end(self.connection.violated(error))

    def close(self) -> None:
        """Send a `Close`, and write no more records."""
        self.connection.close(Close())
        self.flush()
        self.transport.finish()

    def abort(self) -> None:
        """Close the connection without waiting, and release the memory that no tensor uses."""
        self.transport.close()
        if not self.is_over:
            self.is_over = True
            self._mappings.peer_gone(self.memory)

    def flush(self) -> None:
        """Write the pending frames now."""
        try:
            for record in self.connection.data_to_send():
                self.transport.write(record)
        except OSError as error:
            self._end(self.connection.lost(f"writing to it failed: {error}", is_retried=True))

    def _release(self, block: int) -> None:
        self.connection.release(block)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._is_flush_scheduled and not self.is_over:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._iteration_ended)

    def _iteration_ended(self) -> None:
        self._is_flush_scheduled = False
        if not self.is_over:
            # If a tensor was freed right after it was taken, its `Release` is sent together with the `Taken`.
            self._mappings.freed.collect()
            self.flush()

    # Events of the transport

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Process the frames of a record."""
        self._records += 1
        try:
            for frame in self.connection.receive(data):
                match frame:
                    case Publish():
                        self.publications += 1
                        self._events.arrived(self, frame)
                    case Discard():
                        self._events.withdrawn(self, frame.message)
                    case Attach():
                        self._attach(frame, descriptors)
                    case Detach():
                        self._detach(frame.segment)
                    case Admit():
                        self._admit(frame)
                    case Close():
                        self._end(self.connection.closed(frame))
                if self.is_over:
                    break
        except RefusedError as error:
            self._end(Loss(error, is_retried=False))
        except ProtocolError as error:
            self.violated(error)
        finally:
            if descriptors:
                close_all(descriptors)

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """End the session, because its connection has ended."""
        if isinstance(reason, ProtocolError):
            self.violated(reason)
        else:
            self._end(self.connection.lost(reason, is_retried=True))

    def resume_writing(self) -> None:
        """Report that the transport accepts records again."""
        self._events.writing_resumed()

    def _admit(self, limits: Admit) -> None:
        limit = self._max_mapped_bytes
        if limit is not None and limits.arena_bytes > limit:
            self._refuse(
                f"its arena has {limits.arena_bytes} bytes, more than max_mapped_bytes={limit} of the "
                "subscriber: raise max_mapped_bytes, or lower arena_bytes of the publisher",
                is_refusal=True,
            )
            return
        self.memory.arena_bytes = limits.arena_bytes
        self.first = limits.next
        self.drops = limits.drops
        self.publisher = self.connection.publisher_id or ""
        self._events.admitted(self)

    def _attach(self, attach: Attach, descriptors: list[int]) -> None:
        try:
            self._mappings.attach(self.memory, attach, self.transport.mover, descriptors)
        except RefusedError as error:
            self._refuse(str(error), is_refusal=True)
        except OSError as error:
            self._refuse(f"its memory cannot be mapped into this process: {error}")

    def _detach(self, segment: int) -> None:
        if self.transport.mover is not None:
            self.transport.mover.land(segment, None)
        self._mappings.detach(self.memory, segment)

    def _refuse(self, reason: str, *, is_refusal: bool = False) -> None:
        """Close the connection to a publisher whose memory cannot be used here."""
        pid = self.connection.peer_pid
        self.connection.close(Close(reason))
        self.flush()
        text = f"this subscriber cannot use the publisher (pid {pid}): {reason}"
        error = RefusedError(text, pid=pid) if is_refusal else PeerLostError(text, pid=pid)
        self._end(Loss(error, is_retried=False, reason=reason))

    def _end(self, loss: Loss) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._mappings.take_over_after(self.memory, self.transport.watch_peer)
        self.transport.close()
        self.memory.release = None
        if not self.publications:
            self._mappings.peer_gone(self.memory)
        self._events.ended(self, loss)
