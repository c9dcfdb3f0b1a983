"""The plugin of vLLM, an entry point of the group ``vllm.general_plugins``.

It replaces names of vLLM's, and only if the version and the signatures are known. Nothing here imports vLLM
before ``AIOTENSOR_VLLM`` enables a part of the integration.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from aiotensor import TensorQueue
from aiotensor.integrations.vllm import processes
from aiotensor.integrations.vllm.consumer import TensorConsumer
from aiotensor.integrations.vllm.processes import EngineQueue
from aiotensor.integrations.vllm.settings import Settings, modes
from aiotensor.runtime.logs import logger_of

__all__ = ["KNOWN_VERSIONS", "register"]

logger = logger_of("vllm")

KNOWN_VERSIONS = ("0.33",)

_CLIENT = "vllm.v1.engine.core_client"
_ENGINE = "vllm.v1.engine.core"
_LAUNCH = "vllm.v1.engine.utils"
_EXECUTORS = "vllm.v1.executor.abstract"
_WORKERS = "vllm.v1.executor.multiproc_executor"

# The names that each part replaces or relies on, with their parameters.
_Signatures: TypeAlias = dict[tuple[str, str], tuple[str, ...]]

_TENSORS: _Signatures = {
    (_LAUNCH, "get_mp_context"): (),
    (_CLIENT, "AsyncMPClient.__init__"): (
        "self",
        "vllm_config",
        "executor_class",
        "log_stats",
        "client_addresses",
        "client_count",
        "client_index",
        "renderer",
    ),
    (_CLIENT, "TensorIpcSender"): ("queue",),
    (_CLIENT, "TensorIpcSender.__call__"): ("self", "tensor"),
    (_CLIENT, "TensorIpcSender.new_message"): ("self",),
    (_CLIENT, "TensorIpcSender.set_target_engine"): ("self", "target_engine"),
    (_CLIENT, "MsgpackEncoder"): ("size_threshold", "oob_tensor_consumer"),
    (_CLIENT, "MsgpackEncoder.encode"): ("self", "obj"),
    (_CLIENT, "MsgpackEncoder.encode_into"): ("self", "obj", "buf"),
    (_ENGINE, "TensorIpcReceiver"): ("queue",),
    (_ENGINE, "TensorIpcReceiver.__call__"): ("self", "dtype", "shape", "meta"),
    (_ENGINE, "EngineCoreProc.preprocess_add_request"): ("self", "request"),
}

_BROADCAST: _Signatures = {
    (_EXECUTORS, "Executor.get_class"): ("vllm_config",),
    (_WORKERS, "MultiprocExecutor._init_executor"): ("self",),
    (_WORKERS, "WorkerProc._init_message_queues"): ("self", "input_shm_handle", "vllm_config"),
    (_WORKERS, "MessageQueue"): (
        "n_reader",
        "n_local_reader",
        "local_reader_ranks",
        "max_chunk_bytes",
        "max_chunks",
        "connect_ip",
        "enable_shm_tensor_arena",
    ),
    (_WORKERS, "MessageQueue.export_handle"): ("self",),
    (_WORKERS, "MessageQueue.create_from_handle"): ("handle", "rank"),
    (_WORKERS, "MessageQueue.wait_until_ready"): ("self",),
    (_WORKERS, "MessageQueue.enqueue"): ("self", "obj", "timeout"),
    (_WORKERS, "MessageQueue.dequeue"): ("self", "timeout", "indefinite"),
    (_WORKERS, "MessageQueue.shutdown"): ("self",),
}


class _UnknownError(Exception):
    """This vLLM differs from the known ones."""


def register() -> None:
    """Enable the parts of the integration that ``AIOTENSOR_VLLM`` names; vLLM calls this in each process."""
    try:
        enabled, settings = modes(), Settings.from_environment()
        if not enabled:
            return
        for part, signatures in (("tensors", _TENSORS), ("broadcast", _BROADCAST)):
            if part in enabled:
                _check_vllm(signatures)
    except (ValueError, _UnknownError) as error:
        logger.warning(
            "aiotensor changes nothing in vLLM: %s",
            error,
            extra={"event": "vllm_unchanged", "reason": str(error)},
        )
        return
    if "tensors" in enabled:
        install_tensors()
    if "broadcast" in enabled:
        _replace(_EXECUTORS, "Executor.get_class", _with_broadcast)
    logger.info(
        "aiotensor is used by vLLM for %s: %s",
        ", ".join(sorted(enabled)),
        settings,
        extra={"event": "vllm_enabled", "parts": sorted(enabled)},
    )


def install_tensors() -> None:
    """Replace the names of the tensor transport, once in each process."""
    _replace(_LAUNCH, "get_mp_context", _context_maker)
    _replace(_CLIENT, "TensorIpcSender", _sender_maker)
    _replace(_CLIENT, "AsyncMPClient.__init__", _async_client)
    _replace(_CLIENT, "MsgpackEncoder", _encoder_class)
    _replace(_ENGINE, "TensorIpcReceiver", _receiver_maker)
    _replace(_ENGINE, "EngineCoreProc.preprocess_add_request", _checked)


def _replace(module: str, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a name of vLLM's, unless that was done before.

    Args:
        module: the module of the name.
        name: with dots if it is an attribute of a class.
        make: returns the new object, given the present one.
    """
    owner, attribute = _owner_of(module, name)
    present = getattr(owner, attribute)
    if hasattr(present, "replaced_by_aiotensor"):
        return
    new = make(present)
    new.replaced_by_aiotensor = present
    is_static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
    setattr(owner, attribute, staticmethod(new) if is_static else new)


# The check


def _check_vllm(signatures: _Signatures) -> None:
    try:
        version = str(importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError) as error:
        raise _UnknownError(f"its version is unknown ({error})") from error
    if not any(version == known or version.startswith(f"{known}.") for known in KNOWN_VERSIONS):
        raise _UnknownError(
            f"its version {version} is unknown, known are {', '.join(KNOWN_VERSIONS)}: update aiotensor"
        )
    for (module, name), expected in signatures.items():
        try:
            owner, attribute = _owner_of(module, name)
            found = _original(getattr(owner, attribute))
        except (ImportError, AttributeError) as error:
            raise _UnknownError(f"{module}.{name} of version {version} is missing ({error})") from error
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != expected:
            raise _UnknownError(
                f"{module}.{name} of version {version} has the parameters {parameters}, expected {expected}"
            )


def _owner_of(module: str, name: str) -> tuple[Any, str]:
    """Return the object that has an attribute, and the name of the attribute there."""
    owner = importlib.import_module(module)
    *path, attribute = name.split(".")
    for part in path:
        owner = _original(getattr(owner, part))
    return owner, attribute


def _original(present: Any) -> Any:
    """Return the object of vLLM's that this module has replaced, or the object itself."""
    return getattr(present, "replaced_by_aiotensor", present)


# The replacements


def _context_maker(get_mp_context: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(get_mp_context)
    def replaced() -> Any:
        return _Context(get_mp_context())

    return replaced


class _Context:
    """A context of multiprocessing whose queues are queues of aiotensor."""

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
        if executor is importlib.import_module(_WORKERS).MultiprocExecutor:
            executor = importlib.import_module("aiotensor.integrations.vllm.executor").BroadcastExecutor
        return executor

    return replaced
