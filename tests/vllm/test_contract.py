"""vLLM has the names that the integration uses, with the expected signatures."""

import importlib
import inspect
import multiprocessing
from collections.abc import Callable
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm import plugins
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.utils.system_utils import get_mp_context
from vllm.v1.engine import core, core_client, tensor_ipc, utils
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, OOBTensorConsumer


def parameters(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_installed_vllm_is_the_tested_release_and_uses_the_torch_of_this_environment() -> None:
    assert version("vllm") == "0.33.0"
    assert torch.__version__.startswith("2.13.0")
    assert not torch.version.cuda


def test_vllm_is_installed_without_cuda_or_another_torch() -> None:
    folder = Path(vllm.__file__).parents[1]
    names = {distribution.name.lower() for distribution in distributions(path=[str(folder)])}
    assert "vllm" in names
    if (folder / "torch").exists():
        pytest.skip("vLLM is installed in the environment itself")
    assert not [name for name in names if name.startswith(("torch", "nvidia", "cuda", "triton"))]


@pytest.mark.parametrize(
    "name",
    [
        "vllm.plugins",
        "vllm.v1.serial_utils",
        "vllm.v1.engine.core",
        "vllm.v1.engine.core_client",
        "vllm.v1.engine.tensor_ipc",
        "vllm.v1.engine.utils",
        "vllm.v1.executor.multiproc_executor",
        "vllm.distributed.device_communicators.shm_broadcast",
    ],
)
def test_modules_import_without_a_gpu(name: str) -> None:
    assert importlib.import_module(name).__name__ == name


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (MsgpackEncoder, ["size_threshold", "oob_tensor_consumer"]),
        (MsgpackDecoder, ["t", "share_mem", "oob_tensor_provider"]),
        (OOBTensorConsumer.__call__, ["tensor"]),
        (OOBTensorConsumer.new_message, []),
        (tensor_ipc.TensorIpcSender, ["queue"]),
        (tensor_ipc.TensorIpcSender.set_target_engine, ["target_engine"]),
        (tensor_ipc.TensorIpcReceiver, ["queue"]),
        (tensor_ipc.TensorIpcReceiver.__call__, ["dtype", "shape", "meta"]),
        (core.EngineCoreProc.preprocess_add_request, ["request"]),
        (
            core.EngineCoreProc.process_input_sockets,
            ["input_addresses", "coord_input_address", "identity", "ready_event"],
        ),
        (plugins.load_general_plugins, []),
        (MessageQueue.enqueue, ["obj", "timeout"]),
        (MessageQueue.dequeue, ["timeout", "indefinite"]),
        (MessageQueue.create_from_handle, ["handle", "rank"]),
        (WorkerProc._init_message_queues, ["input_shm_handle", "vllm_config"]),
        (MultiprocExecutor, ["vllm_config", "monitor_workers"]),
    ],
)
def test_signatures_of_vllm_are_unchanged(function: Callable[..., Any], expected: list[str]) -> None:
    assert parameters(function) == expected


def test_engines_get_their_tensor_queue_from_the_context_of_their_processes() -> None:
    """The queue comes from `get_mp_context`, by the name in the module that launches engines."""
    assert utils.get_mp_context is get_mp_context
    assert "get_mp_context().Queue()" in inspect.getsource(utils.launch_core_engines)
    assert isinstance(get_mp_context(), multiprocessing.context.BaseContext)


def test_clients_and_engines_use_the_tensor_queue_by_the_names_in_their_modules() -> None:
    assert core_client.TensorIpcSender is tensor_ipc.TensorIpcSender
    assert core.TensorIpcReceiver is tensor_ipc.TensorIpcReceiver
    assert "tensor_queue" in parameters(core.EngineCoreProc)
    assert "client_addresses" in parameters(core_client.AsyncMPClient)
