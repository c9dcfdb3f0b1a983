"""Compare vLLM's shared-memory broadcast with the queue of `aiotensor.integrations.vllm`: `make bench-vllm`.

An engine process writes a call with one tensor to the queue, as its executor does. Each worker process reads
it, and answers with one byte of the tensor.
"""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.vllm_rounds import Result, comparison, prepare

__all__ = ["main"]

_WORKERS = 4


def _queue_type(way: str) -> Any:
    prepare("")
    if way == "aiotensor":
        from aiotensor.integrations.vllm.executor import ExecutorQueue

        return ExecutorQueue
    from vllm.distributed.device_communicators import shm_broadcast

    return shm_broadcast.MessageQueue


def _worker(way: str, handle: Any, rank: int, answers: Connection) -> None:
    queue = _queue_type(way).create_from_handle(handle, rank)
    queue.wait_until_ready()
    while (call := queue.dequeue(indefinite=True)) is not None:
        _, args, _, _ = call
        answers.send_bytes(bytes([int(args[0][-1])]))
        del call, args
    queue.shutdown()


def _engine(way: str, sizes: Sequence[int], results: Connection) -> None:
    queue = _queue_type(way)(
        _WORKERS, _WORKERS, max_chunk_bytes=16 << 20, enable_shm_tensor_arena="arena" in way
    )
    context = torch.multiprocessing.get_context("spawn")
    answers, workers = [], []
    for rank in range(_WORKERS):
        ours, theirs = context.Pipe()
        worker = context.Process(target=_worker, args=(way, queue.export_handle(), rank, theirs), daemon=True)
        worker.start()
        theirs.close()
        answers.append(ours)
        workers.append(worker)
    queue.wait_until_ready()
    found = [_measure_size(queue, answers, way, nbytes) for nbytes in sizes]
    queue.enqueue(None)
    for worker in workers:
        worker.join()
    queue.shutdown()
    results.send(found)


def _measure_size(queue: Any, answers: list[Any], way: str, nbytes: int) -> Result:
    result = Result(way, nbytes, [], [])
    for tensor in result.tensors():
        call: tuple[object, ...] = ("execute_model", (tensor,), {}, None)
        began = time.perf_counter()
        queue.enqueue(call)
        written = time.perf_counter()
        values = {answer.recv_bytes()[0] for answer in answers}
        result.add(tensor, values, began, written, time.perf_counter())
    return result


main = comparison(
    "vllm-broadcast.md",
    "# vLLM's broadcast\n\n"
    f"A call with one tensor, from an engine process to {_WORKERS} workers: from `enqueue` until all of them "
    "have answered.",
    ("vLLM", "vLLM, tensor arena", "aiotensor"),
    _engine,
    "until all answered",
    "`enqueue`",
)


if __name__ == "__main__":
    main()
