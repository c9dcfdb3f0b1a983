"""Blocking queues, with their producers and consumers."""

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from multiprocessing import util
from types import FrameType, TracebackType
from typing import Any, Generic, TypeVar, Unpack, overload

from aiotensor import queues
from aiotensor.blocking.portal import BlockingObject, UntilClosed
from aiotensor.errors import ClosedError
from aiotensor.queues.queue import QueueDescription, QueueOptions

__all__ = ["MessageQueue", "QueueConsumer", "QueueProducer"]

M = TypeVar("M")

# `multiprocessing` runs finalizers of a priority from 0 before it joins the child processes.
_BEFORE_CHILDREN = 100


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

    The methods `put` and `get` also exist on the queue itself, for programs that were written for
    `multiprocessing.Queue`. The first `put` of a process opens a producer, and the first `get` opens a
    consumer; all copies of the queue in a process share them. They are closed when the process calls `close`,
    and otherwise at its end, where the producer waits until consumers have taken its messages. If the process
    ends with an exception, the producer is aborted instead. Python does not show the status of `sys.exit` in
    the main process: use ``with queue:`` if an exit with a status must abort the producer.
    """

    @overload
    def __init__(self: "MessageQueue[Any]", **options: Unpack[QueueOptions]) -> None: ...

    @overload
    def __init__(self, message_type: type[M], **options: Unpack[QueueOptions]) -> None: ...

    def __init__(self, message_type: Any = Any, **options: Unpack[QueueOptions]) -> None:
        super().__init__(message_type, **options)

    def producer(self) -> QueueProducer:
        """Return a new producer: ``with queue.producer() as producer``."""
        return QueueProducer(queues.QueueProducer(self._settings))

    def consumer(self) -> QueueConsumer[M]:
        """Return a new consumer: ``with queue.consumer() as consumer``."""
        return QueueConsumer(queues.QueueConsumer(self._settings))

    # The producer and the consumer of this process

    def put(self, message: object, *, timeout: float | None = None) -> None:
        """Put a message with the producer of this process, which the first call opens."""
        self._ends().producer().put(message, timeout=timeout)

    def put_nowait(self, message: object) -> None:
        """Put a message with the producer of this process, or raise `WouldBlockError`."""
        self._ends().producer().put_nowait(message)

    def join(self, *, timeout: float | None = None) -> None:
        """Wait until consumers have taken all messages of the producer of this process."""
        self._ends().producer().join(timeout=timeout)

    def get(self, *, timeout: float | None = None) -> M:
        """Take a message with the consumer of this process, which the first call opens."""
        ends = self._ends()
        try:
            return ends.consumer().get(timeout=timeout)
        except ClosedError:
            ends.stop_daemon()
            raise

    def get_nowait(self) -> M:
        """Take a message with the consumer of this process if one has arrived, or raise `WouldBlockError`."""
        return self._ends().consumer().get_nowait()

    def __iter__(self) -> Iterator[M]:
        """Iterate over messages with the consumer of this process, until all producers have closed."""
        return iter(self._ends().consumer())

    def _ends(self) -> "_Ends[M]":
        # A forked child inherits the ends of its parent, and opens its own.
        pid = os.getpid()
        used: dict[int, _Ends[M]] = self.__dict__.setdefault("_ends_by_pid", {})
        if pid not in used:
            used[pid] = _known_ends.setdefault((pid, self._settings.folder.path), _Ends(self))
        return used[pid]

    def close(self) -> None:
        """Close the producer and the consumer of this process, and remove the files of the queue.

        The files are removed as `aiotensor.queues.MessageQueue.close` removes them. The call raises the
        errors of closing a producer.
        """
        try:
            self._ends().close()
        finally:
            super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._ends().abort()
        super().__exit__(kind, error, trace)


class _Ends(Generic[M]):
    """The producer and the consumer that one process uses through the queue itself."""

    def __init__(self, queue: MessageQueue[M]) -> None:
        self._pid = os.getpid()
        self._queue = queue
        self._lock = threading.RLock()
        self._producer: QueueProducer | None = None
        self._consumer: QueueConsumer[M] | None = None
        self._finalizer: util.Finalize[None] | None = None
        self._main = _frame_of_child()
        self._is_finishing = False

    def producer(self) -> QueueProducer:
        """Return the producer; the first call opens it."""
        with self._lock:
            if self._producer is None:
                self._producer = self._queue.producer().__enter__()
                self._register()
        return self._producer

    def consumer(self) -> QueueConsumer[M]:
        """Return the consumer; the first call opens it."""
        with self._lock:
            if self._consumer is None:
                self._consumer = self._queue.consumer().__enter__()
                self._register()
        return self._consumer

    def _register(self) -> None:
        if self._finalizer is None:
            # Children of `multiprocessing` do not run the handlers of `atexit`. In the main process, these
            # run before the handler that stops the thread of the event loop.
            self._finalizer = util.Finalize(None, self._finish, exitpriority=_BEFORE_CHILDREN)
            atexit.register(self._finish)

    def _finish(self) -> None:
        """Close at the end of the process."""
        if self._pid == os.getpid():
            self._is_finishing = True
            if _ends_with_an_exception(self._main):
                self.abort()
            self.close()

    def stop_daemon(self) -> None:
        """Wait forever in a daemon thread while the process ends, as in a queue of `multiprocessing`.

        An error would end the thread with a traceback, although nothing has failed.
        """
        if self._is_finishing and threading.current_thread().daemon:
            threading.Event().wait()

    def abort(self) -> None:
        """Make closing drop the messages that were not taken."""
        if self._producer is not None and not self._producer.is_closed:
            self._producer.abort()

    def close(self) -> None:
        """Close both; closing again has no effect."""
        if self._finalizer is not None:
            self._finalizer.cancel()
            atexit.unregister(self._finish)
        try:
            if self._consumer is not None:
                self._consumer.close()
        finally:
            if self._producer is not None:
                self._producer.close()


# By the process and the folder of the queue. Each task of a pool unpickles a copy of the queue, and all
# copies in a process use the same producer.
_known_ends: "weakref.WeakValueDictionary[tuple[int, str], _Ends[Any]]" = weakref.WeakValueDictionary()


def _frame_of_child() -> FrameType | None:
    """Return the frame in which `multiprocessing` runs this process; None if it did not start the process."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_bootstrap" and frame.f_globals["__name__"] == "multiprocessing.process":
            return frame
        frame = frame.f_back
    return None


def _ends_with_an_exception(main: FrameType | None) -> bool:
    """Return whether an exception, or an exit with a status other than 0, ends this process.

    Args:
        main: the frame in which `multiprocessing` runs this process; None if it did not start the process.
    """
    if main is not None and main.f_locals.get("exitcode"):
        return True  # in Python 3.14, nothing else remains of the exception when finalizers run
    error = sys.exc_info()[1]  # in earlier versions, finalizers run while the exception propagates
    if error is None and not hasattr(sys, "ps1"):  # an interactive session continues after an exception
        error = getattr(sys, "last_value", None)
    return error is not None and not (isinstance(error, SystemExit) and not error.code)
