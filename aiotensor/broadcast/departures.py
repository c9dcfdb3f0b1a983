"""Blocks that disconnected subscribers may still read.

    disconnected --its process ends--> blocks are free
         |
         '--it lives on, and memory is needed--> segments are retired: other memory replaces the blocks

A killed process ends within moments, so its blocks stay pinned only for that time. A process that lives on
may have closed its connection and still use tensors.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from aiotensor.runtime.process_end import ProcessEnd, WatchProcess
from aiotensor.sending.memory import Memory

__all__ = ["Departures"]

_GRACE_S = 0.5  # longer than a killed process takes to end
_MAX_RETIRED = 6  # segments; with the current one, fewer than `MAX_SEGMENTS` of the protocol


class _Departure:
    """The blocks of one disconnected subscriber, once for each pin."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = blocks
        self.end: ProcessEnd | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_overdue = False  # its process has outlived `_GRACE_S`

    def cancel(self) -> None:
        """Stop waiting for the end of the process."""
        if self.end is not None:
            self.end.cancel()
        if self.timer is not None:
            self.timer.cancel()


class Departures:
    """The disconnected subscribers whose processes have not ended; belongs to the running loop.

    Args:
        memory: the memory of the publisher.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._departures: dict[_Departure, None] = {}
        self._loop = asyncio.get_running_loop()

    def add(self, blocks: Sequence[int], watch: WatchProcess) -> None:
        """Keep the blocks of a disconnected subscriber until its process has ended."""
        if not blocks:
            return
        departure = _Departure(blocks)
        self._departures[departure] = None
        departure.timer = self._loop.call_later(_GRACE_S, self._overdue, departure)
        departure.end = watch(partial(self._ended, departure))

    def make_way(self) -> None:
        """Retire the segments with blocks of subscribers that live on, if a call waits for memory."""
        overdue = [departure for departure in self._departures if departure.is_overdue]
        if not overdue or not self._memory.gate.budget.waiting or self._memory.retired >= _MAX_RETIRED:
            return
        for departure in overdue:
            del self._departures[departure]
            if departure.end is not None:
                self._memory.reader_lost(departure.blocks, departure.end.again)
            departure.cancel()

    def close(self) -> None:
        """Stop waiting for all processes."""
        for departure in self._departures:
            departure.cancel()
        self._departures.clear()

    def _overdue(self, departure: _Departure) -> None:
        departure.is_overdue = True
        self.make_way()

    def _ended(self, departure: _Departure) -> None:
        del self._departures[departure]
        departure.cancel()
        self._memory.unpin(departure.blocks)
