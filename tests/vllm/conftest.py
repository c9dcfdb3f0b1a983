"""Run the tests of this folder where vLLM is installed: `make test-vllm`."""

import inspect
import os
import warnings
from importlib.util import find_spec

import pytest

INSTALLED = find_spec("vllm") is not None

# Read when vLLM is imported, here and in the processes that tests start.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # the wheel is built for CUDA, and the tests need no GPU
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # otherwise the log of vLLM does not reach `caplog`
os.environ["VLLM_PLUGINS"] = ""  # tests enable the plugins that they need
os.environ["HF_HUB_OFFLINE"] = "1"

if INSTALLED:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not ours
        from vllm.v1.engine import core, core_client
        from vllm.v1.executor import Executor

# Warnings that these cause at a later time; a warning in aiotensor or in a test is still an error.
_NOT_OURS = r"ignore:::(vllm|torch|transformers|huggingface_hub|tvm_ffi|xgrammar)(\.|\Z)"


def pytest_ignore_collect() -> bool | None:
    """Skip the folder if vLLM is not installed."""
    return None if INSTALLED else True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Ignore warnings of vLLM and its imports, and allow for the time of imports in many processes."""
    item.add_marker(pytest.mark.filterwarnings(_NOT_OURS))
    item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore after a test all functions that the plugin replaces."""
    for owner, name in (
        (core_client.MPClient, "__init__"),
        (core_client.AsyncMPClient, "_send_input"),
        (core_client.SyncMPClient, "_send_input"),
        (core.EngineCoreProc, "process_input_sockets"),
        (core.EngineCoreProc, "preprocess_add_request"),
        (Executor, "get_class"),
    ):
        monkeypatch.setattr(owner, name, inspect.getattr_static(owner, name))
