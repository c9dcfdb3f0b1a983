"""vLLM's executor for several worker processes, whose tensors are carried by aiotensor."""

import asyncio
import copyreg
import io
import pickle
from typing import Any

import torch
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from aiotensor import blocking
from aiotensor.errors import AioTensorError
from aiotensor.integrations.vllm.checks import BROADCAST, UnsupportedError, check, log_unchanged
from aiotensor.integrations.vllm.processes import export_metrics, log_in_vllm
from aiotensor.integrations.vllm.settings import Settings
from aiotensor.runtime.logs import logger_of
from aiotensor.transports.endpoints import Endpoint

logger = logger_of("vllm")

_APART_BYTES = 64 * 1024  # a smaller tensor is pickled
# Fewer bytes travel through vLLM's queue, whose readers poll: waking a thread in each worker takes longer
# than copying them. See docs/decisions.md.
_MIN_BYTES = 2 << 20
_MAX_BEHIND = 10  # messages that a worker may be behind, as in vLLM's queue
_READY_S = 60.0


class BroadcastExecutor(MultiprocExecutor):  # type: ignore[misc] # vLLM is not typed for us
    """The executor that ``AIOTENSOR_VLLM=broadcast`` selects in place of the backend ``mp``.

    ``--distributed-executor-backend aiotensor.integrations.vllm.executor.BroadcastExecutor`` selects it, too.
    The large tensors of new requests are published to the workers, which use them in shared memory. All other
    data travels through vLLM's own queue, as does a request for whose tensors there is no memory. A tensor
    that the engine has received by aiotensor is not copied.

    The executor works as vLLM's does if the workers run on several machines, if the version of vLLM is
    unknown, and in the thread of an event loop.
    """

    _publisher: blocking.Publisher | None = None
    _has_declined = False

    def _init_executor(self) -> None:
        super()._init_executor()
        try:
            check(BROADCAST)
            settings = Settings.from_environment()
            machines = self.parallel_config.nnodes_within_dp
            if machines > 1:
                raise UnsupportedError(
                    f"the workers of an engine are on {machines} machines, which broadcast does not support"
                )
            if asyncio._get_running_loop() is not None:
                raise UnsupportedError(
                    "the engine runs in the thread of an event loop, which must not be blocked"
                )
            endpoint = settings.workers_endpoint(self.parallel_config.data_parallel_index)
            publisher = blocking.Publisher(
                endpoint,
                arena_bytes=settings.arena_bytes,
                max_behind=_MAX_BEHIND,
                max_subscribers=self.world_size,
            )
            publisher.__enter__()
        except (UnsupportedError, ValueError, AioTensorError, OSError) as error:
            log_unchanged(error)
            return
        log_in_vllm()
        export_metrics()
        self.collective_rpc(_connect, timeout=_READY_S, args=(endpoint, settings.max_wait_s))
        publisher.wait_for_subscribers(self.world_size, timeout=_READY_S)
        self._publisher = publisher

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), *more: Any, **options: Any
    ) -> Any:
        """Call a method of all workers; the tensors of new requests are published to them."""
        if method == "execute_model" and (found := self._published(args[0])) is not None:
            method, args = _execute_model, found
        return super().collective_rpc(method, timeout, args, *more, **options)

    def _published(self, scheduler_output: Any) -> tuple[int, bytes] | None:
        """Publish the tensors of new requests, and return the arguments of `_execute_model`.

        Returns None if vLLM's own queue is to carry them. The workers keep the tensors of a request until a
        later message ends it. A wait for their memory would delay that message, too, and would never end.
        """
        if self._publisher is None or not any(
            new.mm_features or new.prompt_embeds is not None for new in scheduler_output.scheduled_new_reqs
        ):
            return None
        pickled, tensors = dumps(scheduler_output)
        if sum(tensor.nbytes for tensor in tensors) < _MIN_BYTES:
            return None
        try:
            published = self._publisher.publish_nowait(tensors)
            if published.delivered == self.world_size:
                return published.number, pickled
            reason = f"{published.delivered} of {self.world_size} workers are connected"
        except (AioTensorError, OSError) as error:
            reason = str(error)
        if not self._has_declined:
            self._has_declined = True
            logger.warning(
                "vLLM's own queue carries the tensors of a request: %s (logged once)",
                reason,
                extra={"event": "message_declined", "reason": reason},
            )
        return None

    def shutdown(self) -> None:
        """Shut down the workers and the publisher."""
        super().shutdown()
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()


# In the workers

_subscriber: "blocking.Subscriber[list[torch.Tensor]] | None" = None


def _connect(_: object, endpoint: Endpoint, max_wait_s: float) -> None:
    """Connect this worker process to the publisher of its engine."""
    global _subscriber
    log_in_vllm()
    export_metrics()
    # The engine sends at most what vLLM would send, and `arena_bytes` limits its own memory.
    _subscriber = blocking.Subscriber(
        endpoint, list[torch.Tensor], max_mapped_bytes=None, max_wait_s=max_wait_s
    )
    _subscriber.__enter__()


def _execute_model(worker: Any, number: int, pickled: bytes) -> Any:
    """Execute the model for a scheduler output, whose tensors are in a publication."""
    if _subscriber is None:
        raise AssertionError("the engine connects its workers first")
    while (found := _subscriber.receive()).number < number:
        pass  # it was published for a call that failed
    if found.number > number:
        raise RuntimeError(f"publication {number} was lost, because this worker had to connect again")
    output = loads(pickled, found.message)
    del found
    return worker.execute_model(output)


# Pickles without the bytes of large tensors


def dumps(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle an object without its large tensors, and return both."""
    tensors: list[torch.Tensor] = []

    def reduce(tensor: torch.Tensor) -> Any:
        if tensor.nbytes < _APART_BYTES or not tensor.is_cpu or tensor.requires_grad:
            return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        tensors.append(tensor)
        return _tensor, (len(tensors) - 1,)

    with io.BytesIO() as stream:
        pickler = pickle.Pickler(stream, pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: reduce}
        pickler.dump(obj)
        return stream.getvalue(), tensors


def loads(pickled: bytes, tensors: list[torch.Tensor]) -> Any:
    """Unpickle an object that came through vLLM's own queue, with its large tensors."""
    return _Unpickler(pickled, tensors).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (_tensor.__module__, _tensor.__qualname__):
            return self._tensors.__getitem__
        return super().find_class(module, name)


def _tensor(index: int) -> torch.Tensor:
    """Stand in a pickle for the tensor with an index."""
    raise pickle.UnpicklingError(f"tensor {index} is not in the pickle: use `loads`")
