"""The memory into which the engine of the peer writes blocks."""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from aiotensor.engines import RegistrationError
from aiotensor.errors import ProtocolError
from aiotensor.protocol.direct import MAX_WRITES, Reserve, Reserved
from aiotensor.protocol.network import Area
from aiotensor.protocol.pages import Range
from aiotensor.transports.base import Landing
from aiotensor.transports.tcp.engine import RunningEngine

__all__ = ["ReservedMemory"]


class _Registration(msgspec.Struct, eq=False):
    """The registration of the memory of a block; later blocks at the same place use it, too."""

    nbytes: int
    key: "asyncio.Future[bytes]"


class ReservedMemory:
    """Register memory for the writes of the peer, and poll the engine until they have ended.

    Args:
        running: the engine.
        send: sends a message to the peer.
        report: logs the reason why the memory of a block cannot be registered.
        engine_failed: called with a reason to stop using the engine.
        failed: called with a reason to end the connection.
    """

    def __init__(
        self,
        running: RunningEngine,
        send: Callable[[Reserved], object],
        report: Callable[[str], object],
        engine_failed: Callable[[str], object],
        failed: Callable[[str], object],
    ) -> None:
        self._running = running
        self._send = send
        self._report = report
        self._engine_failed = engine_failed
        self._failed = failed
        self._is_closed = False
        self._writes: dict[int, memoryview | None] = {}  # of the peer; their memory stays mapped
        self._registrations: dict[int, dict[int, _Registration]] = {}  # by segment and block

    def reserve(self, message: Reserve, landing: Landing) -> None:
        """Reserve memory for a write, and send its key.

        Raises:
            ProtocolError: the peer may not reserve this memory.
        """
        number, area = message.write, Area(message.segment, message.block)
        if number in self._writes or len(self._writes) >= MAX_WRITES:
            raise ProtocolError("it reserved memory twice, or too often")
        self._writes[number] = None
        landing.reserve(area.block, message.nbytes, partial(self._has_memory, number, area))

    def written(self, number: int) -> None:
        """Forget a write that has ended or was cancelled, and stop polling for it."""
        if self._writes.pop(number, None) is not None:
            self._running.end_polling()

    def returned(self, segment: int, ranges: Sequence[Range]) -> None:
        """End the registrations of memory that is returned to the system."""
        if segment in self._registrations:
            self._unregister(segment, [(start, start + length) for start, length in ranges])

    def close(self) -> None:
        """Register no more memory, because the engine is being closed."""
        self._is_closed = True
        self._registrations.clear()

    def release(self) -> None:
        """Stop keeping memory mapped: the engine is closed, so the peer cannot write to it."""
        self._writes.clear()

    def _has_memory(self, number: int, area: Area, memory: memoryview | None, failure: str) -> None:
        if failure:
            self._failed(failure)
        if self._is_closed or number not in self._writes or memory is None:
            return  # the peer has cancelled the write, or is gone
        of_segment = self._registrations.setdefault(area.segment, {})
        registration = of_segment.get(area.block)
        if registration is None or registration.nbytes != len(memory):
            self._unregister(area.segment, [(area.block, area.block + len(memory))])
            registration = of_segment[area.block] = _Registration(len(memory), self._running.register(memory))
        self._writes[number] = memory
        self._running.begin_polling()
        registration.key.add_done_callback(partial(self._registered, number, area))

    def _registered(self, number: int, area: Area, registering: "asyncio.Future[bytes]") -> None:
        error = registering.exception()
        if self._is_closed:
            return
        if error is not None and not isinstance(error, RegistrationError):
            self._engine_failed(str(error))
            return
        if error is not None:
            self._report(str(error))
            of_segment = self._registrations.get(area.segment, {})
            if area.block in of_segment and of_segment[area.block].key is registering:
                del of_segment[area.block]
        if number in self._writes:
            if error is not None:
                self.written(number)
            self._send(Reserved(number, b"" if error is not None else registering.result()))

    def _unregister(self, segment: int, ranges: list[tuple[int, int]]) -> None:
        """End the registrations that overlap any of the ranges, which are pairs of start and stop."""
        merged = _merged(ranges)
        stops = [stop for _, stop in merged]
        of_segment, keys = self._registrations[segment], []
        for block, registration in list(of_segment.items()):
            index = bisect_right(stops, block)
            if index < len(merged) and merged[index][0] < block + registration.nbytes:
                del of_segment[block]
                if registration.key.done():
                    keys.append(registration.key)
                else:
                    registration.key.add_done_callback(lambda key: self._drop([key]))
        self._drop(keys)

    def _drop(self, registered: "list[asyncio.Future[bytes]]") -> None:
        keys = [one.result() for one in registered if one.exception() is None]
        if keys and not self._is_closed:
            self._running.unregister(keys)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, with adjacent and overlapping ones merged."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
