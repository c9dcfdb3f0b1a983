"""The plugin of vLLM, an entry point of the group ``vllm.general_plugins``.

It replaces names of vLLM's, and only if the version and the signatures are known. Nothing here imports vLLM
before ``AIOTENSOR_VLLM`` enables a part of the integration.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

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

# The names that this module replaces or relies on, with their parameters.
_SIGNATURES: dict[tuple[str, str], tuple[str, ...]] = {
    (_LAUNCH, "get_mp_context"): (),
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


class _UnknownError(Exception):
    """This vLLM differs from the known ones."""


class _Replacement(NamedTuple):
    """A name of vLLM's, and the function that returns the new object, given the present one."""

    module: str
    name: str
    make: Callable[[Any], Any]


def register() -> None:
    """Enable the parts of the integration that ``AIOTENSOR_VLLM`` names; vLLM calls this in each process."""
    try:
        if "tensors" in modes():
            settings = Settings.from_environment()
            install()
            logger.info("aiotensor carries tensors of vLLM: %s", settings, extra={"event": "vllm_enabled"})
    except ValueError as error:
        _log_unchanged(error)


def install() -> None:
    """Replace the names of the tensor transport, once in each process; log a warning if they are unknown."""
    try:
        _check_vllm()
    except _UnknownError as error:
        _log_unchanged(error)
        return
    for replacement in _REPLACEMENTS:
        owner, name = _owner_of(replacement.module, replacement.name)
        present = getattr(owner, name)
        if not hasattr(present, "replaced_by_aiotensor"):
            new = replacement.make(present)
            new.replaced_by_aiotensor = present
            setattr(owner, name, new)


def _log_unchanged(reason: Exception) -> None:
    logger.warning(
        "aiotensor changes nothing in vLLM: %s",
        reason,
        extra={"event": "vllm_unchanged", "reason": str(reason)},
    )


# The check


def _check_vllm() -> None:
    try:
        version = str(importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError) as error:
        raise _UnknownError(f"its version is unknown ({error})") from error
    if not any(version == known or version.startswith(f"{known}.") for known in KNOWN_VERSIONS):
        raise _UnknownError(
            f"its version {version} is unknown, known are {', '.join(KNOWN_VERSIONS)}: update aiotensor"
        )
    for (module, name), expected in _SIGNATURES.items():
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
        return EngineQueue(settings.address or TensorQueue(), settings, install)


def _sender_maker(stock: Any) -> Callable[[Any], Any]:
    def open_sender(queue: Any) -> Any:
        return processes.open_consumer(queue) if isinstance(queue, EngineQueue) else stock(queue)

    return open_sender


def _receiver_maker(stock: Any) -> Callable[[Any], Any]:
    def open_receiver(queue: Any) -> Any:
        return processes.open_provider(queue) if isinstance(queue, EngineQueue) else stock(queue)

    return open_receiver


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


_REPLACEMENTS = (
    _Replacement(_LAUNCH, "get_mp_context", _context_maker),
    _Replacement(_CLIENT, "TensorIpcSender", _sender_maker),
    _Replacement(_CLIENT, "MsgpackEncoder", _encoder_class),
    _Replacement(_ENGINE, "TensorIpcReceiver", _receiver_maker),
    _Replacement(_ENGINE, "EngineCoreProc.preprocess_add_request", _checked),
)
