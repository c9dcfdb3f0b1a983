"""The plugin for vLLM, an entry point of the group ``vllm.general_plugins``.

It replaces functions of vLLM by functions that call them, but only if the version and the signatures are
known. vLLM is not imported before ``AIOTENSOR_VLLM`` enables a part of the integration.
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from aiotensor.integrations.vllm import processes
from aiotensor.integrations.vllm.checks import (
    BROADCAST,
    CLIENT,
    ENGINE,
    EXECUTORS,
    TENSORS,
    WORKERS,
    UnsupportedError,
    check,
    log_at_startup,
    log_unchanged,
    owner_of,
)
from aiotensor.integrations.vllm.settings import Settings, begin_process, name_engines

Function = Callable[..., Any]


def register() -> None:
    """Enable the parts of the integration that ``AIOTENSOR_VLLM`` names; vLLM calls this in each process."""
    try:
        settings = Settings.from_environment()
        if not settings.parts:
            return
        for part, signatures in (("tensors", TENSORS), ("broadcast", BROADCAST)):
            if part in settings.parts:
                check(signatures)
    except (ValueError, UnsupportedError) as error:
        log_unchanged(error)
        return
    begin_process(settings)
    if "tensors" in settings.parts:
        _replace(CLIENT, "MPClient.__init__", _with_consumer)
        _replace(CLIENT, "AsyncMPClient._send_input", _as_message)
        _replace(CLIENT, "SyncMPClient._send_input", _as_message)
        _replace(ENGINE, "EngineCoreProc.process_input_sockets", _with_provider)
        _replace(ENGINE, "EngineCoreProc.preprocess_add_request", _checked)
    if "broadcast" in settings.parts:
        _replace(EXECUTORS, "Executor.get_class", _with_broadcast)
    processes.log_in_vllm()
    log_at_startup(logging.INFO, "vLLM uses aiotensor for %s", settings, event="vllm_enabled")


def _replace(module: str, name: str, make: Callable[[Function], Function]) -> None:
    """Replace a method of vLLM, unless it was replaced before.

    Args:
        module: the module that defines the class.
        name: the name of the method in the module.
        make: a function that returns the new method for the present one.
    """
    owner, attribute = owner_of(module, name)
    present = getattr(owner, attribute)
    if hasattr(present, "replaced_by_aiotensor"):
        return
    new: Any = functools.wraps(present)(make(present))
    new.replaced_by_aiotensor = present
    is_static = isinstance(inspect.getattr_static(owner, attribute), staticmethod)
    setattr(owner, attribute, staticmethod(new) if is_static else new)


# The replacements


def _with_consumer(init: Function) -> Function:
    def new_init(self: Any, asyncio_mode: bool, *args: Any, **options: Any) -> None:
        if options.get("client_addresses") is None:  # this client starts its own engines
            name_engines()
        consumer = processes.ClientConsumer(is_async=asyncio_mode)
        init(self, asyncio_mode, *args, **options)
        self.encoder.oob_tensor_consumer = consumer

    return new_init


def _as_message(send_input: Function) -> Function:
    def new_send_input(self: Any, request_type: Any, request: Any, engine: bytes | None = None) -> Any:
        consumer = self.encoder.oob_tensor_consumer
        block: AbstractContextManager[None] = nullcontext()
        # The engine receives the tensors only of added requests.
        if isinstance(consumer, processes.ClientConsumer) and request_type.name == "ADD":
            block = consumer.message(int.from_bytes(engine or self.core_engine, "little"))
        with block:
            return send_input(self, request_type, request, *([] if engine is None else [engine]))

    return new_send_input


def _with_provider(process_input_sockets: Function) -> Function:
    def new_process_input_sockets(self: Any, *args: Any, **options: Any) -> Any:
        provider = processes.open_provider(self.engine_index)
        if provider is not None:
            self.tensor_ipc_receiver = provider
        return process_input_sockets(self, *args, **options)

    return new_process_input_sockets


def _checked(preprocess: Function) -> Function:
    def preprocess_add_request(self: Any, request: Any) -> Any:
        if isinstance(self.tensor_ipc_receiver, processes.EngineProvider):
            self.tensor_ipc_receiver.check(request)
        return preprocess(self, request)

    return preprocess_add_request


def _with_broadcast(get_class: Function) -> Function:
    def new_get_class(vllm_config: Any) -> Any:
        executor = get_class(vllm_config)
        stock = importlib.import_module(WORKERS).MultiprocExecutor
        if executor is stock:
            return importlib.import_module("aiotensor.integrations.vllm.executor").BroadcastExecutor
        if not issubclass(executor, stock):
            _log_without_broadcast(executor.__name__)
        return executor

    return new_get_class


@functools.cache
def _log_without_broadcast(executor: str) -> None:
    log_unchanged(f"broadcast needs the executor of the backend mp, and vLLM uses {executor}")
