"""A queue with the interface of vLLM's ``MessageQueue``, over a publisher and its subscribers.

One process writes arbitrary Python objects, and each reader gets all of them. An object is pickled once, and
its large buffers are placed in shared memory once, where the readers use them without a copy.

Unpickling runs code that the writer chooses. So the address of a queue is always the path of a Unix socket:
only processes of this user can connect, and a reader rejects a writer that runs as another user.
"""

import os
import secrets
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch.distributed as dist

from aiotensor import blocking
from aiotensor.errors import PeerLostError, UsageError
from aiotensor.integrations.vllm.pickling import Parts, dumps, loads
from aiotensor.integrations.vllm.settings import Settings
from aiotensor.memory.arena import whole_pages
from aiotensor.ranks.meeting import machine_of_this_process
from aiotensor.types import PublisherStatistics, SubscriberStatistics

__all__ = ["Handle", "MessageQueue"]

T = TypeVar("T")


@dataclass(frozen=True)
class Handle:
    """The address of a queue, for the processes of its readers. It can be pickled.

    Attributes:
        address: the address at which the writer listens.
        local_reader_ranks: the ranks of the readers, which vLLM's executor reads.
    """

    address: str
    local_reader_ranks: list[int]


class MessageQueue:
    """Broadcast Python objects to the processes of this user on this machine; the interface is vLLM's.

    It can be used in any thread without a running event loop.

    Args:
        n_reader: the number of readers.
        n_local_reader: the number of readers on this machine, which must be `n_reader`.
        local_reader_ranks: the ranks of the readers; counted from 0 by default.
        max_chunk_bytes: has no effect: only `Settings.arena_bytes` limits the size of a message.
        max_chunks: the number of messages that a reader may be behind; further messages wait for it.
        connect_ip: has no effect.
        enable_shm_tensor_arena: has no effect: large buffers are always shared.

    Raises:
        UsageError: a reader is on another machine.
        ValueError: there is no reader, or a setting in the environment is invalid.
        OSError: the machine has no threads or no descriptors left.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 0,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        if n_local_reader != n_reader:
            raise _elsewhere(n_reader - n_local_reader, n_reader)
        if n_reader < 1:
            raise ValueError(f"a queue needs at least one reader, got {n_reader}")
        ranks = list(range(n_reader)) if local_reader_ranks is None else local_reader_ranks
        self._handle = Handle(_new_address(), ranks)
        self._n_reader = n_reader
        publisher = blocking.Publisher(
            self._handle.address,
            arena_bytes=Settings.from_environment().arena_bytes,
            max_behind=max_chunks,
            max_subscribers=n_reader,
        )
        self._open(publisher, None)

    @classmethod
    def create_from_handle(cls, handle: Handle, rank: int) -> Self:
        """Return the queue of a reader.

        Args:
            handle: the handle of the queue.
            rank: the rank of the reader, one of those in the handle.

        Raises:
            UsageError: the queue has no reader of this rank, or its address is not the path of a socket.
            PeerLostError: the writer has ended.
            OSError: the machine has no threads or no descriptors left.
        """
        if not handle.address.startswith("unix:///"):
            raise UsageError(
                "the address of a queue of Python objects must be the path of a socket, got "
                f"{handle.address!r}"
            )
        if rank not in handle.local_reader_ranks:
            raise UsageError(f"rank must be one of the readers {handle.local_reader_ranks}, got {rank}")
        self = cls.__new__(cls)
        self._handle = handle
        reader = blocking.Subscriber(handle.address, list[Any], max_mapped_bytes=None)
        self._open(None, reader)
        if not reader.statistics().publishers:  # the writer listened before it exported the handle
            self.shutdown()
            raise PeerLostError("the writer of the queue has ended")
        return self

    @classmethod
    def create_from_process_group(
        cls,
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: Handle | None = None,
        blocking: bool = True,
    ) -> Self:
        """Return the queue of this process, in a group in which one process writes and all others read.

        Args:
            pg: a ``ProcessGroup`` of torch, or a ``StatelessProcessGroup`` of vLLM.
            max_chunk_bytes: has no effect.
            max_chunks: the number of messages that a reader may be behind.
            writer_rank: the rank of the writer in the group.
            external_writer_handle: the handle of another queue, which all processes of the group read.
            blocking: whether to wait until all readers are connected.

        Waits for all processes of the group. Other errors are those of the constructor and of
        `create_from_handle`.

        Raises:
            PeerLostError: the writer has no queue, because of an error in its process.
        """
        rank, machines = _gather(pg, machine_of_this_process())
        elsewhere = sum(machine != machines[writer_rank] for machine in machines)
        if elsewhere:
            raise _elsewhere(elsewhere, len(machines) - 1)
        queue = None
        handle = external_writer_handle
        try:
            if rank == writer_rank and handle is None:
                ranks = [reader for reader in range(len(machines)) if reader != writer_rank]
                queue = cls(len(ranks), len(ranks), ranks, max_chunk_bytes, max_chunks)
                handle = queue.export_handle()
        finally:
            _, handles = _gather(pg, handle)  # also after an error, because the readers wait for it
        handle = handles[writer_rank]
        if handle is None:
            raise PeerLostError("the writer of the group has no queue because of an error in its process")
        queue = queue or cls.create_from_handle(handle, rank)
        if blocking:
            queue.wait_until_ready()
        return queue

    def _open(
        self, writer: blocking.Publisher | None, reader: "blocking.Subscriber[list[Any]] | None"
    ) -> None:
        self._writer, self._reader = writer, reader
        end = writer or reader
        if end is None:
            raise AssertionError("a queue has one end in this process")
        self._end = end
        end.__enter__()
        # vLLM does not shut down every queue. At exit, the threads have stopped before finalizers run.
        weakref.finalize(self, end.abandon).atexit = False

    def export_handle(self) -> Handle:
        """Return the handle, for the processes of the readers."""
        return self._handle

    def wait_until_ready(self) -> None:
        """Wait until all readers are connected. The writer and all readers must call this method.

        Raises:
            PeerLostError: the writer has closed.
            ClosedError: `shutdown` was called.
        """
        if self._writer is not None:
            self._writer.wait_for_subscribers(self._n_reader)
            # No further process connects, and a killed writer would leave the file behind.
            _path_of(self._handle).unlink(missing_ok=True)
            self.enqueue(None)
        else:
            self.dequeue()

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Write an object for all readers; buffers in it must not change until this returns.

        Args:
            obj: any picklable object.
            timeout: the seconds to wait for slow readers and for memory; None for no limit.

        Raises:
            TimeoutError: the time limit was reached, and nothing was written.
            PeerLostError: a reader has ended, or has never connected.
            TooLargeError: the message is larger than the arena.
            UsageError: this process is a reader.
            ClosedError: `shutdown` was called.
            OSError: the machine has no shared memory left.
        """
        self.write(dumps(obj), timeout)

    def has_space(self, parts: Parts) -> bool:
        """Return whether parts fit into the free memory, so that `write` does not wait for memory."""
        if self._writer is None:
            return False
        return sum(whole_pages(len(part)) for part in parts) <= self._writer.statistics().largest_free_bytes

    def write(self, parts: Parts, timeout: float | None = None) -> int:
        """Write the parts of a pickle for all readers, and return the number of the message.

        The timeout and the errors are those of `enqueue`.
        """
        if self._writer is None:
            raise UsageError("this process reads from the queue, and cannot write to it")
        published = self._writer.publish(parts, timeout=timeout)
        lost = self._n_reader - published.delivered
        if lost > 0:
            raise PeerLostError(f"{lost} of {self._n_reader} readers of the queue are not connected")
        return published.number

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Wait for the next object, and return it.

        The large buffers of the object are in shared memory until they are freed.

        Args:
            timeout: the seconds to wait; None for no limit.
            indefinite: has no effect: a long wait is never logged.

        Raises:
            TimeoutError: nothing was written within `timeout`.
            PeerLostError: the writer has ended. This closes the queue.
            UsageError: this process is the writer.
            ClosedError: `shutdown` was called, perhaps in another thread during the wait.
        """
        return loads(self.read(timeout=timeout))

    def read(self, number: int = 0, timeout: float | None = None) -> Parts:
        """Return the parts of the next pickle, and skip messages with a lower number.

        The timeout and the errors are those of `dequeue`.
        """
        if self._reader is None:
            raise UsageError("this process writes to the queue, and cannot read from it")
        while True:
            try:
                found = self._reader.receive(timeout=timeout)
            except PeerLostError:
                self.shutdown()  # a later call would wait for another writer
                raise
            if found.number >= number:
                return found.message

    def broadcast_object(self, obj: object = None) -> Any:
        """Write an object in the process of the writer, or return the next one in the process of a reader."""
        if self._writer is None:
            return self.dequeue()
        self.enqueue(obj)
        return obj

    def statistics(self) -> PublisherStatistics | SubscriberStatistics:
        """Return the statistics of the publisher, in the process of the writer, or of the subscriber."""
        return self._end.statistics()

    def shutdown(self) -> None:
        """Close this end of the queue; waiting calls in other threads raise `ClosedError`."""
        self._end.close()


def _elsewhere(count: int, readers: int) -> UsageError:
    return UsageError(
        f"{count} of {readers} readers are on other machines, or belong to other users, which the broadcast "
        "of aiotensor does not support: remove broadcast from AIOTENSOR_VLLM"
    )


def _gather(group: Any, value: T) -> tuple[int, list[T]]:
    """Return the rank of this process, and the values of all processes by their ranks."""
    if not isinstance(group, dist.ProcessGroup):
        return group.rank, group.all_gather_obj(value)
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return dist.get_rank(group), values


def _new_address() -> str:
    """Return an address in the folder of vLLM's sockets."""
    folder = os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir()
    return f"unix://{Path(folder, f'aiotensor-{secrets.token_hex(8)}.sock').absolute()}"


def _path_of(handle: Handle) -> Path:
    return Path(handle.address.removeprefix("unix://"))
