"""The public queue."""

import os
import shutil
import tempfile
from functools import partial
from multiprocessing import util
from types import TracebackType
from typing import Any, Generic, Self

from aiotensor.codec import TensorDecoder
from aiotensor.queues.consumer import QueueConsumer
from aiotensor.queues.folder import Folder, QueueSettings
from aiotensor.queues.producer import QueueProducer
from aiotensor.runtime.arguments import count, count_or_none, grace_period
from aiotensor.types import M

# `multiprocessing` runs finalizers of a negative priority after it has joined the child processes, which may
# still use the queue.
_AFTER_CHILDREN = -100


class QueueDescription(Generic[M]):
    """The base of the asynchronous and the blocking queue: settings, pickling and the folder."""

    def __init__(
        self,
        message_type: type[M] = Any,  # type: ignore[assignment]
        *,
        producers: int = 1,
        consumers: int = 1,
        max_messages: int = 8,
        arena_bytes: int = 1 << 30,
        max_body_bytes: int | None = 1 << 20,
        redeliver: bool = True,
        grace_s: float | None = 30.0,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(message_type, int):
            raise TypeError(
                "the first argument of MessageQueue is the type of the messages: pass the capacity as "
                f"max_messages={message_type}"
            )
        TensorDecoder(message_type)  # raises the error of an invalid type here, and not in a consumer
        producers = count("producers", producers)
        consumers = count("consumers", consumers)
        max_messages = count("max_messages", max_messages)
        arena_bytes = count("arena_bytes", arena_bytes)
        max_body_bytes = count_or_none("max_body_bytes", max_body_bytes)
        grace_s = grace_period(grace_s)
        is_private = folder is None
        path = tempfile.mkdtemp(prefix="aiotensor-") if folder is None else _absolute(folder)
        place = Folder(path, producers, consumers, is_private)
        try:
            place.create()
            owner = place.own() if is_private else None
        except BaseException:
            if is_private:
                shutil.rmtree(path, ignore_errors=True)
            raise
        self._settings = QueueSettings(
            place, message_type, max_messages, arena_bytes, max_body_bytes, redeliver, grace_s
        )
        self._pid = os.getpid()
        # Not at the end of this object: children that were just started may not have opened anything yet.
        close = partial(place.close, owner)
        self._close = util.Finalize(None, close, exitpriority=_AFTER_CHILDREN) if is_private else close

    def __getstate__(self) -> QueueSettings:
        return self._settings

    def __setstate__(self, settings: QueueSettings) -> None:
        self._settings = settings
        self._pid = 0  # of no process: only the queue that has made the folder removes it

    def __repr__(self) -> str:
        folder = self._settings.folder
        return f"<{type(self).__name__} in {folder.path}, {folder.numbers}>"

    def close(self) -> None:
        """Remove the files of the queue, once no producer or consumer of any process is open.

        Afterwards no further producer or consumer can open. In processes that have inherited or unpickled the
        queue, the call leaves the files. The queue of a private folder is closed at the end of the process
        that has created it, after `multiprocessing` has joined its children. Closing again has no effect.
        """
        if self._pid == os.getpid():
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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

    def producer(self) -> QueueProducer:
        """Return a new producer: ``async with queue.producer() as producer``."""
        return QueueProducer(self._settings)

    def consumer(self) -> QueueConsumer[M]:
        """Return a new consumer: ``async with queue.consumer() as consumer``."""
        return QueueConsumer(self._settings)


def _absolute(folder: str | os.PathLike[str]) -> str:
    if not os.path.isabs(folder):
        raise ValueError(
            f"the folder {os.fspath(folder)!r} of a queue must be an absolute path, such as "
            "/run/user/1000/frames: its processes may have different working directories"
        )
    return os.path.normpath(folder)
