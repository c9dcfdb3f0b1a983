"""vLLM's executor of several worker processes, with queues of aiotensor: only the workers are stand-ins."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.executor import Executor, multiproc_executor

from aiotensor.integrations.vllm import plugin
from aiotensor.integrations.vllm.executor import BroadcastExecutor, ExecutorQueue
from tests.blocking.waiting import in_thread, until
from tests.vllm.serving import engine_config
from verification.patterns import BIG, pattern

WORKERS = 2
LARGE = 3 << 20  # elements: such a message does not travel through the ring of vLLM
STOCK = multiproc_executor.MessageQueue


@pytest.fixture(autouse=True)
def enabled(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOTENSOR_VLLM", "broadcast")
    monkeypatch.setenv("VLLM_PLUGINS", "aiotensor")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # to one of two NUMA nodes for each worker
    plugin.register()


def sockets() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("aiotensor-*.sock"))


def config_of(folder: Path, executor: type | str = "mp") -> VllmConfig:
    return engine_config(folder, tensor_ipc="direct_rpc", executor=executor, tensor_parallel_size=WORKERS)


@contextmanager
def executing(config: VllmConfig) -> Iterator[Any]:
    """Start the executor that vLLM chooses, and shut it down in the end."""
    before = sockets()
    executor = Executor.get_class(config)(config)
    try:
        yield executor
    finally:
        executor.shutdown()
    assert not sockets() - before


def test_all_workers_receive_the_objects_of_a_call_and_answer(tmp_path: Path) -> None:
    with executing(config_of(tmp_path)) as executor:
        assert type(executor) is BroadcastExecutor
        assert isinstance(executor.rpc_broadcast_mq, ExecutorQueue)
        assert all(isinstance(queue, ExecutorQueue) for queue in executor.response_mqs)
        for count in (10, BIG, LARGE, 10):
            before = large_messages(executor)
            sent: dict[str, Any] = {
                "tensor": pattern(count, count),
                "array": np.arange(count),
                "name": "x" * count,
            }
            for answer in executor.collective_rpc("echo", args=(sent,)):
                assert torch.equal(answer["tensor"], sent["tensor"])
                assert np.array_equal(answer["array"], sent["array"])
                assert answer["name"] == sent["name"]
            assert large_messages(executor) - before == (count == LARGE)
        assert executor.collective_rpc("echo", args=(1,), unique_reply_rank=1) == 1


def large_messages(executor: Any) -> int:
    """Return the number of messages to the workers that were not in the ring of vLLM."""
    published: int = executor.rpc_broadcast_mq.large.statistics().published
    return published


def test_workers_that_keep_large_messages_do_not_stop_the_executor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = pattern(1, LARGE)
    monkeypatch.setenv("AIOTENSOR_VLLM_ARENA_BYTES", str(int(1.5 * message.nbytes)))
    with executing(config_of(tmp_path)) as executor:
        before = large_messages(executor)
        for _ in range(3):
            executor.collective_rpc("keep", args=(message,))
        assert large_messages(executor) - before == 1
        assert [record.event for record in caplog.records if hasattr(record, "event")] == ["message_declined"]
        executor.collective_rpc("forget")
        until(lambda: not executor.rpc_broadcast_mq.large.statistics().bytes_in_use)
        executor.collective_rpc("keep", args=(message,))
        assert large_messages(executor) - before == 2


def test_a_killed_worker_ends_a_call(tmp_path: Path) -> None:
    with executing(config_of(tmp_path)) as executor:
        [first, *_] = [one.pid for one in multiprocessing.active_children() if "VllmWorker" in one.name]
        waiting = executor.collective_rpc("pause", non_block=True)
        os.kill(first or 0, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="cancelled"):
            waiting.result()


def test_a_dequeue_timeout_loses_no_large_message() -> None:
    writer = ExecutorQueue(1, 1)
    reader = ExecutorQueue.create_from_handle(writer.export_handle(), 0)
    becoming_ready = in_thread(reader.wait_until_ready)
    writer.wait_until_ready()
    becoming_ready.result()
    writer.enqueue(pattern(1, LARGE))
    # The ring has its number by now, but this limit is too short to read the message.
    assert torch.equal(reader.dequeue(timeout=1e-9), pattern(1, LARGE))
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.01)
    reader.shutdown()
    writer.shutdown()
