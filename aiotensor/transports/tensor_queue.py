"""The queue that a parent creates for its spawned children: a pair of record sockets that they inherit."""

import fcntl
import os
import socket
from multiprocessing import connection, context
from typing import Any, BinaryIO, TypeAlias

from aiotensor.errors import UsageError
from aiotensor.runtime.descriptors import close_after_fork
from aiotensor.transports.records import record_pair

__all__ = ["TensorQueue"]

_QueueEnd: TypeAlias = "connection.Connection[Any, Any]"


class TensorQueue:
    """A queue between a parent and its spawned children, on which a receiver and its senders are opened.

    Create the queue in the parent, and pass it as an argument to `multiprocessing` processes that are started
    by ``spawn`` (or ``forkserver``). Then open one `TensorReceiver` and any number of `TensorSender`s on it,
    each in any of these processes. A queue uses three descriptors and nothing in the file system.

    A process that has the queue can send in the name of any sender, so pass it only to your own code. Tensors
    are not pickled.
    """

    def __init__(self) -> None:
        reader, writer = record_pair()
        # The ends are `Connection` objects, because `multiprocessing` passes these to spawned children, and
        # they close when they are garbage-collected.
        self.__setstate__(
            (
                connection.Connection(reader.detach()),
                connection.Connection(writer.detach()),
                connection.Connection(os.memfd_create("aiotensor-receiver")),
            )
        )

    def __getstate__(self) -> tuple[object, ...]:
        if context.get_spawning_popen() is None:
            raise UsageError(
                "a TensorQueue can only be passed to a child process while it is spawned: pass it in "
                "multiprocessing.get_context('spawn').Process(target=..., args=(queue,))"
            )
        return self._ends

    def __setstate__(self, ends: tuple[_QueueEnd, _QueueEnd, _QueueEnd]) -> None:
        self._pid = os.getpid()
        self._ends = ends
        self._reader, self._writer, self._lock_file = (
            ends  # the last is an empty file that the receiver locks
        )
        for end in ends:
            close_after_fork(end)

    def __repr__(self) -> str:
        if os.getpid() != self._pid:
            return "<TensorQueue unusable after a fork>"
        return f"<TensorQueue {'closed' if self._reader.closed else 'open'}>"

    def close(self) -> None:
        """Close the queue in this process; its open senders and receivers are not affected.

        Close the queue in every process after opening its senders and receivers, and in the parent after
        starting the children. Then a sender is notified at once if the process of the receiver dies before it
        has opened the receiver, because no process is left that could read the queue.
        """
        for end in self._ends:
            end.close()

    def lock_for_receiver(self) -> BinaryIO:
        """Lock the queue for its only receiver; closing the returned file unlocks it.

        Only the library calls this.

        Raises:
            UsageError: the queue already has a receiver.
        """
        # Opened again, because a lock belongs to an open file, which inherited descriptors share.
        file = open(f"/proc/self/fd/{self._lock_file.fileno()}", "rb", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UsageError(
                "this TensorQueue already has a receiver: close that one, or create a queue for each receiver"
            ) from None
        return file

    def _duplicate(self, end: _QueueEnd) -> socket.socket:
        if os.getpid() != self._pid:
            raise UsageError(
                "this TensorQueue was inherited by a forked process: start processes with "
                "multiprocessing.get_context('spawn') and pass the queue as an argument"
            )
        if end.closed:
            raise UsageError("this TensorQueue was closed: create a new one before starting the processes")
        sock = socket.socket(fileno=os.dup(end.fileno()))
        sock.setblocking(False)  # even if the application has set a default timeout
        return sock

    def open_writer(self) -> socket.socket:
        """Return a new socket for the writing end; errors are those of `open_reader`.

        Only the library calls this.
        """
        return self._duplicate(self._writer)

    def open_reader(self) -> socket.socket:
        """Return a new socket for the reading end.

        Only the library calls this.

        Raises:
            UsageError: the queue was closed, or was inherited by a fork.
            OSError: this process has no descriptors left.
        """
        return self._duplicate(self._reader)
