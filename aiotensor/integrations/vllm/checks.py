"""The names in vLLM that the integration replaces or relies on, and a check of their parameters."""

import importlib
import inspect
from typing import Any, TypeAlias

from aiotensor.runtime.logs import logger_of

__all__ = [
    "BROADCAST",
    "CLIENT",
    "ENGINE",
    "EXECUTORS",
    "KNOWN_VERSIONS",
    "LAUNCH",
    "TENSORS",
    "WORKERS",
    "UnsupportedError",
    "check",
    "log_unchanged",
    "original",
    "owner_of",
]

logger = logger_of("vllm")

KNOWN_VERSIONS = ("0.32", "0.33")

CLIENT = "vllm.v1.engine.core_client"
ENGINE = "vllm.v1.engine.core"
LAUNCH = "vllm.v1.engine.utils"
EXECUTORS = "vllm.v1.executor.abstract"
WORKERS = "vllm.v1.executor.multiproc_executor"

# The names that each part replaces or relies on, with their parameters.
Signatures: TypeAlias = dict[tuple[str, str], tuple[str, ...]]

TENSORS: Signatures = {
    (LAUNCH, "get_mp_context"): (),
    (CLIENT, "AsyncMPClient.__init__"): (
        "self",
        "vllm_config",
        "executor_class",
        "log_stats",
        "client_addresses",
        "client_count",
        "client_index",
        "renderer",
    ),
    (CLIENT, "TensorIpcSender"): ("queue",),
    (CLIENT, "TensorIpcSender.__call__"): ("self", "tensor"),
    (CLIENT, "TensorIpcSender.new_message"): ("self",),
    (CLIENT, "TensorIpcSender.set_target_engine"): ("self", "target_engine"),
    (CLIENT, "MsgpackEncoder"): ("size_threshold", "oob_tensor_consumer"),
    (CLIENT, "MsgpackEncoder.encode"): ("self", "obj"),
    (CLIENT, "MsgpackEncoder.encode_into"): ("self", "obj", "buf"),
    (ENGINE, "TensorIpcReceiver"): ("queue",),
    (ENGINE, "TensorIpcReceiver.__call__"): ("self", "dtype", "shape", "meta"),
    (ENGINE, "EngineCoreProc.preprocess_add_request"): ("self", "request"),
}

BROADCAST: Signatures = {
    (EXECUTORS, "Executor.get_class"): ("vllm_config",),
    (WORKERS, "MultiprocExecutor._init_executor"): ("self",),
    (WORKERS, "WorkerProc._init_message_queues"): ("self", "input_shm_handle", "vllm_config"),
    (WORKERS, "MessageQueue"): (
        "n_reader",
        "n_local_reader",
        "local_reader_ranks",
        "max_chunk_bytes",
        "max_chunks",
        "connect_ip",
        "enable_shm_tensor_arena",
    ),
    (WORKERS, "MessageQueue.export_handle"): ("self",),
    (WORKERS, "MessageQueue.create_from_handle"): ("handle", "rank"),
    (WORKERS, "MessageQueue.wait_until_ready"): ("self",),
    (WORKERS, "MessageQueue.enqueue"): ("self", "obj", "timeout"),
    (WORKERS, "MessageQueue.dequeue"): ("self", "timeout", "indefinite"),
    (WORKERS, "MessageQueue.shutdown"): ("self",),
}


class UnsupportedError(Exception):
    """This version of vLLM is unknown, or its configuration is not supported."""


def check(signatures: Signatures) -> None:
    """Check the version of vLLM, and the parameters of the given names.

    Raises:
        UnsupportedError: the version is unknown, a name is missing, or its parameters differ.
    """
    try:
        version = str(importlib.import_module("vllm").__version__)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"its version is unknown ({error})") from error
    if not any(version == known or version.startswith(f"{known}.") for known in KNOWN_VERSIONS):
        raise UnsupportedError(
            f"its version {version} is not supported, only {', '.join(KNOWN_VERSIONS)}: update aiotensor"
        )
    for (module, name), expected in signatures.items():
        try:
            owner, attribute = owner_of(module, name)
            found = original(getattr(owner, attribute))
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(f"{module}.{name} of version {version} is missing ({error})") from error
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != expected:
            raise UnsupportedError(
                f"{module}.{name} of version {version} has the parameters {parameters}, expected {expected}"
            )


def owner_of(module: str, name: str) -> tuple[Any, str]:
    """Return the module or class that has a name as an attribute, and the name of that attribute."""
    owner = importlib.import_module(module)
    *path, attribute = name.split(".")
    for part in path:
        owner = original(getattr(owner, part))
    return owner, attribute


def original(present: Any) -> Any:
    """Return the object of vLLM that was replaced by an object of aiotensor, or the object itself."""
    return getattr(present, "replaced_by_aiotensor", present)


def log_unchanged(reason: object) -> None:
    """Log that the integration leaves vLLM unchanged."""
    logger.warning(
        "aiotensor leaves vLLM unchanged: %s",
        reason,
        extra={"event": "vllm_unchanged", "reason": str(reason)},
    )
