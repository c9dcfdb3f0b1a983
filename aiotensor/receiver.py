"""Receive tensors from the senders of an endpoint; the implementation is in `aiotensor.receiving`."""

import asyncio
import secrets
from collections.abc import Collection
from typing import Self

import torch

from aiotensor.errors import AioTensorError, ClosedError
from aiotensor.protocol.frames import LEAST_FRAME_BYTES, MAX_RECORD_BYTES
from aiotensor.protocol.receiver import AdmissionLimits
from aiotensor.receiving.intake import Intake
from aiotensor.receiving.senders import Senders
from aiotensor.receiving.taking import Taking, key_of
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import count, count_or_none, seconds_or_never
from aiotensor.runtime.worker import in_thread
from aiotensor.statistics.counters import ErrorCounter, new_counts, snapshot
from aiotensor.tensors.views import own_copy
from aiotensor.transports.endpoints import Endpoint, TcpArguments, route_to
from aiotensor.types import CurveKey, Delivery, ReceiverStatistics, TensorHandle

__all__ = ["TensorReceiver", "has_seen"]


class TensorReceiver(LoopObject):
    """Receive tensors from the senders of an endpoint, in any order.

    Open it with ``async with``, once, and share it between the tasks of that event loop. An endpoint has
    one receiver and any number of senders. Opening at an address waits while another process holds the lock
    of the socket's folder, as each receiver does for a moment when it opens; cancellation has no side
    effects. Opening raises `UsageError` if a receiver already listens there. If the folder cannot be used,
    it raises an `OSError` that names the folder, such as `FileNotFoundError`, `NotADirectoryError` or
    `PermissionError`.

    A received tensor is a view of shared memory; a small tensor has its own memory. A tensor stays valid as
    long as it or a view of it exists, even after its sender or this receiver has ended. The memory returns to
    the sender when the last view is freed.

    A sender that would exceed a limit is refused when it connects: its calls raise `RefusedError`, which
    names the limit, and so does `receive` for its handles. The maximum that a sender may ever use is counted
    when it is admitted, so that no later message exceeds a limit.

    Args:
        endpoint: the location of the receiver: an address such as ``unix:///run/user/1000/engine.sock``, to
            which only processes of this user may connect, a `TensorQueue`, or a `multiprocessing.Queue` if
            the application cannot use a `TensorQueue`. Nothing else may read from such a queue or put objects
            into it, and it must be closed after the receiver.
        max_senders: the maximum number of connected senders; None for no limit.
        max_mapped_bytes: the maximum number of bytes of mapped shared memory, over all senders: the sum of
            their `arena_bytes`, and the memory of disconnected senders that tensors still use; None for no
            limit.
        max_unclaimed_messages: the maximum number of messages that wait to be taken, over all senders: the
            sum of their `max_concurrent_videos`; None for no limit.
        max_frame_bytes: the maximum size of a record in bytes, from 16 KiB to 64 KiB. Senders comply with
            it; a sender that exceeds it is disconnected.
        max_wait_s: the time in seconds after which `receive` and `arrived` stop waiting for a tensor and
            raise `WouldBlockError`, for example because its sender never connects. None for never. Iterations
            wait without limit.
        secret_key: the CURVE secret key of this receiver, for an endpoint ``tcp://`` that other machines can
            reach.
        client_keys: the CURVE public keys of the senders and inspectors that may connect there.
        peer_timeout_s: the time in seconds without an answer after which a sender at ``tcp://`` is lost; None
            means 2 s, or no limit at a loopback address.

    Raises:
        TypeError: the endpoint or a limit has the wrong type.
        ValueError: the address is invalid, or a limit is out of bounds.
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
        secret_key: CurveKey | None = None,
        client_keys: Collection[CurveKey] = (),
        peer_timeout_s: float | None = None,
    ) -> None:
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("TensorReceiver")
        self._route = route_to(endpoint, TcpArguments(False, secret_key, None, client_keys, peer_timeout_s))
        self._limits = AdmissionLimits(
            count_or_none("max_senders", max_senders),
            count_or_none("max_mapped_bytes", max_mapped_bytes),
            count_or_none("max_unclaimed_messages", max_unclaimed_messages),
            count("max_frame_bytes", max_frame_bytes, LEAST_FRAME_BYTES, MAX_RECORD_BYTES),
        )
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        self._errors = ErrorCounter()
        self._counts = new_counts(ReceiverStatistics)
        self._taking: Taking | None = None  # made by `__aenter__`, since it belongs to a loop

    @property
    def id(self) -> str:
        """The id of this receiver, as its senders see it."""
        return self._id

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            self._taking = await self._open()
            if self.affinity.is_closed:  # by another task, during the wait
                await self._taking.close()
                raise ClosedError("this TensorReceiver was closed")
        except BaseException:
            self.affinity.close()
            raise
        self.affinity.settle(self, self._route.label)
        return self

    async def _open(self) -> Taking:
        senders = Senders(self._limits, self._counts, self._errors)
        intake = Intake(self._id, self._limits.frame_bytes, senders)
        try:
            listener = await self._route.listen(intake, self._limits.frame_bytes)
        except BaseException:
            await intake.close()
            raise
        return Taking(intake, senders, listener, self.affinity, self._max_wait_s, self._route.label)

    async def receive(self, handle: TensorHandle, *, copy: bool = False) -> torch.Tensor:
        """Return the tensor that a handle names, once it has arrived.

        Args:
            handle: the result of the sender's `send`; it may arrive before the tensor, or before the sender
                has connected.
            copy: return a copy with its own memory, made in a worker thread, so that the shared memory
                returns to the sender immediately.

        Waits until the whole message of the tensor has arrived, at most `max_wait_s`. After a cancellation,
        even during the copy, the tensor can still be received. If the tensor has arrived and is not copied,
        the call does not suspend: it completes even in an expired timeout scope, and a long series of such
        calls blocks all other tasks.

        Raises:
            AlreadyTakenError: the tensor was received before, or another call is receiving it.
            DiscardedError: the message was discarded or ended without the tensor, or the sender closed
                without sending it.
            PeerLostError: the sender died or broke the protocol; `pid` is the id of its process.
            RefusedError: the sender was refused, because of a limit or its version.
            WouldBlockError: the tensor has not arrived within `max_wait_s`; the text states whether its
                sender has connected.
            ClosedError: this receiver was closed, perhaps during the call.
            OSError: the machine has no memory or no thread left for the copy; the tensor can still be
                received.
        """
        try:
            taking = self._opened()
            key = key_of(handle)
            item = await taking.hold(key)
            if not copy:
                return taking.take(key, item)
            try:
                # If the call is cancelled, the thread completes the copy, and pins the block until then.
                tensor = await in_thread(own_copy, item.tensor)
            except BaseException:
                # The traceback of the error refers to this frame, so the variable would keep the tensor and
                # its block alive.
                del item
                taking.put_back(key)
                raise
            self._counts["tensors_copied"] += 1
            self._counts["bytes_copied"] += tensor.nbytes
            taking.take(key, item)
            return tensor
        except Exception as error:
            self._errors.add(error)
            raise

    async def arrived(self, handle: TensorHandle) -> None:
        """Wait until the tensor that a handle names has arrived, without receiving it.

        A server with many requests can use this to begin with requests whose tensors have arrived. Waits
        until the whole message of the tensor has arrived, at most `max_wait_s`; iterations skip the tensor
        during this wait. Cancellation has no side effects. Errors are those of `receive`.
        """
        with self._errors:
            taking = self._opened()
            key = key_of(handle)
            await taking.hold(key)
            taking.put_back(key)

    def receive_nowait(self, handle: TensorHandle) -> torch.Tensor:
        """Return the tensor that a handle names, without waiting for its arrival.

        Other errors are those of `receive`.

        Raises:
            WouldBlockError: the tensor has not arrived.
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
        """Return the next tensor in the order of arrival, and skip tensors that calls await by their handles.

        The tensors of a message are delivered consecutively, even if several tasks iterate: a message that
        has been begun is finished before the next one. `Delivery.tensors` is the size of the message. If the
        call that awaits a tensor by its handle is cancelled, the tensor is delivered next. The remaining
        tensors of a message that is discarded, or lost with its sender, are not delivered.

        Cancellation loses no tensor. The iteration ends when this receiver is closed. Like `receive`, the
        call does not suspend if a tensor has arrived.

        Raises:
            PeerLostError: reading from the senders has failed, so no more tensors will arrive.
        """
        if self.affinity.is_closed:
            raise StopAsyncIteration
        try:
            taking = self._opened()
            while (found := taking.mailbox.hold_next()) is None:
                try:
                    await taking.arrivals.change()
                except asyncio.CancelledError:
                    taking.arrivals.iterators.wake_one()  # in place of this task, which may have been woken
                    raise
                if self.affinity.is_closed:
                    raise StopAsyncIteration
        except AioTensorError as error:  # not the end of the iteration
            self._errors.add(error)
            raise
        key, item, count = found
        taking.take(key, item)
        return item if count == 1 else Delivery(item.handle, item.tensor, count, item.trace_context)

    def discard(self, handle: TensorHandle) -> None:
        """Discard the whole message of a handle, because it is no longer needed.

        Its permit and its memory return to the sender immediately. A message that has not arrived is
        discarded on arrival. Tensors that were taken stay valid. Calls that wait for the message raise
        `DiscardedError`.
        """
        with self._errors:
            taking = self._opened()
            key = key_of(handle)
        taking.discard(key)

    def statistics(self) -> ReceiverStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        if self._taking is None:
            return snapshot(
                ReceiverStatistics,
                dict.fromkeys(ReceiverStatistics.__struct_fields__, 0),
                max_senders=self._limits.senders,
                max_mapped_bytes=self._limits.mapped_bytes,
                max_unclaimed_messages=self._limits.unclaimed_messages,
                errors=self._errors.counts(),
            )
        return self._taking.senders.statistics()

    async def aclose(self) -> None:
        """Close the receiver: senders raise `PeerLostError`, waiting calls `ClosedError`, and iterations end.

        Received tensors stay valid; the others are dropped. Waits until the connections have accepted the
        last answers to the senders. Cancellation closes the receiver immediately; a sender may then raise an
        error for messages that were taken. Closing again has no effect.
        """
        self.affinity.check_place()
        was_open = self.affinity.close()
        if was_open and self._taking is not None:
            with self.affinity.leaving():
                await self._taking.close()

    def _details(self) -> list[str]:
        details = [f"at {self._route.label}"]
        if self._taking is not None and self.affinity.is_open:
            details.append(f"{len(self._taking.senders.connected)} senders connected")
        return details

    def _opened(self) -> Taking:
        """Return the implementation, after checking that this receiver is open here."""
        if asyncio._get_running_loop() is not self.affinity.open_in:
            self.affinity.check()
        if self._taking is None:
            raise AssertionError("an open receiver has an implementation")
        return self._taking


def has_seen(receiver: TensorReceiver, sender: str) -> bool:
    """Return whether a sender is or was connected to a receiver; for servers that wait for its tensors."""
    return receiver._taking is not None and receiver._taking.mailbox.has_joined(sender)
