"""Blocking queues, with their producers and consumers."""

from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Generic

from aiotensor import queues
from aiotensor.blocking.portal import BlockingObject, UntilClosed
from aiotensor.queues.queue import QueueDescription
from aiotensor.types import M


class QueueProducer(BlockingObject[queues.QueueProducer, queues.ProducerStatistics]):
    """Put messages into a queue from threads; made by `MessageQueue.producer`.

    Open it with ``with``, and share it between the threads. It is used like an
    `aiotensor.queues.QueueProducer`, with the same errors.
    """

    def put(self, message: object, *, timeout: float | None = None) -> None:
        """Put a message into the queue, which delivers it to one consumer.

        Waiting and errors are those of `aiotensor.queues.QueueProducer.put`: after a timeout, the call raises
        `WouldBlockError`, and the message is not in the queue.
        """
        self.wait_for(partial(self.inner.put, message, timeout=timeout))

    def put_nowait(self, message: object) -> None:
        """Put a message into the queue, or raise `WouldBlockError` instead of waiting for capacity."""
        self.call(self.inner.put_nowait, message)

    def join(self, *, timeout: float | None = None) -> None:
        """Wait until consumers have taken all messages of this producer.

        Raises `TimeoutError` after a timeout, which has no side effects.
        """
        self.wait_for(self.inner.join, timeout=timeout)

    def abort(self) -> None:
        """Drop the messages that no consumer has taken; `close` then does not wait for consumers."""
        self.call(self.inner.abort)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.is_closed and not self.inner.affinity.is_left_in_child(error):
            self.abort()
        super().__exit__(kind, error, trace)


class QueueConsumer(BlockingObject[queues.QueueConsumer[M], queues.ConsumerStatistics], Generic[M]):
    """Take messages from a queue in threads; made by `MessageQueue.consumer`.

    Open it with ``with``, and share it between the threads. It is used like an
    `aiotensor.queues.QueueConsumer`, with the same errors.
    """

    def get(self, *, timeout: float | None = None) -> M:
        """Take the next message of any producer, and return it.

        Waiting and errors are those of `aiotensor.queues.QueueConsumer.get`: after a timeout, the call raises
        `WouldBlockError`, and no message is lost.
        """
        return self.take(None, partial(self.inner.get, timeout=timeout))

    def get_nowait(self) -> M:
        """Take the next message if one has arrived, or raise `WouldBlockError`."""
        return self.take_now(None, self.inner.get_nowait)

    def __iter__(self) -> Iterator[M]:
        """Iterate over the messages, until all producers have closed or this consumer is closed."""
        return UntilClosed(self.get)


class MessageQueue(QueueDescription[M]):
    """A bounded queue of messages between processes of one machine, for threads without an event loop.

    Arguments and errors are those of `aiotensor.queues.MessageQueue`, and so is the use of producers and
    consumers, with ``with`` and ``for`` in place of ``async with`` and ``async for``.
    """

    def producer(self) -> QueueProducer:
        """Return a new producer: ``with queue.producer() as producer``."""
        return QueueProducer(queues.QueueProducer(self._settings))

    def consumer(self) -> QueueConsumer[M]:
        """Return a new consumer: ``with queue.consumer() as consumer``."""
        return QueueConsumer(queues.QueueConsumer(self._settings))
