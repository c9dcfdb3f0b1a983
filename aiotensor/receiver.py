"""The receiving side, as callers see it; `incoming` deals with the senders."""

import operator
import secrets
from functools import partial
from typing import Self

import torch

from aiotensor.errors import AioTensorError, ClosedError, PeerLostError, RefusedError, WouldBlockError
from aiotensor.protocol.frames import LEAST_FRAME_BYTES, MAX_RECORD_BYTES
from aiotensor.protocol.limits import Limits
from aiotensor.protocol.mailbox import Key
from aiotensor.receiving.incoming import Incoming
from aiotensor.runtime.affinity import LoopAffinity, LoopObject, weakly
from aiotensor.runtime.waiting import Waiters, at_most, seconds_or_never
from aiotensor.runtime.worker import in_thread
from aiotensor.statistics.counters import ErrorCounter
from aiotensor.tensors.autograd import as_leaf
from aiotensor.tensors.raw import copy_of
from aiotensor.transports.endpoints import Endpoint, listen, name_of
from aiotensor.types import Delivery, ReceiverStatistics, TensorHandle, Usage

__all__ = ["TensorReceiver"]


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
        self._affinity = LoopAffinity("TensorReceiver")
        self._endpoint = name_of(endpoint)
        self._errors = ErrorCounter()
        self._listener = listen(endpoint)
        limits = Limits(
            _limit("max_senders", max_senders),
            _limit("max_mapped_bytes", max_mapped_bytes),
            _limit("max_unclaimed_messages", max_unclaimed_messages),
            operator.index(max_frame_bytes),
        )
        if not LEAST_FRAME_BYTES <= limits.frame_bytes <= MAX_RECORD_BYTES:
            raise ValueError(
                f"max_frame_bytes lies between {LEAST_FRAME_BYTES} and {MAX_RECORD_BYTES}, "
                f"got {max_frame_bytes}"
            )
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        self._incoming = Incoming(self._id, limits, weakly(self.statistics))
        self._mailbox = self._incoming.mailbox
        self._arrivals = self._incoming.arrivals
        self._tensors_taken = self._bytes_taken = self._tensors_copied = self._bytes_copied = 0

    @property
    def id(self) -> str:
        """The id that senders know this receiver by."""
        return self._id

    async def __aenter__(self) -> Self:
        self._affinity.enter()
        self._incoming.open()
        try:
            await self._listener.open(self._incoming, self._incoming.limits.frame_bytes)
        except BaseException:
            self._affinity.is_closed = True
            raise
        self._affinity.settle(self, self._endpoint)
        return self

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
            self._affinity.check()
            key = _key(handle)
            self._mailbox.claim(key)
            try:
                item = await self._hold(key)
                if not copy:
                    return self._take(key, item)
                try:
                    # Cancelled, the thread ends a copy that nobody wants; until then it pins the block.
                    tensor = await in_thread(_copy, item.tensor)
                except BaseException:
                    # Whoever keeps an error keeps the frames that it came through. None of them may hold the
                    # tensor, or its block would come back with the error rather than with the tensor.
                    del item
                    self._arrivals.wake(self._mailbox.put_back(key))
                    raise
                self._tensors_copied += 1
                self._bytes_copied += tensor.nbytes
                self._take(key, item)
                return tensor
            finally:
                self._mailbox.unclaim(key)
                self._arrivals.wake_iterators()  # it may be theirs now
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
            self._affinity.check()
            key = _key(handle)
            self._mailbox.claim(key)
            try:
                await self._hold(key)
                self._arrivals.wake(self._mailbox.put_back(key))
            finally:
                self._mailbox.unclaim(key)
                self._arrivals.wake_iterators()

    def receive_nowait(self, handle: TensorHandle) -> torch.Tensor:
        """Return the tensor that a handle names if it is here.

        Errors are those of `receive`.

        Raises:
            WouldBlockError: it has not arrived.
        """
        try:
            self._affinity.check()
            key = _key(handle)
            item = self._find(key)
            if item is None:
                self._arrivals.raise_if_failed()
                raise WouldBlockError(
                    f"tensor {key.tensor} of message {key.message} of sender {key.sender} has not arrived",
                    messages=Usage(requested=1),
                )
            return self._take(key, item)
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
        if self._affinity.is_closed:
            raise StopAsyncIteration
        try:
            self._affinity.check()
            while (found := self._mailbox.hold_next()) is None:
                self._arrivals.raise_if_failed()
                await self._arrivals.iterators.wait()
                if self._affinity.is_closed:
                    raise StopAsyncIteration
        except AioTensorError as error:  # the end of an iteration is none
            self._errors.add(error)
            raise
        key, item, count = found
        self._take(key, item)
        return item if count == 1 else Delivery(item.handle, item.tensor, count)

    def discard(self, handle: TensorHandle) -> None:
        """Drop the whole message of a handle, because nobody wants it any more.

        Its permit goes back to the sender at once, its memory with it. One that has not arrived is dropped
        when it does. What was taken stays valid. Whoever waits for the message gets `DiscardedError`.
        """
        with self._errors:
            self._affinity.check()
            key = _key(handle)
        had_arrived, keys = self._mailbox.discard(key.sender, key.message)
        link = self._incoming.link_of(key.sender)
        if had_arrived and link is not None:
            self._incoming.answers.discarded(link, key.message)
        self._arrivals.wake(keys)

    def statistics(self) -> ReceiverStatistics:
        """Return what is held and what was done; also after closing."""
        self._affinity.check_place()
        unclaimed = self._mailbox.unclaimed
        incoming = self._incoming
        limits = incoming.limits
        return ReceiverStatistics(
            senders=incoming.senders,
            max_senders=limits.senders,
            senders_lost=incoming.senders_lost,
            senders_refused=incoming.senders_refused,
            waiting=self._arrivals.waiting,
            unclaimed_tensors=unclaimed.tensors,
            unclaimed_bytes=unclaimed.nbytes,
            mapped_bytes=incoming.mapped_bytes,
            max_mapped_bytes=limits.mapped_bytes,
            promised_messages=incoming.promised_messages,
            max_unclaimed_messages=limits.unclaimed_messages,
            leases=incoming.mappings.leases,
            leased_bytes=incoming.mappings.leased_bytes,
            peak_leased_bytes=incoming.mappings.peak_leased_bytes,
            tensors_taken=self._tensors_taken,
            bytes_taken=self._bytes_taken,
            messages_discarded=self._mailbox.messages_discarded,
            tensors_copied=self._tensors_copied,
            bytes_copied=self._bytes_copied,
            errors=self._errors.counts(),
        )

    async def aclose(self) -> None:
        """Close: senders get `PeerLostError`, waiters here `ClosedError`, iterations end.

        What was received stays valid; what was not taken is dropped. Waits until the links have taken what
        the senders are to be told. Cancelling closes at once, and a sender may then take for lost what was
        taken. Closing again does nothing.
        """
        self._affinity.check_place()
        was_open = self._affinity.is_open
        self._affinity.is_closed = True
        if not was_open:
            return
        self._arrivals.wake_all()
        # Senders that are told goodbye look for the next receiver, and must not find this one again.
        self._listener.stop()
        with self._affinity.leaving():
            try:
                await self._incoming.close()
            finally:
                await self._listener.close()

    # Taking

    async def _hold(self, key: Key) -> Delivery:
        """Wait for a tensor, and reserve it."""
        item = self._find(key)
        if item is not None:
            return item
        if self._max_wait_s is None:
            return await self._await(key)
        try:
            async with at_most(self._max_wait_s, partial(self._overdue, key)):
                return await self._await(key)
        except WouldBlockError:
            item = self._find(key)  # it may have come in the turn in which the time was up
            if item is None:
                raise
            return item

    def _overdue(self, key: Key) -> WouldBlockError:
        tensor = f"tensor {key.tensor} of message {key.message} of sender {key.sender}"
        if self._knows(key.sender):
            reason = "its sender is connected, and has not sent the whole message"
        else:
            reason = "no sender of this id has connected here: it is not open, or sends to another endpoint"
        return WouldBlockError(
            f"{tensor} has not arrived within {self._max_wait_s:g} s: {reason}", messages=Usage(requested=1)
        )

    async def _await(self, key: Key) -> Delivery:
        while True:
            self._arrivals.raise_if_failed()
            waiters = self._arrivals.waiters.setdefault(key, Waiters())
            try:
                await waiters.wait()
            finally:
                if not waiters and self._arrivals.waiters.get(key) is waiters:
                    del self._arrivals.waiters[key]
            if self._affinity.is_closed:
                raise ClosedError("this TensorReceiver was closed")
            item = self._find(key)
            if item is not None:
                return item

    def _find(self, key: Key) -> Delivery | None:
        """Reserve a tensor if it is here."""
        try:
            return self._mailbox.hold(key)
        except (PeerLostError, RefusedError):
            self._listener.look()  # its sender may be back
        return self._mailbox.hold(key)

    def _take(self, key: Key, item: Delivery) -> torch.Tensor:
        if self._mailbox.finish(key):
            link = self._incoming.link_of(key.sender)
            if link is not None:
                self._incoming.answers.taken(link, key.message)
        self._tensors_taken += 1
        self._bytes_taken += item.tensor.nbytes
        return item.tensor

    def _knows(self, sender: str) -> bool:
        """Say whether a sender is connected, or was."""
        return self._mailbox.has_joined(sender)

    def _details(self) -> list[str]:
        connected = f"{self._incoming.senders} senders connected"
        return [f"at {self._endpoint}", *([connected] if self._affinity.is_open else [])]


def _key(handle: TensorHandle) -> Key:
    if not isinstance(handle, TensorHandle):
        raise TypeError(
            f"a handle is what `send` returned, an aiotensor.TensorHandle, got {type(handle).__name__!r}: "
            "decode it with its type, for example msgspec.msgpack.decode(data, type=aiotensor.TensorHandle)"
        )
    if handle.message < 0 or handle.tensor < 0:
        raise ValueError(f"no sender made this handle, its numbers are negative: {handle}")
    return Key(handle.sender, handle.message, handle.tensor)


def _limit(name: str, value: int | None) -> int | None:
    if value is not None and operator.index(value) < 1:
        raise ValueError(f"{name} must be at least 1, or None, got {value}")
    return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    copy = copy_of(tensor)
    return as_leaf(copy, requires_grad=tensor.requires_grad, is_parameter=is_parameter)
