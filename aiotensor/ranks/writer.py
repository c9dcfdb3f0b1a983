"""Writes the frames of one end of a connection between ranks."""

import asyncio
from collections.abc import Callable

from aiotensor.protocol.connection import Close
from aiotensor.protocol.frames import ARENA, Put
from aiotensor.protocol.ranks import PutNone, RankConnection
from aiotensor.tensors.segments import Segment
from aiotensor.transports.base import Transport

__all__ = ["Writer"]


class Writer:
    """Write the frames of a connection; belongs to the running loop.

    The frames of one iteration of the event loop share a record, unless `flush` writes them earlier.

    Args:
        transport: the connection.
        connection: the connection object of this end.
        collect: adds the blocks of tensors that were just freed to the next record.
        failed: called if a record could not be written.
    """

    def __init__(
        self,
        transport: Transport,
        connection: RankConnection,
        collect: Callable[[], object],
        failed: Callable[[OSError], object],
    ) -> None:
        self.transport = transport
        self._connection = connection
        self._collect = collect
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._is_flush_scheduled = False

    def attach(self, segment: Segment) -> None:
        """Share a segment with the peer.

        Raises:
            OSError: the kernel refused the descriptor; nothing was sent.
        """
        self.flush()
        if not self.transport.is_closed:
            record = self._connection.attach(segment.number, ARENA, segment.nbytes)
            self.transport.write(record, [segment.descriptor])
            segment.is_attached = True

    def put(self, message: Put | PutNone, *, flush: bool) -> None:
        """Send a message; with `flush`, write its frame now."""
        self._connection.put(message)
        if flush:
            self.flush()
        else:
            self.flush_soon()

    def put_with_data(self, message: Put, data: memoryview) -> None:
        """Send a message between machines now, with the bytes of its tensor, which may change afterwards."""
        self._collect()
        records = self._connection.put_with_data(message)
        try:
            for record in records[:-1]:
                self.transport.write(record)
            if self.transport.mover is not None and records:
                self.transport.mover.write_with_data(records[-1], data)
        except OSError as error:
            self._failed(error)

    def taken(self, message: int) -> None:
        """Report to the peer that one of its messages was received."""
        self._connection.taken(message)
        self.flush_soon()

    def release(self, block: int) -> None:
        """Report to the peer that one of its blocks is no longer used."""
        self._connection.release(block)
        self.flush_soon()

    def flush(self) -> None:
        """Write the pending frames now."""
        # Tensors that were freed just now are released by the same record.
        self._collect()
        try:
            for record in self._connection.data_to_send():
                self.transport.write(record)
        except OSError as error:
            self._failed(error)

    def flush_soon(self) -> None:
        """Write the pending frames at the end of this iteration of the event loop."""
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._iteration_ended)

    def close(self, close: Close) -> None:
        """Write the last frame; `transport.is_writable` becomes true once closing loses nothing."""
        self._collect()
        self._connection.close(close)
        self.flush()
        self.transport.finish()

    def _iteration_ended(self) -> None:
        self._is_flush_scheduled = False
        if not self._connection.is_closed:
            self.flush()
