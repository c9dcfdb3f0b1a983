"""The protocol between a sender and its receiver over one link; messages are identified by number.

A message is assigned its number with its first announcement, so the receiver sees every number once and
never sees a message that was discarded earlier. Numbering continues after the link reconnects.
"""

import logging
import os
from collections.abc import Callable, Iterable
from typing import Protocol

from torch.nn import Parameter

from aiotensor.errors import (
    AioTensorError,
    ClosedError,
    PeerLostError,
    ProtocolError,
    RefusedError,
    again,
)
from aiotensor.protocol.frames import (
    MAX_RECORD_BYTES,
    VERSION,
    Attach,
    Bye,
    Discard,
    Discarded,
    End,
    Hello,
    Inquire,
    Put,
    Release,
    Taken,
    ToSender,
    Welcome,
    decode_to_sender,
    encode,
)
from aiotensor.protocol.versions import mismatch
from aiotensor.runtime.logs import logger_of
from aiotensor.runtime.waiting import Waiters
from aiotensor.sending.message import Message, State
from aiotensor.sending.outbox import Outbox
from aiotensor.sending.statistics_replies import Accountant
from aiotensor.tensors.allocations import Block
from aiotensor.tensors.dtypes import DTYPE_NAMES
from aiotensor.tensors.placement import ARENA, Placed
from aiotensor.tensors.source import Source
from aiotensor.transports.base import SenderLink
from aiotensor.types import SenderStatistics, TensorHandle

__all__ = ["Conversation", "ConversationEvents"]

logger = logger_of("sender")


class ConversationEvents(Protocol):
    """Callbacks through which a conversation notifies its sender."""

    def receiver_found(self) -> None:
        """Handle a receiver that messages can be sent to."""

    def message_ended(self, message: Message, state: State) -> None:
        """Handle a message that the receiver took or discarded."""

    def blocks_released(self, blocks: Iterable[int]) -> None:
        """Handle blocks that the receiver released.

        Raises:
            ProtocolError: the receiver did not hold them.
        """

    def receiver_lost(self, error: AioTensorError, pid: int | None) -> int:
        """Handle a receiver that is gone or refuses this sender; return the number of lost messages.

        Args:
            error: the reason.
            pid: the id of the receiver's process; None if it is not known.
        """


class Conversation:
    """Exchange frames with one receiver at a time.

    Args:
        sender: the sender's id.
        link: the connection to the receiver.
        max_messages: the maximum number of messages in flight.
        max_bytes: the maximum number of bytes of shared memory in use.
        events: the object that is notified.
    """

    def __init__(
        self, sender: str, link: SenderLink, max_messages: int, max_bytes: int, events: ConversationEvents
    ) -> None:
        self.link = link
        self.is_connected = False
        self.is_admitted = False  # connected, and the receiver has confirmed it
        self.needs_admission = False  # a receiver refused this sender, and none has admitted it since
        self.failure: AioTensorError | None = None  # no receiver is searched for until a call asks again
        self.receiver_pid: int | None = None
        self.receiver_id: str | None = None
        self.receivers_lost = 0
        self._sender = sender
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._events = events
        self._refusal: RefusedError | None = None  # from a receiver that may still be running
        self._announced: dict[int, Message] = {}
        self._admissions = Waiters()
        self._is_ending = False
        self._next_number = 0

    async def open(self, statistics: Callable[[], SenderStatistics | None]) -> None:
        """Start connecting.

        Args:
            statistics: called when the receiver requests the statistics of this sender. The link keeps a
                reference to it, so it must not keep a reference to the sender.
        """
        self._outbox = Outbox(self._write)
        self._accountant = Accountant(self.link, self._outbox.add, statistics)
        await self.link.open(self)

    async def say_goodbye(self, *, uses_memory: bool) -> None:
        """Send the closing frame to the receiver; wait until the link has accepted it.

        Args:
            uses_memory: whether tensors allocated by this sender still exist. If so, the receiver must not
                return memory to the system, even memory that the receiver itself does not use.
        """
        self._is_ending = True
        self._admissions.wake()
        self._accountant.stop()
        if self.is_connected:
            self._outbox.add(Bye(uses_memory=uses_memory))
            self._outbox.flush()
            await self.link.flush()
        await self._accountant.settle()

    async def admission(self) -> None:
        """Wait until a receiver has admitted this sender, even if others connect and disconnect first.

        Raises:
            RefusedError: a receiver refused this sender during this call.
            AioTensorError: no other receiver will be searched for; the error states the reason.
            ClosedError: the sender was closed.
        """
        if self.link.comes_back and not self.is_connected:
            self.failure = None  # from an earlier attempt
            self._look_again()
        while not self.is_admitted:
            if self._is_ending:
                raise ClosedError("this TensorSender was closed")
            if self.failure is not None:
                raise again(self.failure)
            await self._admissions.wait()

    @property
    def has_room(self) -> bool:
        """Return whether a message can be announced.

        After a refusal, no message can be announced until a receiver has admitted this sender: the next
        refusal would lose the message silently, because its call would already have returned.
        """
        return self.link.is_ready and not self.needs_admission

    async def room(self) -> None:
        """Wait until `has_room` may have changed, or `wake` is called."""
        if self.needs_admission and self.is_connected:
            await self._admissions.wait()
        else:
            self._look_again()
            await self.link.ready()

    def wake(self) -> None:
        """Wake all calls of `room`."""
        self.link.wake()
        self._admissions.wake()

    def ask_again(self) -> AioTensorError | None:
        """Start to reconnect after a refusal; return the refusal if its receiver may still be running."""
        self._look_again()
        return None if self._refusal is None else again(self._refusal)

    def close(self) -> None:
        """Close the link."""
        self.is_connected = self.is_admitted = False
        self._outbox.clear()
        self.link.close()

    def find(self, number: int) -> Message | None:
        """Return the message with this number if it was announced and has not ended."""
        return self._announced.get(number)

    # Outgoing frames

    def attach(self, block: Block) -> None:
        """Send the segment that contains a block, unless the receiver already has it.

        Raises:
            OSError: the kernel refused the descriptor; nothing was sent.
        """
        segment = block.place.segment
        if not segment.is_attached:
            self._outbox.flush()
            if not self.is_connected:
                return  # the flush broke the link; the caller finds its message lost
            # Sent immediately and in a separate record, so that the caller receives any error.
            attach = encode(Attach(segment.number, ARENA, segment.nbytes))
            self.link.write(attach, [segment.descriptor])
            segment.is_attached = True

    def announce(
        self, message: Message, source: Source, placed: Placed, block: int | None, *, last: bool
    ) -> TensorHandle:
        """Announce a tensor. From this point the receiver owns it."""
        if message.number is None:
            message.number = self._next_number
            self._next_number += 1
            self._announced[message.number] = message
        dtype = DTYPE_NAMES[source.dtype]
        device, shape = "cpu" if source.is_cpu else str(source.device), tuple(source.shape)
        put = Put(
            message.number,
            message.count,
            dtype,
            shape,
            device,
            placed.placement,
            placed.payload,
            block,
            last,
            source.requires_grad,
            type(source) is Parameter,
        )
        self._outbox.add(put, len(placed.payload))
        return TensorHandle(self._sender, message.number, message.count, dtype, shape, device)

    def flush(self) -> None:
        """Send the queued frames now rather than at the end of this event loop iteration."""
        self._outbox.flush()

    def complete(self, message: Message) -> None:
        """Announce the end of a message, after all its tensors."""
        if message.number is not None:
            self._outbox.add(End(message.number, message.count))

    def discard(self, message: Message) -> None:
        """Discard a message at the receiver, if it was announced."""
        if message.number is not None:
            self._outbox.add(Discard(message.number))

    def forget(self, message: Message) -> None:
        """Remove a message that has ended; later answers to it have no effect."""
        if message.number is not None:
            self._announced.pop(message.number, None)

    # Incoming frames

    def introduction(self) -> bytes:
        """Reset the connection state, and return the first record of a connection."""
        self.is_connected, self.is_admitted = True, False
        self.failure = None
        self._outbox.clear()
        self._events.receiver_found()
        return encode(
            Hello(
                VERSION,
                os.getpid(),
                self._sender,
                self._max_messages,
                self._max_bytes,
                self._next_number,
            )
        )

    def record_arrived(self, data: bytes | memoryview) -> None:
        """Process frames from the receiver."""
        try:
            for frame in decode_to_sender(data):
                if self.is_connected:
                    self._handle_frame(frame)
        except ProtocolError as error:
            logger.error(
                "the receiver (pid %s) broke the protocol: %s",
                self.receiver_pid,
                error,
                extra={
                    "event": "protocol_broken",
                    "sender_id": self._sender,
                    "peer_pid": self.receiver_pid,
                    "reason": str(error),
                },
            )
            # A new exception without a traceback: the traceback of the original one keeps the record alive.
            self._drop(f"it broke the protocol: {error}", ProtocolError(*error.args), retry=False)

    def link_lost(self, error: AioTensorError) -> None:
        """Handle a receiver that is gone or refuses this sender."""
        if isinstance(error, PeerLostError):
            self._lose(self._peer_lost(str(error)), is_retried=self.link.comes_back)
        else:
            self._lose(error, is_retried=False)

    def _handle_frame(self, frame: ToSender) -> None:
        match frame:
            case Taken():
                for number in frame.messages:
                    message = self._answered(number)
                    if message is not None:
                        if message.state is not State.WHOLE:
                            raise ProtocolError(f"it took message {number}, which was not whole")
                        self._events.message_ended(message, State.TAKEN)
            case Release():
                self._events.blocks_released(frame.blocks)
            case Discarded():
                for number in frame.messages:
                    message = self._answered(number)
                    if message is not None:
                        self._events.message_ended(message, State.DISCARDED)
            case Welcome():
                self.receiver_pid, self.receiver_id = frame.pid, frame.receiver
                if frame.version != VERSION:
                    self._refused(mismatch(frame.version, VERSION))
                    return
                # Never above the limit of this side's sockets, even if the receiver accepts larger frames.
                self._outbox.max_bytes = min(frame.max_frame_bytes, MAX_RECORD_BYTES)
                if frame.is_admitted:
                    self.is_admitted, self._refusal, self.needs_admission = True, None, False
                    self._admissions.wake()
                    self._events.receiver_found()
            case Inquire():
                self._accountant.ask()
            case Bye(""):
                self._drop("it closed", retry=True)
            case Bye(is_refusal=True):
                self._refused(frame.reason)
            case Bye():
                self._drop(f"it closed the connection: {frame.reason}", retry=frame.retry)

    def _answered(self, number: int) -> Message | None:
        """Return the message of an answer, or None if this side has already discarded it."""
        message = self._announced.get(number)
        if message is None and number >= self._next_number:
            raise ProtocolError(f"it answered message {number}, which was never sent")
        return message

    def _look_again(self) -> None:
        self.link.look_again()
        if not self.is_connected and not self.link.is_kept_waiting:
            self._refusal = None  # that receiver is gone

    def _write(self, record: bytes) -> None:
        if not self.is_connected:
            return  # the link broke earlier in this iteration, and the affected callers were notified
        try:
            self.link.write(record)
        except OSError as error:
            self._drop(f"writing to it failed: {error}", retry=True)

    def _drop(self, reason: str, cause: ProtocolError | None = None, *, retry: bool) -> None:
        self.link.drop(retry=retry)
        error = self._peer_lost(reason)
        error.__cause__ = cause
        self._lose(error, is_retried=retry and self.link.comes_back)

    def _refused(self, reason: str) -> None:
        """Handle a refusal: the link does not reconnect until a call requests it."""
        self.link.drop(retry=False)
        text = f"{self._receiver_name} refused this sender: {reason}"
        self._lose(RefusedError(text, pid=self.receiver_pid), is_retried=False)

    @property
    def _receiver_name(self) -> str:
        return "the receiver" if self.receiver_pid is None else f"the receiver (pid {self.receiver_pid})"

    def _peer_lost(self, reason: str) -> PeerLostError:
        return PeerLostError(f"{self._receiver_name} is gone: {reason}", pid=self.receiver_pid)

    def _lose(self, error: AioTensorError, *, is_retried: bool) -> None:
        was_connected, self.is_connected = self.is_connected, False
        self.is_admitted = False
        self.failure = None if is_retried else error
        self._refusal = error if isinstance(error, RefusedError) else None
        self.needs_admission |= self._refusal is not None
        pid, self.receiver_pid, self.receiver_id = self.receiver_pid, None, None
        self._outbox.clear()
        self._accountant.forget()
        lost = self._events.receiver_lost(error, pid if self.link.peer_pid is None else self.link.peer_pid)
        self._admissions.wake()
        if was_connected:
            self.receivers_lost += 1
            logger.log(
                logging.WARNING if lost or isinstance(error, RefusedError) else logging.INFO,
                "%s; %s messages in flight are lost",
                error,
                lost,
                extra={
                    "event": "receiver_lost",
                    "sender_id": self._sender,
                    "peer_pid": pid,
                    "reason": str(error),
                    "messages_lost": lost,
                },
            )
