"""The open connection of a pipe: passes frames between the rules of the protocol and the two directions."""

import asyncio
import logging
from functools import partial

from msgspec.structs import replace

from aiotensor.errors import AioTensorError, ClosedError, PeerLostError, ProtocolError, RefusedError, again
from aiotensor.protocol.connection import Close, Loss
from aiotensor.protocol.frames import OUT_OF_BAND, Attach, Put, Release, Taken
from aiotensor.protocol.ranks import FromRank, PutNone, RankConnection
from aiotensor.ranks.incoming import Incoming
from aiotensor.ranks.outgoing import Outgoing
from aiotensor.ranks.settings import PipeSettings
from aiotensor.ranks.writer import Writer
from aiotensor.receiving.mappings import Mappings
from aiotensor.runtime.descriptors import close_all
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.statistics.counters import ErrorCounter, snapshot
from aiotensor.transports.base import MAX_UNREAD_BYTES, Transport
from aiotensor.types import PipeStatistics

__all__ = ["Session"]

logger = logger_of("ranks")

# A call waits for `max_bytes`, but not until the peer reads. In the queue of the transport, a message takes
# less than twice the bytes that it counts for, and an answer takes less than the bytes of its message.
_MESSAGES_AND_ANSWERS = 3


class Session:
    """Exchange messages with the other rank over one connection; belongs to the running loop.

    Args:
        transport: the connection.
        connection: the connection object of this end, after the `Join` of the peer.
        settings: the limits.
        counts: the counters of the pipe.
        errors: counts the errors of the calls of the pipe.
        label: the name of the pipe in the log.

    Attributes:
        outgoing: the messages to the peer.
        incoming: the messages of the peer.
    """

    def __init__(
        self,
        transport: Transport,
        connection: RankConnection,
        settings: PipeSettings,
        counts: dict[str, int],
        errors: ErrorCounter,
        label: str,
    ) -> None:
        self._transport = transport
        self._connection = connection
        self._counts = counts
        self._errors = errors
        self._label = label
        self._loop = asyncio.get_running_loop()
        self._is_over = False  # the peer is gone, or this end was closed
        self._writing = Waiters()  # in which `close` waits for the transport
        self._mappings = Mappings()
        self._writer = Writer(transport, connection, self._mappings.freed.collect, self._writing_failed)
        self.outgoing = Outgoing(self._writer, settings, counts, label)
        self.incoming = Incoming(settings, counts, self._mappings, self._writer)
        transport.limit_queue(_MESSAGES_AND_ANSWERS * settings.max_bytes + MAX_UNREAD_BYTES)
        transport.start(self)
        if transport.mover is not None:
            transport.mover.receive_data(self._data_received)

    @property
    def peer_pid(self) -> int | None:
        """The process id that the peer has stated."""
        return self._connection.peer_pid

    def statistics(self) -> PipeStatistics:
        """Return the current usage, and the totals since opening."""
        outgoing, incoming, mappings = self.outgoing, self.incoming, self._mappings
        budget = outgoing.gate.budget
        return snapshot(
            PipeStatistics,
            self._counts,
            connected=int(not self._is_over),
            in_flight=outgoing.in_flight,
            max_bytes=budget.limit,
            bytes_in_flight=budget.in_use,
            peak_bytes_in_flight=budget.peak,
            waiting_sends=budget.waiting,
            longest_wait_s=outgoing.gate.longest_wait_s(self._loop.time()),
            warm_bytes=outgoing.memory.warm_bytes,
            waiting_receives=incoming.waiting,
            unclaimed=incoming.unclaimed,
            leases=mappings.leases,
            leased_bytes=mappings.leased_bytes,
            send_waits=outgoing.gate.waited.waits(),
            errors=self._errors.counts(),
        )

    async def close(self) -> None:
        """End all calls, and let the peer receive all messages; cancellation skips all waits."""
        self.incoming.fail(_closed)
        try:
            await self.outgoing.finish(_closed)
            self.incoming.close()
            self._mappings.freed.collect_all()
            if not self._is_over:
                self._writer.close(Close())
                while not (self._transport.is_writable or self._transport.is_closed):
                    await self._writing.wait()
            self._transport.close()
            await self.outgoing.memory.aclose()
            await self._mappings.settle()
        finally:
            self.abort()

    def abort(self) -> None:
        """Close without waiting."""
        self._is_over = True
        self._transport.close()
        self.incoming.close()
        self.outgoing.memory.close()
        self._mappings.close()

    # Events of the transport

    def record_received(self, data: memoryview, descriptors: list[int]) -> None:
        """Process the frames of a record."""
        try:
            for frame in self._connection.receive(data):
                self._handle(frame, descriptors)
                if self._transport.is_closed:
                    return
        except ProtocolError as error:
            self._violated(error)
        finally:
            if descriptors:
                close_all(descriptors)

    def _data_received(self, record: memoryview, data: memoryview) -> None:
        """Process the frames of a record that has arrived with the bytes of one of its tensors."""
        if self._connection.is_closed:
            return  # this end is closing, and reads no more frames
        messages = 0
        try:
            for frame in self._connection.receive(record):
                if isinstance(frame, Put) and frame.placement == OUT_OF_BAND:
                    messages += 1
                    self._connection.count_data(frame.message, len(data))
                    self.incoming.data_received(frame, data)
                else:
                    self._handle(frame, [])
                if self._transport.is_closed:
                    return
            if messages != 1:
                raise ProtocolError(
                    f"it sent the bytes of a tensor with {messages} out-of-band messages instead of one"
                )
        except ProtocolError as error:
            self._violated(error)
        except OSError as error:
            self._refuse(f"no memory is left in this process for its tensors: {error}")

    def connection_lost(self, reason: str | ProtocolError) -> None:
        """End the session, because the connection has ended."""
        if isinstance(reason, ProtocolError):
            self._violated(reason)
        else:
            self._end(self._connection.lost(reason, is_retried=False))

    def resume_writing(self) -> None:
        """Wake `close`, which waits for the transport."""
        self._writing.wake()

    def _handle(self, frame: FromRank, descriptors: list[int]) -> None:
        match frame:
            case Put() | PutNone():
                self.incoming.message_received(frame)
            case Taken():
                self.outgoing.taken(frame)
            case Release():
                self.outgoing.released(frame)
            case Attach():
                self._attach(frame, descriptors)
            case Close():
                # A rank can refuse the other one only because of its `Join`. After that, a `Close` is a loss.
                self._end(self._connection.closed(replace(frame, is_refusal=False)))

    def _attach(self, attach: Attach, descriptors: list[int]) -> None:
        try:
            self.incoming.attached(attach, self._transport.mover, descriptors)
        except RefusedError as error:
            self._refuse(str(error))
        except OSError as error:
            self._refuse(f"its memory cannot be mapped into this process: {error}")

    def _refuse(self, reason: str) -> None:
        """Close the connection to a peer whose memory cannot be used here."""
        pid = self._connection.peer_pid
        self._writer.close(Close(reason))
        self._end(Loss(PeerLostError(f"this rank cannot use the peer (pid {pid}): {reason}", pid=pid), False))

    def _violated(self, error: ProtocolError) -> None:
        self._end(self._connection.violated(error))

    def _writing_failed(self, error: OSError) -> None:
        self._end(self._connection.lost(f"writing to it failed: {error}", is_retried=False))

    def _end(self, loss: Loss) -> None:
        if self._is_over:
            return
        self._is_over = True
        error = loss.error
        make_error = partial(again, error)
        watch = self._transport.watch_peer
        try:
            lost = self.outgoing.lost(make_error, watch)
            self.incoming.lost(make_error, watch)
            self._counts["peers_lost"] += 1
        finally:
            self._transport.close()
            self._writing.wake()
        logger.log(
            logging.WARNING if lost else logging.INFO,
            "%s: %s; %s messages in flight were lost",
            self._label,
            error,
            lost,
            extra={
                "event": "peer_lost",
                "pipe": self._label,
                "peer_pid": error.pid,
                "reason": str(error),
                "messages_lost": lost,
            },
        )


def _closed() -> AioTensorError:
    return ClosedError("this RankPipe was closed")
