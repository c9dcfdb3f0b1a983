"""Processes that read from a queue, for their parent."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from aiotensor.integrations.vllm.broadcast import Handle, MessageQueue

__all__ = ["Reader", "dequeue", "readers"]

# The children are forked from a process that has imported their modules.
_context = multiprocessing.get_context("forkserver")


class Reader:
    """A process that reads, as its parent sees it."""

    def __init__(self, handle: Handle, rank: int) -> None:
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_run, args=(handle, rank, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *args: object) -> None:
        """Call a function of a module there, with the queue as the first argument."""
        self._connection.send((function, args))

    def result(self) -> Any:
        """Return the result of the call, or raise its error."""
        error, result = self._connection.recv()
        if error is not None:
            raise error
        return result

    def call(self, function: Callable[..., Any], *args: object) -> Any:
        """Call a function there, and return its result."""
        self.begin(function, *args)
        return self.result()

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.process.kill()
        self.process.join()


def _run(handle: Handle, rank: int, commands: Connection) -> None:
    torch.set_num_threads(1)
    queue = MessageQueue.create_from_handle(handle, rank)
    while (command := commands.recv()) is not None:
        function, args = command
        try:
            commands.send((None, function(queue, *args)))
        except Exception as error:  # noqa: BLE001 # raised in the parent
            commands.send((error, None))
    queue.shutdown()


@contextmanager
def readers(queue: MessageQueue, count: int) -> Iterator[list[Reader]]:
    """Start the readers of a queue, wait until all of them are ready, and end them."""
    started: list[Reader] = []
    try:
        for rank in range(count):
            started.append(Reader(queue.export_handle(), rank))
        for reader in started:
            reader.begin(MessageQueue.wait_until_ready)
        queue.wait_until_ready()
        for reader in started:
            reader.result()
        yield started
        for reader in started:
            if reader.process.is_alive():
                reader.begin(MessageQueue.shutdown)
                reader.result()
                reader._connection.send(None)
                reader.process.join()
                assert reader.process.exitcode == 0
    finally:
        for reader in started:
            reader.kill()
            reader._connection.close()


def dequeue(queue: MessageQueue, timeout: float | None = None) -> Any:
    """Return the next object, whose arrays are copied into the answer."""
    return queue.dequeue(timeout)
