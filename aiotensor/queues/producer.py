"""A producer: puts messages into a queue."""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from aiotensor.errors import ClosedError
from aiotensor.queues.deliveries import Deliveries
from aiotensor.queues.folder import Slot
from aiotensor.queues.settings import QueueSettings
from aiotensor.queues.statistics import ProducerStatistics
from aiotensor.runtime.affinity import LoopAffinity, LoopObject
from aiotensor.runtime.arguments import seconds
from aiotensor.runtime.waiting import at_most

__all__ = ["QueueProducer"]


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
        self._deliveries = Deliveries(settings)
        self._stack = AsyncExitStack()
        self._slot: Slot | None = None
        self._is_aborted = False

    async def __aenter__(self) -> Self:
        self.affinity.enter()
        folder = self._settings.folder
        try:
            self._slot = folder.claim("producer")
            self._stack.callback(folder.release, self._slot)
            await self._stack.enter_async_context(self._deliveries)
        except BaseException:
            self.affinity.close()
            await self._stack.aclose()
            raise
        return self

    async def put(self, message: object, *, timeout: float | None = None) -> None:
        """Put a message into the queue: accept it, and deliver it to one consumer.

        The message may be changed when the call has returned; do not change any part of it before. One
        consumer gets the messages of a producer in their order.

        Args:
            message: an object of the message type of the queue, with tensors and arrays anywhere in it.
            timeout: the maximum time in seconds to wait; None for no limit.

        Waits while the consumers have not taken `max_messages` earlier messages of this producer, while not
        enough of `arena_bytes` is free, and while threads encode and copy a large message. If the call is
        cancelled or raises an error, the message is not in the queue.

        Raises:
            WouldBlockError: the wait exceeded `timeout`, or all memory is used by messages that wait for more
                of it.
            PeerLostError: an earlier message cannot be delivered: its consumer was lost, and the queue does
                not redeliver messages; or all consumers have ended, and none has opened for `grace_s`.
            RemoteError: a consumer could not decode an earlier message, or it has another type. This error is
                raised once, and logged by the consumer; the other messages are delivered.
            TooLargeError: the tensors exceed `arena_bytes`, or the rest of the message `max_body_bytes`.
            TypeError: part of the message cannot be encoded; `TensorEncoder.encode` lists further errors.
            UnsupportedTensorError: a tensor would arrive changed.
            OSError: the machine has no shared memory, no descriptors or no threads left.
            ClosedError: this producer was closed, perhaps during the call.
        """
        self.affinity.check()
        if timeout is not None:
            timeout = seconds("timeout", timeout)
        deliveries = self._deliveries
        deliveries.check()
        box = [message]
        del message  # so that only the caller keeps its tensors alive
        async with at_most(timeout, deliveries.full):
            await deliveries.put(box)

    def put_nowait(self, message: object) -> None:
        """Put a message into the queue as `put` does, or raise `WouldBlockError` instead of waiting.

        This thread encodes and copies even a large message. Arguments and errors are otherwise those of
        `put`.
        """
        self.affinity.check()
        self._deliveries.check()
        self._deliveries.put_now([message])

    async def join(self) -> None:
        """Wait until consumers have taken all messages of this producer.

        Cancellation has no side effects. The call raises the errors of `put` about earlier messages.
        """
        self.affinity.check()
        await self._deliveries.all_taken()

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
        deliveries = self._deliveries
        if not self.affinity.close():
            return
        closed = ClosedError("this QueueProducer was closed")
        deliveries.stop_waiting(closed)
        try:
            if not self._is_aborted:
                await deliveries.all_taken()
                if self._slot is not None:
                    self._slot.mark_closed()
        finally:
            deliveries.drop(closed)
            await self._stack.aclose()

    def statistics(self) -> ProducerStatistics:
        """Return the current usage and the totals since opening; also available after closing."""
        self.affinity.check_place()
        return self._deliveries.totals()

    def _details(self) -> list[str]:
        details = [f"of {self._settings.folder.path}"]
        if self.affinity.is_open:
            details.append(f"{self._deliveries.totals().messages} messages not taken")
        return details


def expect_no_first_consumer(producer: QueueProducer) -> None:
    """Wait for the first consumer only as long as for others, which is `grace_s`: the program ends."""
    producer._deliveries.expect_no_first_consumer()
