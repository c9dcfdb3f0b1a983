"""A producer: puts messages into a queue."""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from aiotensor.channel.client import MessageClient
from aiotensor.channel.options import part_limits
from aiotensor.codec.payload import Payload, pack
from aiotensor.errors import ClosedError, TooLargeError
from aiotensor.protocol.parts import check_parts
from aiotensor.queues.deliveries import Deliveries
from aiotensor.queues.folder import Kind, Slot
from aiotensor.queues.settings import QueueSettings
from aiotensor.queues.statistics import ProducerStatistics
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import seconds
from aiotensor.runtime.waiting import at_most
from aiotensor.sender import TensorSender

__all__ = ["QueueProducer"]

# One message waits in the consumer, while the permit of the previous one is on its way back.
_PERMITS = 2


class QueueProducer(LoopObject):
    """Put messages into a queue; made by `MessageQueue.producer`.

    Open it with ``async with``, and share it between the tasks of that event loop. The end of the block waits
    until consumers have taken all messages, and then closes the producer. If the block ends with an
    exception, or the wait is cancelled, the messages that no consumer has taken are dropped. The consumers
    then raise `PeerLostError` at the end, unless another producer takes the place of this one.

    Opening raises `UsageError` if the queue has no free place for a producer, and `ClosedError` if the queue
    was closed. It does not wait for consumers.
    """

    def __init__(self, settings: QueueSettings) -> None:
        self.affinity = LoopAffinity("QueueProducer")
        self._settings = settings
        self._limits = part_limits(None, settings.max_body_bytes)
        self._stack = AsyncExitStack()
        self._slot: Slot | None = None
        self._deliveries: Deliveries | None = None  # None before opening
        self._is_aborted = False

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        try:
            client = await self._open()
            self.affinity.check()  # another task may have closed it in the meantime
        except BaseException:
            self.affinity.close()
            await self._stack.aclose()
            raise
        self._deliveries = Deliveries(client, self._settings)
        self._stack.push_async_callback(self._deliveries.end)
        return self

    async def _open(self) -> MessageClient[None]:
        folder = self._settings.folder
        self._slot = folder.claim(Kind.PRODUCER)
        self._stack.callback(folder.release, self._slot)
        addresses = [folder.address(number) for number in range(folder.consumers)]
        client: MessageClient[None] = MessageClient(
            addresses,
            sender=[TensorSender(address, _PERMITS, self._settings.arena_bytes) for address in addresses],
            reply_type=type(None),
        )
        return await self._stack.enter_async_context(client)

    def _opened(self) -> Deliveries:
        self.affinity.check()
        if self._deliveries is None:
            raise AssertionError("a producer that is open has its deliveries")
        return self._deliveries

    async def put(self, message: object, *, timeout: float | None = None) -> None:
        """Put a message into the queue: accept it, and deliver it to one consumer.

        Do not change the tensors and arrays of the message until a consumer has taken it: they belong to the
        queue. Other parts of the message may be changed when the call has returned. One consumer gets the
        messages of a producer in their order.

        Args:
            message: an object of the message type of the queue, with tensors and arrays anywhere in it.
            timeout: the maximum time in seconds to wait; None for no limit.

        Waits while the consumers have not taken `max_messages` earlier messages of this producer, and while a
        thread encodes a large message. If the call is cancelled or raises an error, the message is not in the
        queue.

        Raises:
            WouldBlockError: the wait exceeded `timeout`.
            PeerLostError: an earlier message cannot be delivered: its consumer was lost, and the queue does
                not redeliver messages; or all consumers have ended, and none has opened for `grace_s`.
            RemoteError: a consumer could not decode an earlier message, or it has another type. This error is
                raised once; the other messages are delivered.
            TooLargeError: the tensors exceed `arena_bytes`, the rest of the message exceeds `max_body_bytes`,
                or there are too many tensors.
            TypeError: part of the message cannot be encoded; `TensorEncoder.encode` lists further errors.
            UnsupportedTensorError: a tensor would arrive changed.
            ClosedError: this producer was closed, perhaps during the call.
        """
        deliveries = self._opened()
        if timeout is not None:
            timeout = seconds("timeout", timeout)
        deliveries.check()
        box = [message]
        del message  # so that only the queue and the caller keep its tensors alive
        payload = await pack(
            box, has_sender=True, body_limit=lambda: self._limits.body_bytes, peer="consumer"
        )
        self._check_size(payload)
        async with at_most(timeout, deliveries.full):
            permit = await deliveries.gate.acquire(1)
        try:
            self.affinity.check()
        except BaseException:
            deliveries.gate.release(permit)
            raise
        deliveries.begin(payload, permit)

    def put_nowait(self, message: object) -> None:
        """Put a message into the queue as `put` does, or raise `WouldBlockError` instead of waiting.

        This thread encodes even a large message. Arguments and errors are otherwise those of `put`.
        """
        deliveries = self._opened()
        payload = Payload(has_sender=True)
        payload.encode([message])
        self._check_size(payload)
        deliveries.begin(payload, deliveries.acquire_now())

    def _check_size(self, payload: Payload) -> None:
        check_parts(payload.parts, self._limits, "consumer")
        nbytes, limit = sum(tensor.nbytes for tensor in payload.tensors), self._settings.arena_bytes
        if nbytes > limit:
            raise TooLargeError(
                f"the tensors of this message have {nbytes} bytes, and arena_bytes={limit}: pass a larger "
                "arena_bytes to MessageQueue, or put several messages",
                limit=limit,
                requested=nbytes,
            )

    async def join(self) -> None:
        """Wait until consumers have taken all messages of this producer.

        Cancellation has no side effects. The call raises the errors of `put` about earlier messages.
        """
        await self._opened().all_taken()

    def abort(self) -> None:
        """Drop the messages that no consumer has taken, and close without waiting for consumers.

        Consumers raise `PeerLostError` at the end, unless another producer takes the place of this one. Call
        `aclose` afterwards, or leave the block.
        """
        self.affinity.check_place()
        self._is_aborted = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.affinity.is_left_in_child(error):
            self._is_aborted = self._is_aborted or error is not None
            await self.aclose()

    async def aclose(self) -> None:
        """Close the producer after consumers have taken all its messages; waiting calls raise `ClosedError`.

        Cancellation ends the wait, and drops the messages that no consumer has taken. Closing again has no
        effect. The call raises the errors of `put` about earlier messages; the producer is closed
        nevertheless.
        """
        self.affinity.check_place()
        was_open, deliveries = self.affinity.close(), self._deliveries
        if not was_open or deliveries is None:  # None: it is being opened by another task
            return
        deliveries.gate.fail_waiting(lambda: ClosedError("this QueueProducer was closed"))
        try:
            if not self._is_aborted:
                await deliveries.all_taken()
                if self._slot is not None:
                    self._slot.mark_closed()
        finally:
            await self._stack.aclose()

    def statistics(self) -> ProducerStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        limit, deliveries = self._settings.max_messages, self._deliveries
        if deliveries is None:
            return ProducerStatistics(limit, 0, 0, 0, 0, 0)
        return ProducerStatistics(
            limit,
            len(deliveries),
            deliveries.gate.peak,
            deliveries.gate.waiting,
            deliveries.taken,
            deliveries.redelivered,
        )

    def _details(self) -> list[str]:
        details = [f"of {self._settings.folder.path}"]
        if self.affinity.is_open and self._deliveries is not None:
            details.append(f"{len(self._deliveries)} messages not taken")
        return details


def expect_no_first_consumer(producer: QueueProducer) -> None:
    """Wait for the first consumer only as long as for others, which is `grace_s`: the program ends."""
    producer._opened().expects_consumer = False
