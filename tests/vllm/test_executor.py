"""vLLM's executor of several worker processes: only the workers are stand-ins."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.executor import Executor

from aiotensor import TensorQueue, blocking
from aiotensor.integrations.vllm import plugin
from aiotensor.integrations.vllm.executor import BroadcastExecutor
from aiotensor.types import PublisherStatistics
from tests.blocking.waiting import until
from tests.vllm.serving import engine_config, request
from tests.vllm.stand_in import checksum
from verification.patterns import pattern

WORKERS = 2
LARGE = 300_000  # elements of int64: the tensors of such a request are published


@pytest.fixture(autouse=True)
def enabled(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOTENSOR_VLLM", "broadcast")
    monkeypatch.setenv("VLLM_PLUGINS", "aiotensor")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # to one of two NUMA nodes for each worker
    plugin.register()


def config_of(folder: Path, executor: type | str = "mp") -> VllmConfig:
    return engine_config(folder, executor=executor, tensor_parallel_size=WORKERS)


@contextmanager
def executing(config: VllmConfig) -> Iterator[Any]:
    """Start the executor that vLLM chooses, and shut it down in the end."""
    executor = Executor.get_class(config)(config)
    try:
        yield executor
    finally:
        executor.shutdown()


def statistics_of(executor: Any) -> PublisherStatistics:
    publisher: blocking.Publisher = executor._publisher
    return publisher.statistics()


def scheduled(name: str, *tensors: torch.Tensor, finished: str | None = None) -> SchedulerOutput:
    """Return the scheduler output for a new request with tensors; `finished` is a request that has ended."""
    output = SchedulerOutput.make_empty()
    if tensors:
        new = NewRequestData(
            req_id=name,
            prompt_token_ids=[1],
            mm_features=request(name, [{"pixels": list(tensors)}]).mm_features,
            sampling_params=None,
            pooling_params=None,
            block_ids=([],),
            num_computed_tokens=0,
            lora_request=None,
        )
        output.scheduled_new_reqs.append(new)
        output.num_scheduled_tokens[name] = output.total_num_scheduled_tokens = 1
    if finished is not None:
        output.finished_req_ids.add(finished)
    return output


def execute(executor: Any, name: str, *tensors: torch.Tensor) -> None:
    """Let the workers execute a request, and check that they have its tensors."""
    answer = executor.execute_model(scheduled(name, *tensors))
    assert answer.sampled_token_ids == [[checksum(list(tensors))]]


def finish(executor: Any, name: str) -> None:
    """Let the workers free the tensors of a request."""
    executor.execute_model(scheduled("", finished=name))


@pytest.mark.parametrize("backend", ["mp", f"{BroadcastExecutor.__module__}.BroadcastExecutor"])
def test_all_workers_receive_the_tensors_of_a_request_and_answer(tmp_path: Path, backend: str) -> None:
    with executing(config_of(tmp_path, backend)) as executor:
        assert type(executor) is BroadcastExecutor
        execute(executor, "small", pattern(1, 10))
        assert statistics_of(executor).published == 0  # it is in the message itself
        execute(executor, "large", pattern(2, LARGE), pattern(3, 10), pattern(4, 2 * LARGE))
        seen = statistics_of(executor)
        assert (seen.published, seen.tensors_copied) == (1, 2)
        for name in ("small", "large"):
            finish(executor, name)
        until(lambda: not statistics_of(executor).bytes_in_use)
        assert executor.collective_rpc("echo", args=(1,)) == [1] * WORKERS


def test_a_tensor_that_the_engine_has_received_is_forwarded_to_its_workers(tmp_path: Path) -> None:
    queue = TensorQueue()
    with (
        executing(config_of(tmp_path)) as executor,
        blocking.TensorReceiver(queue) as receiver,
        blocking.TensorSender(queue) as sender,
    ):
        execute(executor, "forwarded", receiver.receive(sender.send(pattern(1, LARGE))))
        seen = statistics_of(executor)
        assert (seen.tensors_copied, seen.bytes_forwarded) == (0, pattern(1, LARGE).nbytes)
        assert sender.statistics().bytes_in_use
        finish(executor, "forwarded")
        until(lambda: not sender.statistics().bytes_in_use)


def test_without_memory_the_queue_of_vllm_carries_the_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = pattern(1, LARGE)
    monkeypatch.setenv("AIOTENSOR_VLLM_ARENA_BYTES", str(int(1.5 * tensor.nbytes)))
    with executing(config_of(tmp_path)) as executor:
        for name in "abc":
            execute(executor, name, tensor)
        assert statistics_of(executor).published == 1
        assert [record.event for record in caplog.records if hasattr(record, "event")] == ["message_declined"]
        for name in "abc":
            finish(executor, name)
        until(lambda: not statistics_of(executor).bytes_in_use)
        execute(executor, "d", tensor)
        assert statistics_of(executor).published == 2


def test_a_killed_worker_ends_a_call(tmp_path: Path) -> None:
    with executing(config_of(tmp_path)) as executor:
        [first, *_] = [one.pid for one in multiprocessing.active_children() if "VllmWorker" in one.name]
        waiting = executor.collective_rpc("pause", non_block=True)
        os.kill(first or 0, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="cancelled"):
            waiting.result()
