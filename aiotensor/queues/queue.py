"""The public queue."""

from typing import Any, TypeVar, Unpack, overload

from aiotensor.queues.consumer import QueueConsumer
from aiotensor.queues.description import QueueDescription, QueueOptions
from aiotensor.queues.producer import QueueProducer

__all__ = ["MessageQueue"]

M = TypeVar("M")


class MessageQueue(QueueDescription[M]):
    """A bounded queue of messages between processes of one machine, with several producers and consumers.

    A queue can be pickled, so it can be an argument of a process that `multiprocessing` starts with any start
    method. Open a producer or a consumer of the queue in each process::

        async with queue.producer() as producer:
            await producer.put({"number": 1, "frames": frames})

        async with queue.consumer() as consumer:
            async for message in consumer:  # until all producers have closed
                print(message["number"], message["frames"].shape)

    Each message is taken by one consumer, and is lost if that consumer dies afterwards. At most two messages
    of each producer wait in a consumer, and the others in the producer, so that messages go to the consumers
    that take them. If a consumer takes a message and dies while its producer is stopped and cannot be
    notified, the message may be taken a second time.

    The queue creates a folder for its sockets and locks. Close the queue, or use it in a ``with`` block, in
    the process that has created it, after its producers and consumers. Without `folder`, the end of this
    process closes it, too.

    Args:
        message_type: the type of the messages, as msgspec accepts it; by default, messages may have any type.
            Consumers validate the messages.
        producers: the number of producers. Consumers reach the end of the queue when as many have closed. A
            producer that ended without closing can be replaced by another one, at any time.
        consumers: the maximum number of consumers at the same time. A consumer that has closed or died can
            be replaced by another one.
        max_messages: the maximum number of messages of each producer that are in the queue: accepted by
            `put`, and not taken.
        arena_bytes: the shared memory of each producer in bytes, for its untaken messages and for the tensors
            that consumers keep. It is allocated when it is used.
        max_body_bytes: the maximum size of a message without its tensors and arrays, in bytes; None for no
            limit.
        redeliver: whether a message that was not taken is delivered to another consumer if its consumer dies
            or closes. If not, later calls of its producer raise `PeerLostError`.
        grace_s: the time in seconds for which producers wait for another consumer if all consumers have died
            or closed; then their calls raise `PeerLostError`. None for no limit. Producers wait for the first
            consumer without limit.
        folder: the absolute path of the folder, for processes that do not inherit the queue: each of them
            creates a queue with the same arguments, and closes it at its end. It is created if necessary,
            for this user only; its parent must exist. By default, the queue creates a new folder in the
            folder for temporary files, and removes it at the end.

    Raises:
        TypeError: an argument has the wrong type, or msgspec cannot decode the message type.
        ValueError: a limit is not positive, or the path of the folder is not absolute, or too long for a
            socket.
        UsageError: the folder belongs to a queue with other numbers of producers and consumers, or to another
            user.
        OSError: the folder cannot be created; a `FileNotFoundError` if its parent does not exist.
    """

    @overload
    def __init__(self: "MessageQueue[Any]", **options: Unpack[QueueOptions]) -> None: ...

    @overload
    def __init__(self, message_type: type[M], **options: Unpack[QueueOptions]) -> None: ...

    def __init__(self, message_type: Any = Any, **options: Unpack[QueueOptions]) -> None:
        super().__init__(message_type, **options)

    def producer(self) -> QueueProducer:
        """Return a new producer: ``async with queue.producer() as producer``."""
        return QueueProducer(self._settings)

    def consumer(self) -> QueueConsumer[M]:
        """Return a new consumer: ``async with queue.consumer() as consumer``."""
        return QueueConsumer(self._settings)
