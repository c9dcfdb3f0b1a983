"""Receive tensors from the senders of an endpoint; the implementation is in `aiotensor.receiving`."""

import operator
import secrets
from typing import Self

import torch

from aiotensor.errors import AioTensorError, ClosedError
from aiotensor.protocol.admission import AdmissionLimits
from aiotensor.protocol.frames import LEAST_FRAME_BYTES, MAX_RECORD_BYTES
from aiotensor.receiving.intake import Intake
from aiotensor.receiving.reports import statistics_before_opening, statistics_of
from aiotensor.receiving.taking import Taking, key_of
from aiotensor.runtime.affinity import LoopAffinity, LoopObject, weakly
from aiotensor.runtime.waiting import seconds_or_never
from aiotensor.runtime.worker import in_thread
from aiotensor.statistics.counters import ErrorCounter, new_counts
from aiotensor.tensors.autograd import as_leaf
from aiotensor.tensors.raw import copy_of
from aiotensor.transports.endpoints import Endpoint, route_to
from aiotensor.types import Delivery, ReceiverStatistics, TensorHandle

__all__ = ["TensorReceiver", "has_seen"]


class TensorReceiver(LoopObject):
    """Receive tensors from the senders of an endpoint, in any order.

    Open it with ``async with``, once, and share it between the tasks of that event loop. An endpoint has
    one receiver and any number of senders. Opening at an address waits while another process holds the lock
    of the socket's folder, as a receiver that opens there does for a moment; cancelling that leaves nothing
    behind. It raises `UsageError` if a receiver listens there already, and otherwise an `OSError` that names
    the folder: `FileNotFoundError` if it does not exist, `NotADirectoryError`, `PermissionError`.

    A received tensor is a view of shared memory (a small one has memory of its own). It stays valid for
    as long as it or a view of it lives, whatever becomes of its sender or of this receiver; the memory
    goes back to the sender when the last one is freed.

    A sender that would exceed a limit is refused when it connects: its calls raise `RefusedError`, which
    names the limit, and so does `receive` for its handles. What it may ever use counts from then on, so that
    nothing fails later.

    Args:
        endpoint: where the senders send to: an address such as ``unix:///run/user/1000/engine.sock``, where
            this user's processes may connect and no other's, or a `TensorQueue`.
        max_senders: the most senders connected at once; None for no limit.
        max_mapped_bytes: the most bytes of shared memory mapped here, over all senders: the sum of their
            `arena_bytes`, and of what tensors keep alive whose senders are gone; None for no limit.
        max_unclaimed_messages: the most messages that can be here and wait to be taken, over all senders:
            the sum of their `max_concurrent_videos`; None for no limit.
        max_frame_bytes: the longest record that is read, from 16 KiB to 64 KiB. Senders keep to it; one
            that does not loses its link.
        max_wait_s: after how many seconds `receive` and `arrived` stop waiting for a tensor and raise
            `WouldBlockError`: its sender may be unknown here, and never come. None for never. Iterations wait
            without limit.

    Raises:
        TypeError: the endpoint or a limit is of a wrong type.
        ValueError: the address names no place, or a limit is out of bounds.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        max_senders: int | None = 64,
        max_mapped_bytes: int | None = 64 << 30,
        max_unclaimed_messages: int | None = 1024,
        max_frame_bytes: int = MAX_RECORD_BYTES,
        max_wait_s: float | None = None,
    ) -> None:
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("TensorReceiver")
        self._route = route_to(endpoint)
        self._limits = AdmissionLimits(
            _limit("max_senders", max_senders),
            _limit("max_mapped_bytes", max_mapped_bytes),
            _limit("max_unclaimed_messages", max_unclaimed_messages),
            operator.index(max_frame_bytes),
        )
        if not LEAST_FRAME_BYTES <= self._limits.frame_bytes <= MAX_RECORD_BYTES:
            raise ValueError(
                f"max_frame_bytes must be between {LEAST_FRAME_BYTES} and {MAX_RECORD_BYTES}, "
                f"got {max_frame_bytes}"
            )
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        self._errors = ErrorCounter()
        self._counts = new_counts(ReceiverStatistics)
        self._taking: Taking | None = None  # made by `__aenter__`, since it belongs to a loop

    @property
    def id(self) -> str:
        """The id that senders know this receiver by."""
        return self._id

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            self._taking = await self._open()
            if self.affinity.is_closed:  # by another task, during the wait
                await self._taking.close()
                raise ClosedError("this TensorReceiver was closed")
        except BaseException:
            self.affinity.is_closed = True
            raise
        self.affinity.settle(self, self._route.label)
        return self

    async def _open(self) -> Taking:
        intake = Intake(self._id, self._limits, self._counts, weakly(self.statistics))
        try:
            listener = await self._route.listen(intake, self._limits.frame_bytes)
        except BaseException:
            await intake.close()
            raise
        return Taking(intake, listener, self.affinity, self._counts, self._max_wait_s)

    async def receive(self, handle: TensorHandle, *, copy: bool = False) -> torch.Tensor:
        """Return the tensor that a handle names, once it has arrived.

        Args:
            handle: from the sender's `send`; it may come here before the tensor, or before its sender.
            copy: return a copy with memory of its own, made in a worker thread, so that the sender gets
                its shared memory back at once.

        Waits until the whole message of the tensor has arrived, at most `max_wait_s`. Cancelling leaves the
        tensor claimable, also in the middle of the copy. If the tensor is here and not copied, the call does
        not suspend: it completes even in an expired timeout scope, and a long run of such calls lets no other
        task run.

        Raises:
            AlreadyTakenError: it was received before, or somebody else receives it now.
            DiscardedError: its message was discarded, or its sender closed without sending it.
            PeerLostError: its sender died or broke the link; `pid` says which.
            RefusedError: its sender was refused, because of a limit or of its version.
            WouldBlockError: it has not arrived within `max_wait_s`; the text says if the sender is known.
            ClosedError: this receiver was closed, perhaps while waiting.
            OSError: the copy needs memory and a thread, and the machine has none left; receive it again.
        """
        try:
            taking = self._opened()
            key = key_of(handle)
            taking.mailbox.claim(key)
            try:
                item = await taking.hold(key)
                if not copy:
                    return taking.take(key, item)
                try:
                    # Cancelled, the thread ends a copy that nobody wants; until then it pins the block.
                    tensor = await in_thread(_copy, item.tensor)
                except BaseException:
                    # Whoever keeps an error keeps the frames that it came through. None of them may hold the
                    # tensor, or its block would come back with the error rather than with the tensor.
                    del item
                    taking.put_back(key)
                    raise
                self._counts["tensors_copied"] += 1
                self._counts["bytes_copied"] += tensor.nbytes
                taking.take(key, item)
                return tensor
            finally:
                taking.unclaim(key)
        except Exception as error:
            self._errors.add(error)
            raise

    async def arrived(self, handle: TensorHandle) -> None:
        """Wait until the tensor that a handle names has arrived, and leave it there.

        So whoever serves many requests can take those whose tensors are here. Waits until the whole message
        of the tensor has arrived, and keeps it from iterations meanwhile. Cancelling changes nothing.
        Errors are those of `receive`.
        """
        with self._errors:
            taking = self._opened()
            key = key_of(handle)
            taking.mailbox.claim(key)
            try:
                await taking.hold(key)
                taking.put_back(key)
            finally:
                taking.unclaim(key)

    def receive_nowait(self, handle: TensorHandle) -> torch.Tensor:
        """Return the tensor that a handle names if it is here.

        Errors are those of `receive`.

        Raises:
            WouldBlockError: it has not arrived.
        """
        try:
            taking = self._opened()
            key = key_of(handle)
            item = taking.find(key)
            if item is None:
                raise taking.not_here(key)
            return taking.take(key, item)
        except Exception as error:
            self._errors.add(error)
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        """Return the next tensor in the order of arrival, of those that no call awaits by handle.

        The tensors of a message are delivered consecutively: a message that has been begun is finished before
        the next one, whichever tasks iterate. `Delivery.tensors` is the size of the message. A tensor that a
        call awaits by its handle is left out; if that call gives up, it is delivered next. What is left of a
        message that is discarded, or lost with its sender, is not delivered.

        Cancelling loses nothing. Ends when this receiver is closed. Does not suspend if a tensor is here, as
        `receive`.
        """
        if self.affinity.is_closed:
            raise StopAsyncIteration
        try:
            taking = self._opened()
            while (found := taking.mailbox.hold_next()) is None:
                await taking.change()
                if self.affinity.is_closed:
                    raise StopAsyncIteration
        except AioTensorError as error:  # the end of an iteration is none
            self._errors.add(error)
            raise
        key, item, count = found
        taking.take(key, item)
        return item if count == 1 else Delivery(item.handle, item.tensor, count)

    def discard(self, handle: TensorHandle) -> None:
        """Drop the whole message of a handle, because nobody wants it any more.

        Its permit goes back to the sender at once, its memory with it. One that has not arrived is dropped
        when it does. What was taken stays valid. Whoever waits for the message gets `DiscardedError`.
        """
        with self._errors:
            taking = self._opened()
            key = key_of(handle)
        taking.discard(key)

    def statistics(self) -> ReceiverStatistics:
        """Return what is held and what was done; also after closing."""
        self.affinity.check_place()
        if self._taking is None:
            return statistics_before_opening(self._limits, self._errors)
        return statistics_of(self._taking.intake, self._limits, self._counts, self._errors)

    async def aclose(self) -> None:
        """Close: senders get `PeerLostError`, waiters here `ClosedError`, iterations end.

        What was received stays valid; what was not taken is dropped. Waits until the links have taken what
        the senders are to be told. Cancelling closes at once, and a sender may then take for lost what was
        taken. Closing again does nothing.
        """
        self.affinity.check_place()
        was_open = self.affinity.is_open
        self.affinity.is_closed = True
        if was_open and self._taking is not None:
            with self.affinity.leaving():
                await self._taking.close()

    def _details(self) -> list[str]:
        details = [f"at {self._route.label}"]
        if self._taking is not None and self.affinity.is_open:
            details.append(f"{len(self._taking.intake.senders)} senders connected")
        return details

    def _opened(self) -> Taking:
        """Return the implementation, if this receiver is open here."""
        self.affinity.check()
        if self._taking is None:
            raise AssertionError("an open receiver has an intake")
        return self._taking


def has_seen(receiver: TensorReceiver, sender: str) -> bool:
    """Return whether a sender is or was connected to a receiver; for servers that wait for its tensors."""
    return receiver._taking is not None and receiver._taking.mailbox.has_joined(sender)


def _limit(name: str, value: int | None) -> int | None:
    if value is not None and operator.index(value) < 1:
        raise ValueError(f"{name} must be at least 1, or None, got {value}")
    return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    copy = copy_of(tensor)
    return as_leaf(copy, requires_grad=tensor.requires_grad, is_parameter=is_parameter)
