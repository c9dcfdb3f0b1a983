"""The queue that a parent makes for its spawned children: a pair of record sockets, inherited by them."""

import fcntl
import os
import socket
from multiprocessing import connection, context
from typing import Any, BinaryIO, TypeAlias

from aiotensor.errors import UsageError
from aiotensor.runtime.descriptors import close_after_fork
from aiotensor.transports.records import record_pair

__all__ = ["TensorQueue"]

_Connection: TypeAlias = "connection.Connection[Any, Any]"


class TensorQueue:
    """Join processes of one family: hand it to spawned children, open a receiver and senders on it.

    Make it in the parent, pass it as an argument of `multiprocessing` processes started by ``spawn``
    (or ``forkserver``), and give it to one `TensorReceiver` and to any number of `TensorSender`s, in any
    of the processes. It holds two descriptors and nothing in the file system.

    Whoever holds it can speak for any sender, so hand it to your own code only. What travels over it is
    not pickled.
    """

    def __init__(self) -> None:
        reader, writer = record_pair()
        self._pid = os.getpid()
        # Connections: they know how to travel to a spawned child, and close when nobody needs them.
        self._reader = connection.Connection(reader.detach())
        self._writer = connection.Connection(writer.detach())
        # An empty file, locked by the one receiver.
        self._turn = connection.Connection(os.memfd_create("aiotensor-receiver"))
        self._close_after_fork()

    def __getstate__(self) -> tuple[object, ...]:
        if context.get_spawning_popen() is None:
            raise UsageError(
                "a TensorQueue can only be handed to a child process while it is spawned: pass it in "
                "multiprocessing.get_context('spawn').Process(target=..., args=(queue,))"
            )
        return self._reader, self._writer, self._turn

    def __setstate__(self, state: tuple[_Connection, _Connection, _Connection]) -> None:
        self._reader, self._writer, self._turn = state
        self._pid = os.getpid()
        self._close_after_fork()

    def __repr__(self) -> str:
        if os.getpid() != self._pid:
            return "<TensorQueue unusable after a fork>"
        return f"<TensorQueue {'closed' if self._reader.closed else 'open'}>"

    def close(self) -> None:
        """Close this process's ends; senders and receivers that are open keep theirs.

        Do so in every process once its senders and receivers are open, and in the parent once the
        children are started: then a sender hears at once of an engine that died before it opened its
        receiver, since nobody is left who could read the queue.
        """
        for end in (self._reader, self._writer, self._turn):
            end.close()

    def _close_after_fork(self) -> None:
        for end in (self._reader, self._writer, self._turn):
            close_after_fork(end)

    def _lock(self) -> BinaryIO:
        """Take the turn of the one receiver; the kernel ends it with the file, or with the process."""
        # Opened anew: a lock belongs to the opened file, and what was inherited is the same one everywhere.
        file = open(f"/proc/self/fd/{self._turn.fileno()}", "rb", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UsageError(
                "this TensorQueue has a receiver already: close that one, or make a queue for each receiver"
            ) from None
        return file

    def _duplicate(self, end: connection.Connection) -> socket.socket:
        if os.getpid() != self._pid:
            raise UsageError(
                "this TensorQueue came here by a fork: start processes with "
                "multiprocessing.get_context('spawn') and pass the queue as an argument"
            )
        if end.closed:
            raise UsageError("this TensorQueue was closed: make a new one before starting the processes")
        sock = socket.socket(fileno=os.dup(end.fileno()))
        sock.setblocking(False)  # whatever the application's default timeout is
        return sock

    def _duplicate_writer(self) -> socket.socket:
        return self._duplicate(self._writer)

    def _duplicate_reader(self) -> socket.socket:
        return self._duplicate(self._reader)
