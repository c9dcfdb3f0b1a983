"""The ends of the tensor transport in the processes of vLLM: the queue, the client's end, the engine's end.

The process that launches the engines makes an `EngineQueue`, and passes it to its children. A child that
receives it replaces the names of vLLM's, because vLLM creates the receiving end before it loads plugins.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from aiotensor import TensorQueue, blocking
from aiotensor.errors import AioTensorError, DiscardedError
from aiotensor.integrations.vllm.consumer import TensorConsumer
from aiotensor.integrations.vllm.provider import TensorProvider
from aiotensor.integrations.vllm.settings import Settings
from aiotensor.runtime.logs import logger_of
from aiotensor.tensors.dtypes import dtype_from_name

__all__ = ["EngineProvider", "EngineQueue", "check_request", "open_consumer", "open_provider"]

logger = logger_of("vllm")

R = TypeVar("R")


class EngineQueue:
    """The object that vLLM passes to its processes in place of a queue of multiprocessing.

    Args:
        endpoint: where the engine receives tensors.
        settings: the limits.
        install: called in each process that receives the object from its parent.
    """

    def __init__(
        self, endpoint: TensorQueue | str, settings: Settings, install: Callable[[], object]
    ) -> None:
        self.endpoint = endpoint
        self.settings = settings
        self._install = install

    def close(self) -> None:
        """Close the ends of the queue in this process, as a queue of multiprocessing does."""
        if isinstance(self.endpoint, TensorQueue):
            self.endpoint.close()

    def __reduce__(self) -> tuple[Callable[..., "EngineQueue"], tuple[object, ...]]:
        return _inherited, (self.endpoint, self.settings, self._install)


def _inherited(endpoint: TensorQueue | str, settings: Settings, install: Callable[[], object]) -> EngineQueue:
    install()
    return EngineQueue(endpoint, settings, install)


def open_consumer(queue: EngineQueue) -> TensorConsumer:
    """Open the sending end of an API server; it is closed when the consumer is freed.

    Raises:
        AioTensorError: the sender cannot be opened here.
        OSError: the machine has no threads or no descriptors left.
    """
    limits = queue.settings
    sender = blocking.TensorSender(queue.endpoint, limits.max_concurrent_videos, limits.arena_bytes)
    _call_in_thread(sender.__enter__)
    _export_metrics(sender)
    consumer = TensorConsumer(sender)
    weakref.finalize(consumer, sender.abandon).atexit = False  # the threads have stopped by then
    return consumer


def open_provider(queue: EngineQueue) -> "EngineProvider":
    """Open the receiving end of the engine; it is closed when the provider is freed. Errors as above."""
    receiver = blocking.TensorReceiver(
        queue.endpoint,
        max_senders=None,  # vLLM determines the number of its API servers, and each one has its limits
        max_mapped_bytes=None,
        max_unclaimed_messages=None,
        max_wait_s=queue.settings.max_wait_s,
    )
    _call_in_thread(receiver.__enter__)
    provider = EngineProvider(receiver)
    weakref.finalize(provider, receiver.abandon).atexit = False
    return provider


class EngineProvider(TensorProvider):
    """Receive tensors in the input thread of vLLM's engine, which ends with any error of the decoder.

    A tensor that is lost, for example because its API server was killed, is replaced by one without values,
    on the meta device. `check_request` raises for the request before the engine uses or caches it.
    """

    def __call__(self, dtype: str, shape: tuple[int, ...], data: dict[str, Any]) -> torch.Tensor:
        """Return the tensor of a placeholder, once it has arrived or is lost."""
        try:
            return super().__call__(dtype, shape, data)
        except AioTensorError as error:
            logger.error(
                "a tensor of a request is lost: %s",
                error,
                extra={"event": "tensor_lost", "error": type(error).__name__, "reason": str(error)},
            )
            self.discard(data)
            return torch.empty(shape, dtype=dtype_from_name(dtype), device="meta")


def check_request(request: Any) -> None:
    """Raise `DiscardedError` for a request of which a tensor was lost.

    Args:
        request: an ``EngineCoreRequest``.
    """
    for tensor in _tensors_of(request):
        if tensor.is_meta:
            raise DiscardedError(
                f"a tensor of request {request.request_id} was lost on its way to the engine: send it again"
            )


def _tensors_of(request: Any) -> Iterator[torch.Tensor]:
    if request.prompt_embeds is not None:
        yield request.prompt_embeds
    for feature in request.mm_features or ():
        for element in (feature.data or {}).values():
            yield from _tensors_in(element.data)


def _tensors_in(nested: object) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for one in nested:
            yield from _tensors_in(one)


def _call_in_thread(function: Callable[[], R]) -> R:
    """Call a function in another thread: vLLM creates its clients in the thread of a running event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="aiotensor-vllm") as threads:
        return threads.submit(function).result()


_exporting = threading.Lock()
_is_exporting = False


def _export_metrics(sender: blocking.TensorSender) -> None:
    """Export the statistics of this process in vLLM's registry, once, if prometheus_client is installed."""
    global _is_exporting
    try:
        from prometheus_client import REGISTRY, values

        from aiotensor.integrations.prometheus import AioTensorCollector, MultiprocessPublisher
    except ImportError:
        return
    with _exporting:
        if _is_exporting:
            return
        _is_exporting = True
    if getattr(values.ValueClass, "_multiprocess", False):  # several API servers: they share files
        _call_in_thread(lambda: sender.wait_for(MultiprocessPublisher().__aenter__))
    else:
        REGISTRY.register(AioTensorCollector())
