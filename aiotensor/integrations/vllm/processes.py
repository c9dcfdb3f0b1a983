"""The transport of tensors in the processes of vLLM: the client's end, the engine's end, metrics and logs."""

import asyncio
import importlib
import logging
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from aiotensor import TensorSender, blocking
from aiotensor.blocking.thread import Call, borrow
from aiotensor.errors import AioTensorError, again
from aiotensor.integrations.vllm.checks import log_unchanged
from aiotensor.integrations.vllm.hooks import Sender, TensorConsumer, TensorProvider
from aiotensor.integrations.vllm.settings import Settings
from aiotensor.memory.tensors import dtype_from_name
from aiotensor.runtime.affinity import close_now
from aiotensor.runtime.logs import logger_of

logger = logger_of("vllm")


class ClientConsumer(TensorConsumer):
    """Send the tensors of a vLLM client; the sender for an engine is opened for its first tensor.

    In an asynchronous client, the senders run in the event loop of the client. If they ran in a thread, this
    loop would wait for that thread while the copies of other tensors occupy the processors.

    Args:
        is_async: whether messages are encoded in an event loop that continues to run.
    """

    def __init__(self, *, is_async: bool) -> None:
        super().__init__()
        self._is_async = is_async
        self._settings = Settings.from_environment()
        export_metrics()

    def sender_of(self, engine: int) -> Sender:
        """Return the sender for an engine, opened if necessary."""
        if engine not in self.senders:
            open_sender = self._open_in_loop if self._is_async else self._open_in_thread
            self.senders[engine] = open_sender(engine)
        return self.senders[engine]

    def _open_in_loop(self, engine: int) -> TensorSender:
        sender = TensorSender(*self._arguments(engine))
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

    def _open_in_thread(self, engine: int) -> blocking.TensorSender:
        sender = blocking.TensorSender(*self._arguments(engine))
        # The caller may run an event loop, for example in a notebook.
        with ThreadPoolExecutor(1, thread_name_prefix="aiotensor-vllm") as threads:
            threads.submit(sender.__enter__).result()
        weakref.finalize(self, sender.abandon).atexit = False  # the threads have stopped by then
        return sender

    def _arguments(self, engine: int) -> tuple[Any, ...]:
        settings = self._settings
        return settings.engine_endpoint(engine), settings.max_concurrent_videos, settings.arena_bytes


def _close_in_loop(loop: asyncio.AbstractEventLoop, sender: TensorSender) -> None:
    with suppress(RuntimeError):  # the loop is closed, and has no references to the sender
        loop.call_soon_threadsafe(close_now, sender.aclose)


def open_provider(engine: int) -> "EngineProvider | None":
    """Open the receiving end of an engine; return None, and log the reason, if the machine cannot open it.

    Raises:
        UsageError: another engine listens at the address. Its clients could not tell the two apart.
    """
    settings = Settings.from_environment()
    receiver = blocking.TensorReceiver(
        settings.engine_endpoint(engine),
        max_senders=None,  # vLLM determines the number of API servers, and each one has its own limits
        max_mapped_bytes=None,
        max_unclaimed_messages=None,
        max_wait_s=settings.max_wait_s,
    )
    try:
        receiver.__enter__()
    except OSError as error:
        log_unchanged(error)
        return None
    export_metrics()
    return EngineProvider(receiver)


class EngineProvider(TensorProvider):
    """Receive tensors in the input thread of vLLM's engine, which any error of the decoder would end.

    A tensor that is lost, for example because its API server was killed, is replaced by one without values,
    on the meta device. `check` raises for its request before the engine uses or caches any part of it.
    """

    _loss: AioTensorError | None = None  # of the message that is being decoded

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
            self._loss = again(error)
            with suppress(AioTensorError):
                self.discard(data)
            return torch.empty(shape, dtype=dtype_from_name(dtype), device="meta")

    def check(self, request: Any) -> None:
        """Raise an error if a tensor was lost while a request was decoded.

        Args:
            request: the ``EngineCoreRequest`` that was decoded last.
        """
        loss, self._loss = self._loss, None
        if loss is not None and request.mm_features:
            # vLLM then asks the client to send the request again, and clears the inputs from its cache.
            cache = importlib.import_module("vllm.multimodal.cache")
            hashes = [feature.mm_hash or feature.identifier for feature in request.mm_features]
            raise cache.MultiModalCacheMissError(hashes) from loss
        if loss is not None:
            raise loss


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


def log_in_vllm() -> None:
    """Write the warnings of the library to vLLM's log, unless the application has configured their logger."""
    library, root = logging.getLogger("aiotensor"), logging.getLogger()
    if all(isinstance(handler, logging.NullHandler) for handler in library.handlers + root.handlers):
        library.addHandler(_VllmLog(logging.WARNING))


class _VllmLog(logging.Handler):
    """A handler that gives records to the handlers of vLLM's logger."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("vllm").handle(record)
