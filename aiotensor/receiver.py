"""Receive tensors from the senders of an endpoint."""

import asyncio
import os
import secrets
from collections.abc import Collection, Sequence
from functools import partial
from typing import Self

import torch

from aiotensor.errors import (
    AioTensorError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    WouldBlockError,
)
from aiotensor.link.admission import Admission
from aiotensor.link.events import PeerLog
from aiotensor.link.session import Session, all_accepted
from aiotensor.memory.mappings import Mappings, PeerMemory
from aiotensor.memory.tensors import own_copy
from aiotensor.protocol.arrived import Key
from aiotensor.protocol.connection import Connection, Loss
from aiotensor.protocol.frames import (
    MAX_ROWS,
    VERSION,
    Attach,
    Begin,
    Close,
    Detach,
    Discard,
    End,
    Frame,
    Hello,
    Put,
    ReceiverReport,
    SenderSummary,
    bounded,
)
from aiotensor.protocol.mailbox import Mailbox
from aiotensor.runtime import tracing
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import count_or_none, seconds_or_never
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.outage import Absence
from aiotensor.runtime.waiting import Waiters, until
from aiotensor.runtime.worker import in_thread
from aiotensor.statistics.counters import ErrorCounter, new_counts, snapshot
from aiotensor.transports.address import TcpArguments
from aiotensor.transports.base import Listener, Transport
from aiotensor.transports.endpoints import Endpoint, route_to
from aiotensor.types import CurveKey, Delivery, ReceiverStatistics, TensorHandle, Usage

logger = logger_of("receiver")

_NOT_CONNECTED = (
    "no sender with this id has connected to this receiver: it is not open, or sends to another endpoint"
)


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
            the application cannot use a `TensorQueue`. Such a queue only identifies a socket; nothing is put
            into it.
        max_senders: the maximum number of connected senders; None for no limit.
        max_mapped_bytes: the maximum number of bytes of mapped shared memory, over all senders: the sum of
            their `arena_bytes`, and the memory of disconnected senders that tensors still use; None for no
            limit.
        max_unclaimed_messages: the maximum number of messages that wait to be taken, over all senders: the
            sum of their `max_concurrent_videos`; None for no limit.
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
        max_wait_s: float | None = None,
        secret_key: CurveKey | None = None,
        client_keys: Collection[CurveKey] = (),
        peer_timeout_s: float | None = None,
    ) -> None:
        self._id = secrets.token_hex(16)
        self.affinity = LoopAffinity("TensorReceiver")
        self._route = route_to(endpoint, TcpArguments(False, secret_key, None, client_keys, peer_timeout_s))
        self._max_senders = count_or_none("max_senders", max_senders)
        self._max_mapped_bytes = count_or_none("max_mapped_bytes", max_mapped_bytes)
        self._max_messages = count_or_none("max_unclaimed_messages", max_unclaimed_messages)
        self._max_wait_s = seconds_or_never("max_wait_s", max_wait_s)
        self._errors = ErrorCounter()
        self._counts = new_counts(ReceiverStatistics)
        self._mailbox: Mailbox[Delivery] = Mailbox()
        self._mappings = Mappings()
        self._log = PeerLog("receiver")
        self._senders: dict[str, _Sender] = {}  # the connected ones, by their ids
        self._listener: Listener | None = None
        self._admission = Admission(
            Hello(VERSION, os.getpid(), "receiver", self._id),
            "sender",
            self._log,
            self._refusal,
            self._admitted,
            self._refused,
            self._reports,
        )
        # The calls that wait for a tensor by its handle, and the iterations that wait for any tensor.
        self._calls: dict[Key, Waiters] = {}
        self._iterations = Waiters()
        self._absence = Absence(self._route.label, self._missing)

    @property
    def id(self) -> str:
        """The id of this receiver, as its senders see it."""
        return self._id

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            self._mappings.freed.bind()
            self._listener = await self._route.listen(self._admission.connection_accepted)
            if self.affinity.is_closed:  # by another task, during the wait
                await self._close()
                raise self.affinity.closed_error()
        except BaseException:
            self._admission.close()
            self._mappings.close()
            self.affinity.close()
            raise
        self._absence.begin()
        self.affinity.settle(self, self._route.label)
        return self

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
            if asyncio._get_running_loop() is not self.affinity.open_in:
                self.affinity.check()
            key = _key_of(handle)
            item = self._find(key)
            if item is None:
                item = await self._arrival(key)
            if not copy:
                return self._take(key, item)
            try:
                # If the call is cancelled, the thread completes the copy, and pins the block until then.
                tensor = await in_thread(own_copy, item.tensor)
            except BaseException:
                # The traceback of the error refers to this frame, so the variable would keep the tensor and
                # its block alive.
                del item
                self._put_back(key)
                raise
            self._counts["tensors_copied"] += 1
            self._counts["bytes_copied"] += tensor.nbytes
            self._take(key, item)
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
            self.affinity.check()
            key = _key_of(handle)
            if self._find(key) is None:
                await self._arrival(key)
            self._put_back(key)

    def receive_nowait(self, handle: TensorHandle) -> torch.Tensor:
        """Return the tensor that a handle names, without waiting for its arrival.

        Other errors are those of `receive`.

        Raises:
            WouldBlockError: the tensor has not arrived.
        """
        with self._errors:
            self.affinity.check()
            key = _key_of(handle)
            item = self._find(key)
            if item is None:
                raise WouldBlockError(f"{_name_of(key)} has not arrived", messages=Usage(requested=1))
            return self._take(key, item)

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
        """
        if asyncio._get_running_loop() is not self.affinity.open_in:
            if self.affinity.is_closed:
                raise StopAsyncIteration
            try:
                self.affinity.check()
            except AioTensorError as error:  # not the end of the iteration
                self._errors.add(error)
                raise
        while (found := self._mailbox.hold_next()) is None:
            try:
                await self._iterations.wait()
            except asyncio.CancelledError:
                self._iterations.wake_one()  # in place of this task, which may have been woken
                raise
            if self.affinity.is_closed:
                raise StopAsyncIteration
        key, item, count = found
        self._take(key, item)
        return item if count == 1 else Delivery(item.handle, item.tensor, count, item.trace_context)

    def discard(self, handle: TensorHandle) -> None:
        """Discard the whole message of a handle, because it is no longer needed.

        Its permit and its memory return to the sender immediately. A message that has not arrived is
        discarded on arrival. Tensors that were taken stay valid. Calls that wait for the message raise
        `DiscardedError`.
        """
        with self._errors:
            self.affinity.check()
            key = _key_of(handle)
        keys = self._mailbox.discard(key.sender, key.message)
        sender = self._senders.get(key.sender)
        if sender is not None:
            sender.connection.discarded(key.message)  # has no effect before the message has begun
            sender.schedule_flush()
        self._wake(keys)

    def statistics(self) -> ReceiverStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        mailbox, mappings = self._mailbox, self._mappings
        return snapshot(
            ReceiverStatistics,
            self._counts,
            senders=len(self._senders),
            max_senders=self._max_senders,
            waiting=sum(map(len, self._calls.values())) + len(self._iterations),
            unclaimed_tensors=mailbox.unclaimed_tensors,
            unclaimed_bytes=mailbox.unclaimed_bytes,
            mapped_bytes=self._mapped_bytes(self._senders.values()),
            max_mapped_bytes=self._max_mapped_bytes,
            promised_messages=self._promised_messages(self._senders.values()),
            max_unclaimed_messages=self._max_messages,
            leases=mappings.leases,
            leased_bytes=mappings.leased_bytes,
            peak_leased_bytes=mappings.peak_leased_bytes,
            messages_discarded=mailbox.messages_discarded,
            errors=self._errors.counts(),
        )

    async def aclose(self) -> None:
        """Close the receiver: senders raise `PeerLostError`, waiting calls `ClosedError`, and iterations end.

        Received tensors stay valid; the others are dropped. Waits until the connections have accepted the
        last answers to the senders, at most for a second. Cancellation closes the receiver immediately; a
        sender may then raise an error for messages that were taken. Closing again has no effect.
        """
        self.affinity.check_place()
        if self.affinity.close() and self._listener is not None:
            with self.affinity.leaving():
                await self._close()

    async def _close(self) -> None:
        self._absence.end()
        for waiters in self._calls.values():
            waiters.wake()
        self._iterations.wake()
        # Senders that receive a `Close` connect to the next receiver, and must not find this one again.
        if self._listener is not None:
            self._listener.close()
        self._admission.close()
        # First, because the last frames report the blocks that this releases.
        self._mailbox.clear()
        self._mappings.freed.collect_all()
        senders = list(self._senders.values())
        self._senders.clear()
        for sender in senders:
            sender.close(Close(uses_memory=sender.memory.leases > 0))
            self._mappings.peer_gone(sender.memory)
        try:
            await all_accepted(senders)
            await self._mappings.settle()
        finally:
            for sender in senders:
                sender.transport.close()
            self._mappings.close()
            self._log.close()

    def _details(self) -> list[str]:
        details = [f"at {self._route.label}"]
        if self.affinity.is_open:
            details.append(f"{len(self._senders)} senders connected")
        return details

    # Tensors

    def _find(self, key: Key) -> Delivery | None:
        """Reserve a tensor and return it; return None if it has not arrived."""
        if self.affinity.is_closed:
            raise self.affinity.closed_error()
        try:
            return self._mailbox.hold(key)
        except (PeerLostError, RefusedError):
            pass  # the sender may have connected again, and a handle may be used before the new hello is read
        if self._listener is not None:
            self._listener.accept_now()
        self._admission.read_now()
        for sender in list(self._senders.values()):
            sender.transport.read_now()
        return self._mailbox.hold(key)

    async def _arrival(self, key: Key) -> Delivery:
        """Wait for a tensor, reserve it, and return it; errors are those of `receive`."""
        waiters = self._calls.get(key)
        if waiters is None:
            waiters = self._calls[key] = Waiters()
        claims, item = self._mailbox.claims, None
        claims.add(key)
        try:
            if self._max_wait_s is None:  # as `until`, without a call
                while item is None:
                    await waiters.wait()
                    item = self._find(key)
            else:
                poll, overdue = partial(self._find, key), partial(self._overdue, key)
                item = await until(poll, waiters, self._max_wait_s, overdue)
        finally:
            if claims.remove(key):
                del self._calls[key]
            if item is None:
                self._iterations.wake_one()  # an iteration may return the tensor instead
        return item

    def _take(self, key: Key, item: Delivery) -> torch.Tensor:
        """Take a reserved tensor; after the last one of a message, return the permit to the sender."""
        if self._mailbox.finish(key):
            sender = self._senders.get(key.sender)
            if sender is not None:
                sender.connection.taken(key.message)
                sender.schedule_flush()
        self._counts["tensors_taken"] += 1
        nbytes = item.tensor.nbytes
        self._counts["bytes_taken"] += nbytes
        if item.trace_context is not None and (tracer := tracing.tracer) is not None:
            name = f"{key.sender}.{key.message}.{key.tensor}"
            tracer.delivered("tensor", item.trace_context, name=name, nbytes=nbytes)
        return item.tensor

    def _put_back(self, key: Key) -> None:
        """Return a reserved tensor to the mailbox."""
        self._wake(self._mailbox.put_back(key))

    def _wake(self, keys: Sequence[Key]) -> None:
        """Wake the calls that wait for these tensors, and an iteration for each tensor without one."""
        for key in keys:
            waiters = self._calls.get(key)
            if waiters is not None:
                waiters.wake()
            elif self._iterations:
                self._iterations.wake_one()

    def _missing(self) -> str:
        """Return why a call waits for a tensor whose sender has not connected; "" if there is none."""
        for key in self._calls:
            if not self._mailbox.has_joined(key.sender):
                return f"{_name_of(key)} has not arrived: {_NOT_CONNECTED}"
        return ""

    def _overdue(self, key: Key) -> WouldBlockError:
        if self._mailbox.has_joined(key.sender):
            reason = "its sender is connected, but has not sent the whole message"
        else:
            reason = _NOT_CONNECTED
        return WouldBlockError(
            f"{_name_of(key)} has not arrived within {self._max_wait_s:g} s: {reason}",
            messages=Usage(requested=1),
        )

    # Senders

    def _mapped_bytes(self, senders: "Collection[_Sender]") -> int:
        """Return the arenas of senders, and the memory of closed senders that tensors still use."""
        return self._mappings.lingering_bytes + sum(one.memory.arena_bytes for one in senders)

    def _promised_messages(self, senders: "Collection[_Sender]") -> int:
        """Return the messages that senders may have in flight, and those left by closed senders."""
        return self._mailbox.messages_left + sum(one.hello.max_messages for one in senders)

    def _refusal(self, hello: Hello) -> str | None:
        """Return a reason to refuse a sender, with a remedy; None if it can be admitted.

        The admission of a sender covers its maximum use: all messages that it may have in flight, and its
        arena, so that no later frame can exceed a limit.
        """
        if not hello.id or not hello.max_messages:
            return "its hello has no id or no permits"
        # If it has reconnected, its earlier connection ends with its admission.
        others = [sender for sender in self._senders.values() if sender.id != hello.id]
        if self._max_senders is not None and len(others) >= self._max_senders:
            return (
                f"max_senders={self._max_senders} senders are already connected: raise max_senders of the "
                "receiver, or close another sender"
            )
        mapped, limit = self._mapped_bytes(others), self._max_mapped_bytes
        if limit is not None and mapped + hello.arena_bytes > limit:
            return (
                f"{mapped} bytes of shared memory are reserved for other senders and this sender requests "
                f"{hello.arena_bytes}, more than max_mapped_bytes={limit} allows: raise max_mapped_bytes of "
                "the receiver, or lower arena_bytes of the senders"
            )
        promised, most = self._promised_messages(others), self._max_messages
        if most is not None and promised + hello.max_messages > most:
            return (
                f"{promised} messages in flight are reserved for other senders and this sender requests "
                f"{hello.max_messages}, more than max_unclaimed_messages={most} allows: raise "
                "max_unclaimed_messages of the receiver, or lower max_concurrent_videos of the senders"
            )
        return None

    def _refused(self, hello: Hello | None, reason: str) -> None:
        self._counts["senders_refused"] += 1
        if hello is not None and hello.role == "sender" and hello.id and hello.id not in self._senders:
            error = RefusedError(reason, pid=hello.pid)
            self._wake(self._mailbox.lose(hello.id, error, hello.pid))

    def _admitted(self, transport: Transport, connection: Connection) -> None:
        sender = _Sender(transport, connection, self)
        earlier = self._senders.get(sender.id)
        if earlier is not None:  # the end of its connection is still unread
            earlier.end(earlier.connection.lost("the sender connected again", is_retried=True))
        transport.start(sender)
        try:
            hello = sender.hello
            keys = self._mailbox.join(sender.id, hello.pid, hello.max_messages, hello.first)
        except ProtocolError as error:
            sender.violated(error)
            return
        self._senders[sender.id] = sender
        connection.admit()
        sender.flush()
        self._wake(keys)

    def _lost(self, sender: "_Sender", loss: Loss) -> None:
        """Remove a sender whose connection has ended: a closed one keeps its whole messages."""
        if self._senders.get(sender.id) is not sender:
            return  # it was not admitted, or this receiver is closing
        del self._senders[sender.id]
        self._mappings.peer_gone(sender.memory)
        if loss.is_clean:
            keys = self._mailbox.leave(sender.id)
        else:
            self._counts["senders_refused" if sender.is_refused else "senders_lost"] += 1
            cause = loss.error.__cause__
            error = cause if isinstance(cause, AioTensorError) else type(loss.error)(loss.reason)
            keys = self._mailbox.lose(sender.id, error)
            self._mappings.freed.collect_all()  # the mailbox has just freed the tensors of the sender
        self._wake(keys)

    def _reports(self) -> list[ReceiverReport]:
        """Return the statistics and the summaries of the senders, for an inspector."""
        logger.debug("a process inspects this receiver", extra={"event": "receiver_inspected"})
        senders = [sender.summary() for sender in self._senders.values()]
        statistics = bounded(self.statistics())
        return [
            ReceiverReport(
                statistics, tuple(senders[start : start + MAX_ROWS]), start + MAX_ROWS >= len(senders)
            )
            for start in range(0, max(1, len(senders)), MAX_ROWS)
        ]


class _Sender(Session):
    """The connection of one sender; its tensors go to the mailbox of the receiver."""

    def __init__(self, transport: Transport, connection: Connection, receiver: TensorReceiver) -> None:
        super().__init__(transport, connection, receiver._log, receiver._mappings.freed)
        self.id = self.hello.id
        self.name = f"sender {self.id}"
        self.memory = PeerMemory(self.hello.arena_bytes, self.release)
        self._receiver = receiver
        self._mailbox = receiver._mailbox
        self._mappings = receiver._mappings

    def summary(self) -> SenderSummary:
        """Return the summary for an inspector."""
        limits = self.hello
        return SenderSummary(
            self.id,
            limits.pid,
            limits.max_messages,
            limits.arena_bytes,
            self.connection.messages,
            self.connection.in_flight,
            *self._mailbox.unclaimed_of(self.id),
            self.memory.leases,
            self.memory.leased_bytes,
        )

    def received(self, frames: Sequence[Frame], descriptors: list[int]) -> None:
        """Process the frames of a record."""
        keys: list[Key] = []
        mailbox, sender = self._mailbox, self.id
        try:
            for frame in frames:
                match frame:
                    case Put(message=number, block=block):
                        if not mailbox.wants(sender, number):
                            self._discard(number)
                            if block is not None:
                                self.release(block)
                            continue
                        tensor = self._mappings.open(self.memory, frame)
                        trace = None
                        if frame.trace is not None and (tracer := tracing.tracer) is not None:
                            trace = tracer.arrived(frame.trace)
                        handle = TensorHandle(
                            sender, number, frame.tensor, frame.dtype, frame.shape, frame.device
                        )
                        key = Key(sender, number, frame.tensor)
                        item = Delivery(handle, tensor, 1, trace)
                        keys += mailbox.put(key, item, tensor.nbytes, last=frame.last)
                    case End():
                        if not frame.count:
                            raise ProtocolError(f"it sent message {frame.message} without a tensor")
                        keys += mailbox.end(sender, frame.message)
                    case Begin():
                        if not mailbox.wants(sender, frame.message):
                            self._discard(frame.message)
                    case Discard():
                        keys += mailbox.discard(sender, frame.message)
                    case Attach():
                        mapped = self._receiver._mapped_bytes(self._receiver._senders.values())
                        limit = self._receiver._max_mapped_bytes
                        left = None if limit is None else limit - mapped
                        self.map(self._mappings, self.memory, frame, descriptors, left)
                    case Detach():
                        self._mappings.detach(self.memory, frame.segment)
                    case Close():
                        self.closed(frame)
                    case _:
                        raise ProtocolError("it sent a frame that no sender sends")
                if self.is_over:
                    break
        finally:
            if keys:
                self._receiver._wake(keys)

    def _discard(self, message: int) -> None:
        self.connection.discarded(message)
        self.schedule_flush()

    def lost(self, loss: Loss) -> None:
        """Handle the end of the session."""
        self._receiver._lost(self, loss)


def _key_of(handle: TensorHandle) -> Key:
    """Return the key of a handle; raise `TypeError` or `ValueError` if it is not one."""
    if not isinstance(handle, TensorHandle):
        raise TypeError(
            "handle must be an aiotensor.TensorHandle, as returned by `send`, got "
            f"{type(handle).__name__!r}: decode it with its type, for example msgspec.msgpack.decode(data, "
            "type=aiotensor.TensorHandle)"
        )
    if handle.message < 0 or handle.tensor < 0:
        raise ValueError(f"this handle is invalid because its numbers are negative: {handle}")
    return Key(handle.sender, handle.message, handle.tensor)


def _name_of(key: Key) -> str:
    return f"tensor {key.tensor} of message {key.message} of sender {key.sender}"
