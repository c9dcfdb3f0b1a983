"""The names in vLLM that the integration replaces or relies on, and a check of their parameters."""

import importlib
import inspect
import logging
from typing import Any, TypeAlias

from aiotensor.runtime.logs import logger_of

logger = logger_of("vllm")

KNOWN_VERSIONS = ("0.32", "0.33")

CLIENT = "vllm.v1.engine.core_client"
ENGINE = "vllm.v1.engine.core"
EXECUTORS = "vllm.v1.executor.abstract"
WORKERS = "vllm.v1.executor.multiproc_executor"

# The names that each part replaces or relies on, with their parameters.
Signatures: TypeAlias = dict[tuple[str, str], tuple[str, ...]]

TENSORS: Signatures = {
    (CLIENT, "MPClient.__init__"): (
        "self",
        "asyncio_mode",
        "vllm_config",
        "executor_class",
        "log_stats",
        "client_addresses",
        "renderer",
    ),
    (CLIENT, "AsyncMPClient._send_input"): ("self", "request_type", "request", "engine"),
    (CLIENT, "SyncMPClient._send_input"): ("self", "request_type", "request"),
    (CLIENT, "MsgpackEncoder"): ("size_threshold", "oob_tensor_consumer"),
    (ENGINE, "MsgpackDecoder"): ("t", "share_mem", "oob_tensor_provider"),
    (ENGINE, "EngineCoreProc.process_input_sockets"): (
        "self",
        "input_addresses",
        "coord_input_address",
        "identity",
        "ready_event",
    ),
    (ENGINE, "EngineCoreProc.preprocess_add_request"): ("self", "request"),
    ("vllm.multimodal.cache", "MultiModalCacheMissError"): ("mm_hashes",),
}

BROADCAST: Signatures = {
    (EXECUTORS, "Executor.get_class"): ("vllm_config",),
    (WORKERS, "MultiprocExecutor._init_executor"): ("self",),
    (WORKERS, "MultiprocExecutor.collective_rpc"): (
        "self",
        "method",
        "timeout",
        "args",
        "kwargs",
        "non_block",
        "unique_reply_rank",
        "kv_output_aggregator",
        "ec_output_aggregator",
    ),
    (WORKERS, "MultiprocExecutor.shutdown"): ("self",),
    (WORKERS, "WorkerWrapperBase.execute_model"): ("self", "scheduler_output"),
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
        owner = getattr(owner, part)
    return owner, attribute


def original(present: Any) -> Any:
    """Return the function of vLLM that was replaced by a function of aiotensor, or the object itself."""
    return getattr(present, "replaced_by_aiotensor", present)


def log_unchanged(reason: object) -> None:
    """Log that the integration leaves vLLM unchanged."""
    log_at_startup(logging.ERROR, "aiotensor leaves vLLM unchanged: %s", reason, event="vllm_unchanged")


def log_at_startup(level: int, text: str, argument: object, *, event: str) -> None:
    """Log an event; on stderr in vLLM's main process, which loads plugins before it configures its log."""
    early = None if logger.hasHandlers() else logging.StreamHandler()
    if early is not None:
        early.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
        logger.addHandler(early)
        logger.setLevel(logging.INFO)
    logger.log(level, text, argument, extra={"event": event, "reason": str(argument)})
    if early is not None:
        logger.removeHandler(early)
        logger.setLevel(logging.NOTSET)
