"""The plugin for vLLM, an entry point of the group ``vllm.general_plugins``.

It replaces names in vLLM, but only if the version and the signatures are known. vLLM is not imported before
``AIOTENSOR_VLLM`` enables a part of the integration.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from aiotensor import TensorQueue
from aiotensor.integrations.vllm import processes
from aiotensor.integrations.vllm.checks import (
    BROADCAST,
    CLIENT,
    ENGINE,
    EXECUTORS,
    LAUNCH,
    TENSORS,
    WORKERS,
    UnsupportedError,
    check,
    log_unchanged,
    owner_of,
)
from aiotensor.integrations.vllm.consumer import TensorConsumer
from aiotensor.integrations.vllm.processes import EngineQueue
from aiotensor.integrations.vllm.settings import Settings, modes
from aiotensor.runtime.logs import logger_of

__all__ = ["install_tensors", "register"]

logger = logger_of("vllm")


def register() -> None:
    """Enable the parts of the integration that ``AIOTENSOR_VLLM`` names; vLLM calls this in each process."""
    try:
        enabled, settings = modes(), Settings.from_environment()
        if not enabled:
            return
        for part, signatures in (("tensors", TENSORS), ("broadcast", BROADCAST)):
            if part in enabled:
                check(signatures)
    except (ValueError, UnsupportedError) as error:
        log_unchanged(error)
        return
    if "tensors" in enabled:
        install_tensors()
    if "broadcast" in enabled:
        _replace(EXECUTORS, "Executor.get_class", _with_broadcast)
    logger.info(
        "aiotensor is used by vLLM for %s: %s",
        ", ".join(sorted(enabled)),
        settings,
        extra={"event": "vllm_enabled", "parts": sorted(enabled)},
    )


def install_tensors() -> None:
    """Replace vLLM's transport of tensors. Repeated calls in a process have no effect."""
    _replace(LAUNCH, "get_mp_context", _context_maker)
    _replace(CLIENT, "TensorIpcSender", _sender_maker)
    _replace(CLIENT, "AsyncMPClient.__init__", _async_client)
    _replace(CLIENT, "MsgpackEncoder", _encoder_class)
    _replace(ENGINE, "TensorIpcReceiver", _receiver_maker)
    _replace(ENGINE, "EngineCoreProc.preprocess_add_request", _checked)


def _replace(module: str, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an object in vLLM, unless it was replaced before.

    Args:
        module: the module that defines the object.
        name: the name of the object in the module; with a dot for an attribute of a class.
        make: a function that returns the new object for the present one.
    """
    owner, attribute = owner_of(module, name)
    present = getattr(owner, attribute)
    if hasattr(present, "replaced_by_aiotensor"):
        return
    new = make(present)
    new.replaced_by_aiotensor = present
    is_static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
    setattr(owner, attribute, staticmethod(new) if is_static else new)


# The replacements


def _context_maker(get_mp_context: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(get_mp_context)
    def replaced() -> Any:
        return _Context(get_mp_context())

    return replaced


class _Context:
    """A multiprocessing context whose queues are queues of aiotensor."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 - the name of multiprocessing
        if self._context.get_start_method() == "fork":
            return self._context.Queue(maxsize)  # vLLM rejects it with a clear message
        settings = Settings.from_environment()
        return EngineQueue(settings.address or TensorQueue(), settings, install_tensors)


def _sender_maker(stock: Any) -> Callable[[Any], Any]:
    def open_sender(queue: Any) -> Any:
        return processes.open_consumer(queue) if isinstance(queue, EngineQueue) else stock(queue)

    return open_sender


def _receiver_maker(stock: Any) -> Callable[[Any], Any]:
    def open_receiver(queue: Any) -> Any:
        return processes.open_provider(queue) if isinstance(queue, EngineQueue) else stock(queue)

    return open_receiver


def _async_client(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def new_init(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        consumer = self.encoder.oob_tensor_consumer
        if isinstance(consumer, processes.ClientConsumer):
            consumer.is_async = True

    return new_init


def _encoder_class(stock: Any) -> Any:
    class Encoder(stock):  # type: ignore[misc]
        """An encoder that reports the end of each message to its consumer."""

        def encode(self, obj: Any) -> Any:
            if not isinstance(self.oob_tensor_consumer, TensorConsumer):
                return super().encode(obj)
            with self.oob_tensor_consumer.message():
                return super().encode(obj)

        def encode_into(self, obj: Any, buf: bytearray) -> Any:
            if not isinstance(self.oob_tensor_consumer, TensorConsumer):
                return super().encode_into(obj, buf)
            with self.oob_tensor_consumer.message():
                return super().encode_into(obj, buf)

    return Encoder


def _checked(preprocess: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    @functools.wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        processes.check_request(request)
        return preprocess(self, request)

    return preprocess_add_request


def _with_broadcast(get_class: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(get_class)
    def replaced(vllm_config: Any) -> Any:
        executor = get_class(vllm_config)
        if executor is importlib.import_module(WORKERS).MultiprocExecutor:
            executor = importlib.import_module("aiotensor.integrations.vllm.executor").BroadcastExecutor
        return executor

    return replaced
