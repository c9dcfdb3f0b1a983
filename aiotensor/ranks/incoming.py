"""The messages that one end of a pipe receives, in the order in which the peer sent them."""

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable

import msgspec
import torch

from aiotensor.errors import AioTensorError, WouldBlockError
from aiotensor.protocol.frames import Attach, Put
from aiotensor.protocol.ranks import PutNone
from aiotensor.ranks.settings import PipeSettings
from aiotensor.ranks.writer import Writer
from aiotensor.receiving.mappings import Mappings, PeerMemory
from aiotensor.runtime.process_end import WatchProcess
from aiotensor.runtime.waiting import Waiters, at_most
from aiotensor.runtime.worker import in_thread
from aiotensor.tensors.copying import QUICK_BYTES
from aiotensor.tensors.placement import open_out_of_band
from aiotensor.tensors.views import own_copy
from aiotensor.transports.base import Mover
from aiotensor.types import Usage

__all__ = ["Incoming"]


class _Arrived(msgspec.Struct, eq=False):
    number: int
    value: torch.Tensor | None


class Incoming:
    """Receive the messages of the peer; belongs to the running loop.

    Args:
        settings: the limits.
        counts: the counters of the pipe.
        mappings: maps the memory of the peer.
        writer: writes the answers.
    """

    def __init__(
        self, settings: PipeSettings, counts: dict[str, int], mappings: Mappings, writer: Writer
    ) -> None:
        self._settings = settings
        self._counts = counts
        self._mappings = mappings
        self._memory = PeerMemory(settings.max_bytes, writer.release)
        self._inbox: deque[_Arrived] = deque()
        self._waiters = Waiters()
        self._writer: Writer | None = writer
        self._failure: Callable[[], AioTensorError] | None = None

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a message."""
        return len(self._waiters)

    @property
    def unclaimed(self) -> int:
        """The number of messages that have arrived and have not been received."""
        return len(self._inbox)

    # Calls

    async def receive(self, *, copy: bool) -> torch.Tensor | None:
        """Wait for the next message, as `RankPipe.receive` does."""
        if not self._inbox:
            await self._arrival()
        arrived = self._inbox.popleft()
        value = arrived.value
        if value is not None:
            if copy:
                value = await self._copy(arrived)
            self._counts["bytes_received"] += value.nbytes
        self._counts["messages_received"] += 1
        if self._writer is not None:
            self._writer.taken(arrived.number)
        return value

    async def _arrival(self) -> None:
        """Wait until there is a message.

        Raises:
            WouldBlockError: none has arrived within `max_wait_s`.
            AioTensorError: no further message will arrive.
        """
        try:
            async with at_most(self._settings.max_wait_s, self._overdue):
                while not self._inbox:
                    if self._failure is not None:
                        raise self._failure()
                    await self._waiters.wait()
        except WouldBlockError:
            if not self._inbox:  # it may have arrived just as the time ran out
                raise
        except asyncio.CancelledError:
            if self._inbox:
                self._waiters.wake_one()  # in place of this task, which may have been woken
            raise

    async def _copy(self, arrived: _Arrived) -> torch.Tensor:
        """Copy a tensor; after an error or a cancellation, return it to the inbox."""
        value = arrived.value
        if value is None:
            raise AssertionError("None is not copied")
        try:
            copy = own_copy(value) if value.nbytes <= QUICK_BYTES else await in_thread(own_copy, value)
        except BaseException:
            # The error refers to this frame, whose variable would keep the tensor and its block alive.
            del value
            insort(self._inbox, arrived, key=lambda one: one.number)
            self._waiters.wake_one()
            raise
        arrived.value = None
        return copy

    def _overdue(self) -> WouldBlockError:
        return WouldBlockError(
            f"no message has arrived within {self._settings.max_wait_s:g} s", messages=Usage(requested=1)
        )

    # Events

    def message_received(self, message: Put | PutNone) -> None:
        """Store a message, and wake the calls that wait.

        Raises:
            ProtocolError: its tensor is invalid, or is not in a segment of the peer.
        """
        value = self._mappings.open(self._memory, message) if isinstance(message, Put) else None
        self._store(message.message, value)

    def data_received(self, message: Put, data: memoryview) -> None:
        """Store a message whose tensor uses the memory of the bytes that have arrived with it.

        Raises:
            ProtocolError: the tensor is invalid.
            OSError: no memory is left.
        """
        self._store(message.message, open_out_of_band(message, data))

    def attached(self, attach: Attach, mover: Mover | None, descriptors: list[int]) -> None:
        """Map a segment of the peer; arguments and errors are those of `Mappings.attach`."""
        self._mappings.attach(self._memory, attach, mover, descriptors)

    def _store(self, number: int, value: torch.Tensor | None) -> None:
        self._inbox.append(_Arrived(number, value))
        if self._waiters:
            self._waiters.wake_one()

    def fail(self, make_error: Callable[[], AioTensorError]) -> None:
        """Let calls raise an error from `make_error` after the last message."""
        self._failure = make_error
        self._waiters.wake()

    def lost(self, make_error: Callable[[], AioTensorError], watch: WatchProcess) -> None:
        """Stop answering a peer that is gone; messages that have arrived can still be received.

        Args:
            make_error: makes the error that calls raise after the last message.
            watch: watches the process of the peer.
        """
        self._writer = self._memory.release = None
        self._mappings.take_over_after(self._memory, watch)
        self._mappings.peer_gone(self._memory)
        self.fail(make_error)

    def close(self) -> None:
        """Drop the messages that were not received."""
        self._inbox.clear()
        self._mappings.peer_gone(self._memory)
