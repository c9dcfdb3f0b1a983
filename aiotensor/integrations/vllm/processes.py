"""The transport of tensors in the processes of vLLM: the queue, the client's end and the engine's end.

The process that launches the engines makes an `EngineQueue`, and passes it to its children. A child that
receives it replaces the names in vLLM, because vLLM creates the receiving end before it loads plugins.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch

from aiotensor import TensorQueue, TensorSender, blocking
from aiotensor.blocking.thread import Call, borrow
from aiotensor.errors import AioTensorError, DiscardedError
from aiotensor.integrations.vllm.consumer import TensorConsumer
from aiotensor.integrations.vllm.provider import TensorProvider
from aiotensor.integrations.vllm.settings import Settings
from aiotensor.memory.tensors import dtype_from_name
from aiotensor.runtime.affinity import close_now
from aiotensor.runtime.logs import logger_of
from aiotensor.types import TensorHandle

__all__ = [
    "ClientConsumer",
    "EngineProvider",
    "EngineQueue",
    "check_request",
    "export_metrics",
    "open_consumer",
    "open_provider",
]

logger = logger_of("vllm")

R = TypeVar("R")


class EngineQueue:
    """The object that vLLM passes to its processes in place of a queue of multiprocessing.

    Args:
        endpoint: the endpoint at which the engine receives tensors.
        settings: the limits of senders and the receiver.
        install: a function that is called in each process that receives the queue from its parent.
    """

    def __init__(
        self, endpoint: TensorQueue | str, settings: Settings, install: Callable[[], object]
    ) -> None:
        self.endpoint = endpoint
        self.settings = settings
        self._install = install

    def close(self) -> None:
        """Do nothing: unlike a queue of multiprocessing, it has no ends to close."""

    def __reduce__(self) -> tuple[Callable[..., "EngineQueue"], tuple[object, ...]]:
        return _inherited, (self.endpoint, self.settings, self._install)


def _inherited(endpoint: TensorQueue | str, settings: Settings, install: Callable[[], object]) -> EngineQueue:
    install()
    return EngineQueue(endpoint, settings, install)


class ClientConsumer(TensorConsumer):
    """Send the tensors of a vLLM client; the sender is opened for the first tensor.

    In an asynchronous client, the sender runs in the event loop of the client. If it ran in a thread, this
    loop would wait for that thread while the copies of other tensors occupy the processors.

    Args:
        queue: the queue to the engine.

    Attributes:
        is_async: whether tensors are encoded in an event loop that continues to run.
    """

    def __init__(self, queue: EngineQueue) -> None:
        limits = queue.settings
        self._arguments = queue.endpoint, limits.max_concurrent_videos, limits.arena_bytes
        super().__init__(blocking.TensorSender(*self._arguments))
        self.is_async = False
        self._is_open = False

    def _post(self, tensor: torch.Tensor) -> TensorHandle:
        if not self._is_open:
            self.senders = [self._open_in_loop() if self.is_async else self._open_in_thread()]
            self._is_open = True
        return super()._post(tensor)

    def _open_in_loop(self) -> TensorSender:
        sender = TensorSender(*self._arguments)
        try:
            sender.__aenter__().send(None)
        except StopIteration:
            pass  # it is open
        else:
            raise AssertionError("opening a sender does not wait")
        sender.affinity.has_guardian = True
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _close_in_loop, loop, sender).atexit = False
        return sender

    def _open_in_thread(self) -> blocking.TensorSender:
        sender = blocking.TensorSender(*self._arguments)
        _call_in_thread(sender.__enter__)
        weakref.finalize(self, sender.abandon).atexit = False  # the threads have stopped by then
        return sender


def open_consumer(queue: EngineQueue) -> ClientConsumer:
    """Return the sending end of an API server; its sender is closed when the consumer is freed."""
    export_metrics()
    return ClientConsumer(queue)


def open_provider(queue: EngineQueue) -> "EngineProvider":
    """Open the receiving end of the engine; the receiver is closed when the provider is freed.

    Raises:
        AioTensorError: the receiver cannot be opened here.
        OSError: the machine has no threads or no descriptors left.
    """
    receiver = blocking.TensorReceiver(
        queue.endpoint,
        max_senders=None,  # vLLM determines the number of API servers, and each one has its own limits
        max_mapped_bytes=None,
        max_unclaimed_messages=None,
        max_wait_s=queue.settings.max_wait_s,
    )
    _call_in_thread(receiver.__enter__)
    provider = EngineProvider(receiver)
    weakref.finalize(provider, receiver.abandon).atexit = False
    return provider


class EngineProvider(TensorProvider):
    """Receive tensors in the input thread of vLLM's engine, which any error of the decoder would end.

    A tensor that is lost, for example because its API server was killed, is replaced by one without values,
    on the meta device. `check_request` raises for the request before the engine uses or caches it.
    """

    def __call__(self, dtype: str, shape: tuple[int, ...], data: dict[str, Any]) -> torch.Tensor:
        """Wait for the tensor of a placeholder, and return it; if it is lost, a tensor on the meta device."""
        try:
            return super().__call__(dtype, shape, data)
        except AioTensorError as error:
            logger.error(
                "a tensor of a request was lost: %s",
                error,
                extra={"event": "tensor_lost", "error": type(error).__name__, "reason": str(error)},
            )
            self.discard(data)
            return torch.empty(shape, dtype=dtype_from_name(dtype), device="meta")


def check_request(request: Any) -> None:
    """Raise `DiscardedError` if a tensor of a request was lost.

    Args:
        request: an ``EngineCoreRequest``.
    """
    for tensor in _tensors_of(request):
        if tensor.is_meta:
            raise DiscardedError(
                f"a tensor of request {request.request_id} was lost before it reached the engine: send the "
                "request again"
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


def _close_in_loop(loop: asyncio.AbstractEventLoop, sender: TensorSender) -> None:
    with suppress(RuntimeError):  # the loop is closed, and has no references to the sender
        loop.call_soon_threadsafe(close_now, sender.aclose)


def _call_in_thread(function: Callable[[], R]) -> R:
    """Call a function in another thread: vLLM creates its clients in the thread of a running event loop."""
    with ThreadPoolExecutor(1, thread_name_prefix="aiotensor-vllm") as threads:
        return threads.submit(function).result()


_exporting = threading.Lock()
_exporter: int | None = None  # the id of the process that called `export_metrics`


def export_metrics() -> None:
    """Add the statistics of this process to the metrics of vLLM, once, if prometheus_client is installed."""
    global _exporter
    try:
        from prometheus_client import REGISTRY, values

        from aiotensor.integrations.prometheus import AioTensorCollector, MultiprocessPublisher
    except ImportError:
        return
    with _exporting:
        before, _exporter = _exporter, os.getpid()
    if before == _exporter:
        return
    if not getattr(values.ValueClass, "_multiprocess", False):
        if before is None:  # a forked child inherits the collector, but not the publisher
            REGISTRY.register(AioTensorCollector())
        return

    async def publish() -> None:  # to files, because there are several API servers
        try:
            await MultiprocessPublisher().__aenter__()
        except OSError as error:
            _log_no_metrics(error)

    try:
        borrow(export_metrics).begin(Call(publish))
    except OSError as error:  # no thread is left, and tensors will be declined for the same reason
        _log_no_metrics(error)


def _log_no_metrics(error: OSError) -> None:
    logger.error(
        "the metrics of aiotensor are not exported: %s",
        error,
        extra={"event": "vllm_metrics_failed", "reason": str(error)},
    )
