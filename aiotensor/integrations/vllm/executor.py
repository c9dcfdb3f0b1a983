"""vLLM's executor for several worker processes, with large messages carried by aiotensor."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.device_communicators import shm_broadcast
from vllm.v1.executor import multiproc_executor

from aiotensor.integrations.vllm import broadcast
from aiotensor.integrations.vllm.checks import BROADCAST, UnsupportedError, check, log_unchanged
from aiotensor.integrations.vllm.pickling import Parts, dumps, loads
from aiotensor.integrations.vllm.processes import export_metrics
from aiotensor.runtime.logs import logger_of

__all__ = ["BroadcastExecutor", "ExecutorQueue"]

logger = logger_of("vllm")

# Smaller messages travel through vLLM's ring: its readers poll shared memory, which takes less time than
# waking a thread. See "Tensors and broadcast in vLLM" in docs/performance.md.
_LARGE_BYTES = 16 << 20


class BroadcastExecutor(multiproc_executor.MultiprocExecutor):  # type: ignore[misc] # vLLM is not typed for us
    """The executor that ``AIOTENSOR_VLLM=broadcast`` selects in place of the backend ``mp``.

    ``--distributed-executor-backend aiotensor.integrations.vllm.executor.BroadcastExecutor`` selects it, too.
    It uses vLLM's own queues if the workers run on several machines, if the version of vLLM is unknown, and
    in the thread of an event loop.
    """

    def _init_executor(self) -> None:
        try:
            check(BROADCAST)
            machines = self.parallel_config.nnodes_within_dp
            if machines > 1:
                raise UnsupportedError(
                    f"the workers of an engine are on {machines} machines, which broadcast does not support"
                )
            if asyncio._get_running_loop() is not None:
                raise UnsupportedError(
                    "the engine runs in the thread of an event loop, which must not be blocked"
                )
        except UnsupportedError as error:
            log_unchanged(error)
        else:
            _install()
        super()._init_executor()


@dataclass(frozen=True)
class ExecutorHandle:
    """The handles of both queues. A process that unpickles it replaces the queue of vLLM's executor.

    Attributes:
        small: the handle of the queue for small messages.
        large: the handle of the queue for large messages.
        local_reader_ranks: the ranks of the readers, which vLLM's executor reads.
    """

    small: Any
    large: broadcast.Handle
    local_reader_ranks: list[int]

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (self.small, self.large, self.local_reader_ranks)


class ExecutorQueue:
    """A queue for vLLM's executor: vLLM's ring for small messages, aiotensor's queue for large ones.

    The ring determines the order of all messages: in place of a large message, it carries the number of that
    message. Methods and errors are those of `broadcast.MessageQueue`. A wait for a message does not end when
    the writer dies: vLLM's executor and workers detect its death, and call `shutdown`, which ends the wait
    with `RuntimeError`.

    Args:
        n_reader: the number of readers, all of which are on this machine.
        n_local_reader: the same number.
        options: the other arguments of vLLM's queue.

    Attributes:
        small: vLLM's ring, which determines the order of all messages.
        large: the queue for large messages.
    """

    replaced_by_aiotensor: ClassVar[Any] = shm_broadcast.MessageQueue

    def __init__(self, n_reader: int, n_local_reader: int, **options: Any) -> None:
        large = broadcast.MessageQueue(n_reader, n_local_reader, options.get("local_reader_ranks"))
        small = shm_broadcast.MessageQueue(n_reader, n_local_reader, **options)
        self._open(small, large)
        # A longer message does not fit into a slot of the ring, which also stores some bytes for each buffer.
        slot_bytes = options.get("max_chunk_bytes", _LARGE_BYTES)
        self._large_bytes = min(_LARGE_BYTES, slot_bytes - slot_bytes // 16)

    @classmethod
    def create_from_handle(cls, handle: ExecutorHandle, rank: int) -> Self:
        """Return the queue of a reader."""
        self = cls.__new__(cls)
        large = broadcast.MessageQueue.create_from_handle(handle.large, rank)
        self._open(shm_broadcast.MessageQueue.create_from_handle(handle.small, rank), large)
        return self

    def _open(self, small: Any, large: broadcast.MessageQueue) -> None:
        export_metrics()
        self.small, self.large = small, large
        self._has_declined = False

    def export_handle(self) -> ExecutorHandle:
        """Return the handle, for the processes of the readers."""
        large = self.large.export_handle()
        return ExecutorHandle(self.small.export_handle(), large, large.local_reader_ranks)

    def wait_until_ready(self) -> None:
        """Wait until all readers are connected."""
        self.small.wait_until_ready()
        self.large.wait_until_ready()

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Write an object for all readers."""
        end = None if timeout is None else time.monotonic() + timeout
        parts = dumps(obj)
        number = None
        if sum(len(part) for part in parts) >= self._large_bytes:
            number = self._write(parts, timeout)
        left = None if end is None else max(0.0, end - time.monotonic())
        self.small.enqueue(parts if number is None else number, left)

    def _write(self, parts: Parts, timeout: float | None) -> int | None:
        """Write a large message, and return its number; None if there is no memory for it.

        The workers keep the tensors of a request until a later message ends it. A wait for their memory would
        delay that message, too, and would never end.
        """
        reason: object = "AIOTENSOR_VLLM_ARENA_BYTES leaves no space beside the tensors that the workers use"
        if self.large.has_space(parts):
            try:
                return self.large.write(parts, timeout)
            except TimeoutError:
                raise
            except OSError as error:  # the machine has no shared memory
                reason = error
        if not self._has_declined:
            self._has_declined = True
            logger.warning(
                "vLLM's own queue carries a large message: %s (logged once)",
                reason,
                extra={"event": "message_declined", "reason": str(reason)},
            )
        return None

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Return the next object."""
        found = self.small.dequeue(timeout, indefinite)
        # A large message is written before its number. If this wait had a limit, the message could be lost.
        return loads(found if isinstance(found, list) else self.large.read(found))

    def shutdown(self) -> None:
        """Close this end of the queue; waiting calls in other threads raise an error."""
        self.small.shutdown()
        self.large.shutdown()


def _inherited(small: Any, large: broadcast.Handle, ranks: list[int]) -> ExecutorHandle:
    _install()
    return ExecutorHandle(small, large, ranks)


def _install() -> None:
    multiproc_executor.MessageQueue = ExecutorQueue
