"""vLLM's executor of several worker processes, with queues of aiotensor between them."""

from typing import Any

from vllm.v1.executor import multiproc_executor

from aiotensor.integrations.vllm import broadcast
from aiotensor.runtime.logs import logger_of

__all__ = ["BroadcastExecutor"]

logger = logger_of("vllm")


class BroadcastExecutor(multiproc_executor.MultiprocExecutor):  # type: ignore[misc] # vLLM is not typed for us
    """The executor that ``AIOTENSOR_VLLM=broadcast`` selects in place of the backend ``mp``.

    Also for ``--distributed-executor-backend aiotensor.integrations.vllm.executor.BroadcastExecutor``.
    Workers on several machines use the queues of vLLM.
    """

    def _init_executor(self) -> None:
        machines = self.parallel_config.nnodes_within_dp
        if machines == 1:
            _install()
        else:
            reason = f"the workers of an engine are on {machines} machines, which broadcast does not support"
            logger.warning(
                "aiotensor changes nothing in vLLM: %s",
                reason,
                extra={"event": "vllm_unchanged", "reason": reason},
            )
        super()._init_executor()


class _Handle(broadcast.Handle):
    """A handle that replaces the queue of vLLM in each process that receives it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (self.address, self.local_reader_ranks)


class _Queue(broadcast.MessageQueue):
    handle_type = _Handle


def _inherited(address: str, ranks: list[int]) -> _Handle:
    _install()
    return _Handle(address, ranks)


def _install() -> None:
    multiproc_executor.MessageQueue = _Queue
