"""What the plugin does without vLLM's own code; `tests/vllm` uses that code."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiotensor.integrations.vllm.checks import UnsupportedError, check


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("0.31.9", False), ("0.32.0", True), ("0.33.1+cpu", True), ("0.34.0", False), ("0.330.0", False)],
)
def test_two_minor_versions_of_vllm_are_supported(
    version: str, is_supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    if is_supported:
        check({})
    else:
        with pytest.raises(UnsupportedError, match=f"version {version} is not supported, only 0.32, 0.33"):
            check({})


# Forks, as vLLM does to start a worker. The queue for calls, and the worker itself, are not used.
METRICS = """
import os, struct, sys, time
from unittest.mock import MagicMock

modules = MagicMock()
modules.MultiprocExecutor = type("MultiprocExecutor", (), {"_init_executor": lambda self: None})
sys.modules["vllm.v1.executor.multiproc_executor"] = modules

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from aiotensor.integrations.vllm import executor

executor.check = lambda signatures: None

registry = REGISTRY
if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
    registry = CollectorRegistry()
    MultiProcessCollector(registry)

def scraped():
    try:
        return generate_latest(registry).decode()
    except struct.error:  # the client of Prometheus reads a file that another process has just created
        return ""

def wait_for(gauge):
    end = time.monotonic() + 30  # also after the test has failed
    while f"aiotensor_{gauge}{{" not in scraped():
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(0.01)

class Engine(executor.BroadcastExecutor):
    world_size = 1
    parallel_config = MagicMock(nnodes_within_dp=1, data_parallel_index=0)

    def collective_rpc(self, method, timeout, args):
        self.worker = os.fork()
        if not self.worker:
            method(None, *args)
            wait_for("subscriber_publishers")
            os._exit(0)

engine = Engine()
engine._init_executor()
wait_for("publisher_subscribers")
_, status = os.waitpid(engine.worker, 0)
engine._publisher.close()
sys.exit(status)
"""


@pytest.mark.parametrize("is_multiprocess", [False, True])
def test_broadcast_has_metrics_in_the_engine_and_in_its_workers(
    is_multiprocess: bool, tmp_path: Path
) -> None:
    environment = {"PYTHONPATH": ":".join(sys.path)}
    if is_multiprocess:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", METRICS], check=True, env=environment, timeout=60)
