"""Compare vLLM's shared-memory broadcast with the queue of `aiotensor.integrations.vllm`: `make bench-vllm`.

An engine process writes a call with one tensor to the queue, as its executor does. Each worker process reads
it, and answers with one byte of the tensor.
"""

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch

from bench.measure import parse_size
from bench.vllm_rounds import Result, compare, prepare, table

__all__ = ["main"]

_RESULTS = Path(__file__).parent / "results"
_WORKERS = 4
_WAYS = ("vLLM", "vLLM, tensor arena", "aiotensor")
_FEW, _MANY = 10, 300  # repetitions, of large tensors and of others
_LARGE = 16 << 20


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
    queue = _queue_type(way)(_WORKERS, _WORKERS, enable_shm_tensor_arena="arena" in way)
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
    count = _FEW if nbytes > _LARGE else _MANY
    warm_up = max(3, count // 10)
    for number in range(warm_up + count):
        call: tuple[object, ...] = (
            "execute_model",
            (torch.full((nbytes,), number % 251, dtype=torch.uint8),),
            {},
            None,
        )
        began = time.perf_counter()
        queue.enqueue(call)
        written = time.perf_counter()
        values = {answer.recv_bytes()[0] for answer in answers}
        ended = time.perf_counter()
        if values != {number % 251}:
            raise RuntimeError(f"{way}: tensor {number} arrived with other values")
        if number >= warm_up:
            result.trips.append(ended - began)
            result.calls.append(written - began)
    return result


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Fresh processes of each way.")
@click.option("--sizes", default="4KiB,1MiB,150MiB", help="Bytes of the tensor, with commas.")
@click.option("--results", type=click.Path(path_type=Path), default=_RESULTS, help="The folder of the table.")
def main(rounds: int, sizes: str, results: Path) -> None:
    """Compare vLLM's queue with that of aiotensor, and write the table to vllm-broadcast.md."""
    nbytes = [parse_size(size) for size in sizes.split(",")]
    text = (
        "# vLLM's broadcast\n\n"
        f"A call with one tensor, from an engine process to {_WORKERS} workers: from `enqueue` until all of "
        "them have answered. Medians over all rounds, p99 in brackets; the multiple is that of the medians "
        "of each round: the middle one, in brackets the lowest and the highest.\n\n"
    )
    text += table(compare(_WAYS, _engine, nbytes, rounds), _WAYS, nbytes, "until all answered", "`enqueue`")
    click.echo(text)
    results.mkdir(parents=True, exist_ok=True)
    (results / "vllm-broadcast.md").write_text(text)


if __name__ == "__main__":
    main()
