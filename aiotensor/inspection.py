"""Looking at a receiver that runs: what it holds, and what each of its senders holds."""

import asyncio
import contextlib
import os
import time

import msgspec

from aiotensor.errors import AioTensorError, PeerLostError, ProtocolError
from aiotensor.protocol.frames import (
    VERSION,
    Account,
    Bye,
    Look,
    Report,
    SenderRow,
    ToObserver,
    Welcome,
    decode_to_observer,
    encode,
)
from aiotensor.runtime.waiting import Waiters
from aiotensor.transports.base import SenderLink
from aiotensor.transports.endpoints import connect
from aiotensor.transports.tensor_queue import TensorQueue
from aiotensor.types import Holder, ReceiverStatistics, SenderStatistics

__all__ = ["Inspection", "SenderInspection", "inspect"]


class SenderInspection(msgspec.Struct, frozen=True):
    """One sender, as its receiver and it itself see it.

    Attributes:
        sender: its id.
        pid: its process.
        max_concurrent_videos: the limit on its messages in flight.
        arena_bytes: the limit on its bytes of shared memory.
        unclaimed_tensors: tensors of it that arrived and that nobody has taken.
        unclaimed_bytes: bytes of those tensors.
        leases: blocks of its memory that living tensors pin over there.
        leased_bytes: bytes of these tensors.
        statistics: what its own `statistics()` says, with at most 8 holders; None if it did not answer.
        answered_at: when it answered, by `time.monotonic`; None if it did not.
    """

    sender: str
    pid: int
    max_concurrent_videos: int
    arena_bytes: int
    unclaimed_tensors: int
    unclaimed_bytes: int
    leases: int
    leased_bytes: int
    statistics: SenderStatistics | None
    answered_at: float | None


class Inspection(msgspec.Struct, frozen=True):
    """What one look at a receiver found.

    Attributes:
        receiver: its id.
        pid: its process.
        statistics: what its `statistics()` says; a number beyond 2^63 - 1 as that.
        senders: those that are connected, in the order in which they came.
    """

    receiver: str
    pid: int
    statistics: ReceiverStatistics
    senders: tuple[SenderInspection, ...]


async def inspect(address: str, *, patience_s: float) -> Inspection:
    """Look at the receiver that listens at an address, once.

    It changes nothing there, and takes nobody's place. The receiver asks its senders, so one that is stopped,
    or whose event loop is busy, is found without what it alone knows.

    Args:
        address: where the receiver listens, such as ``unix:///run/user/1000/engine.sock``.
        patience_s: for how many seconds the receiver is waited for, and then again its senders.

    Waits for the receiver, and for its senders until each has answered or the patience is over. Cancelling
    leaves nothing behind.

    Raises:
        TypeError: it is no address; a `TensorQueue` has none.
        ValueError: it is an address that no link serves, or the patience is not positive.
        AccessDeniedError: the receiver is another user.
        PeerLostError: nobody listens there, or it closed, or it did not answer in time.
        ProtocolError: it speaks another version of the protocol, or none.
        UsageError: what is there is no receiver.
        OSError: the machine has no descriptors left.
    """
    if isinstance(address, TensorQueue):
        raise TypeError(
            "a TensorQueue has no address where its receiver could be found: ask for `statistics()` in the "
            "processes that it was handed to"
        )
    if not patience_s > 0:
        raise ValueError(f"patience_s must be positive, got {patience_s}")
    link = connect(address, "")
    observer = _Observer(link)
    try:
        await link.open(observer)
        if not (observer.is_connected or link.is_kept_waiting):
            raise _nobody(address)
        try:
            async with asyncio.timeout(patience_s):
                await observer.reported()
        except TimeoutError:
            if not (observer.is_connected or link.is_kept_waiting):
                raise _nobody(address) from None  # it is gone since
            raise PeerLostError(
                f"the receiver at {address} has not answered for {patience_s:g} s: its process is stopped, "
                "or its event loop is busy; look again, or with more patience",
                pid=observer.pid,
            ) from None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await observer.answered()
        return observer.inspection()
    finally:
        link.close()


def _nobody(address: str) -> PeerLostError:
    return PeerLostError(f"nobody listens at {address}: start the receiver, or look elsewhere")


class _Observer:
    """One look, as its answers come in.

    Args:
        link: the road to the receiver.
    """

    def __init__(self, link: SenderLink) -> None:
        self.is_connected = False
        self.pid: int | None = None
        self._link = link
        self._receiver = ""
        self._statistics: ReceiverStatistics | None = None
        self._rows: dict[str, SenderRow] = {}
        self._is_complete = False  # all rows are here
        self._accounts: dict[str, tuple[Account, float]] = {}
        self._failure: AioTensorError | None = None
        self._waiters = Waiters()

    async def reported(self) -> None:
        """Wait until the receiver has said what it knows."""
        while not self._is_complete:
            await self._wait()

    async def answered(self) -> None:
        """Wait until all its senders have, too."""
        while len(self._accounts) < len(self._rows):
            await self._wait()

    def inspection(self) -> Inspection:
        """Put together what was said until now."""
        if self._statistics is None or self.pid is None:
            raise AssertionError("a look is told of before the receiver has answered")
        senders = tuple(
            _joined(row, *self._accounts.get(row.sender, (None, None))) for row in self._rows.values()
        )
        return Inspection(self._receiver, self.pid, self._statistics, senders)

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        await self._waiters.wait()

    # What the link says

    def introduction(self) -> bytes:
        """Make the one record that is said."""
        self.is_connected = True
        return encode(Look(VERSION, os.getpid()))

    def record_arrived(self, data: bytes | memoryview) -> None:
        """Take frames from the receiver."""
        try:
            for frame in decode_to_observer(data):
                self._take(frame)
        except AioTensorError as error:
            self.link_lost(error)
        self._waiters.wake()

    def link_lost(self, error: AioTensorError) -> None:
        """Note that nothing more will be said; the first reason is the one that counts."""
        self._link.close()
        if self._failure is None:
            self._failure = self._lost(str(error)) if isinstance(error, PeerLostError) else error
        self._waiters.wake()

    def _take(self, frame: ToObserver) -> None:
        match frame:
            case Welcome():
                self.pid, self._receiver = frame.pid, frame.receiver
                if frame.version != VERSION:
                    raise ProtocolError(
                        f"the receiver (pid {frame.pid}) speaks version {frame.version} of the protocol, and "
                        f"whoever looks speaks {VERSION}: use the same aiotensor for both"
                    )
            case Report():
                if self.pid is None or self._is_complete:
                    raise ProtocolError("the receiver reported before it had introduced itself, or twice")
                self._statistics, self._is_complete = frame.statistics, frame.last
                self._rows.update((row.sender, row) for row in frame.senders)
            case Account():
                if not self._is_complete or frame.sender not in self._rows:
                    raise ProtocolError(
                        "the receiver passed on an account of a sender that it did not report"
                    )
                self._accounts[frame.sender] = frame, time.monotonic()
            case Bye(reason=""):
                raise PeerLostError("it closed")
            case Bye():
                raise PeerLostError(f"it refused to be looked at: {frame.reason}")

    def _lost(self, reason: str) -> PeerLostError:
        name = "the receiver" if self.pid is None else f"the receiver (pid {self.pid})"
        return PeerLostError(f"{name} is gone: {reason}", pid=self.pid)


def _joined(row: SenderRow, account: Account | None, at: float | None) -> SenderInspection:
    return SenderInspection(
        row.sender,
        row.pid,
        row.max_concurrent_videos,
        row.arena_bytes,
        row.unclaimed_tensors,
        row.unclaimed_bytes,
        row.leases,
        row.leased_bytes,
        None if account is None else _statistics(row, account),
        at,
    )


def _statistics(row: SenderRow, account: Account) -> SenderStatistics:
    return SenderStatistics(
        max_concurrent_videos=row.max_concurrent_videos,
        in_flight=account.in_flight,
        peak_in_flight=account.peak_in_flight,
        waiting=account.waiting,
        longest_wait_s=account.longest_wait_s,
        holders=tuple(
            Holder(holding.message, holding.state, holding.bytes, holding.seconds)
            for holding in account.holders
        ),
        arena_bytes=row.arena_bytes,
        bytes_in_use=account.bytes_in_use,
        peak_bytes_in_use=account.peak_bytes_in_use,
        warm_bytes=account.warm_bytes,
        largest_free_bytes=account.largest_free_bytes,
        messages_sent=account.messages_sent,
        messages_discarded=account.messages_discarded,
        tensors_sent=account.tensors_sent,
        bytes_sent=account.bytes_sent,
        receivers_lost=account.receivers_lost,
        permit_waits=account.permit_waits,
        memory_waits=account.memory_waits,
        tensors_copied=account.tensors_copied,
        bytes_copied=account.bytes_copied,
        errors=account.errors,
    )
