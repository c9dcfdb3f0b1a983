"""The queue of the executor alone: its two ways, and processes that are forked or killed."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from aiotensor import PeerLostError
from aiotensor.integrations.vllm.executor import ExecutorHandle, ExecutorQueue
from tests.blocking.waiting import in_thread
from verification.patterns import pattern

SMALL, LARGE = 100, 3 << 20  # elements


def read(handle: ExecutorHandle, rank: int, sums: Connection) -> None:
    """Answer each tensor with its sum."""
    torch.set_num_threads(1)
    queue = ExecutorQueue.create_from_handle(handle, rank)
    queue.wait_until_ready()
    while (tensor := queue.dequeue(indefinite=True)) is not None:
        sums.send(int(tensor.sum()))
        del tensor
    queue.shutdown()


@contextmanager
def reading(queue: ExecutorQueue, count: int, method: str) -> Iterator[list[tuple[Any, Connection]]]:
    context: Any = multiprocessing.get_context(method)
    started = []
    try:
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=read, args=(queue.export_handle(), rank, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        queue.wait_until_ready()
        yield started
    finally:
        queue.shutdown()
        for process, connection in started:
            process.kill()
            process.join()
            connection.close()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_small_and_large_messages_keep_their_order(method: str, restored: None) -> None:
    queue = ExecutorQueue(2, 2)
    with reading(queue, 2, method) as readers:
        counts = [SMALL, LARGE, SMALL, LARGE, LARGE, SMALL]
        for seed, count in enumerate(counts):
            queue.enqueue(pattern(seed, count))
        for _, sums in readers:
            assert [sums.recv() for _ in counts] == [
                int(pattern(seed, count).sum()) for seed, count in enumerate(counts)
            ]
        queue.enqueue(None)
        for process, _ in readers:
            process.join()
            assert process.exitcode == 0


def test_a_large_message_to_a_killed_reader_is_an_error(restored: None) -> None:
    queue = ExecutorQueue(2, 2)
    with reading(queue, 2, "spawn") as [(process, _), (_, sums)]:
        process.kill()
        process.join()
        with pytest.raises(PeerLostError, match="1 of 2 readers"):
            while True:  # until the end of the reader is noticed
                queue.enqueue(pattern(1, LARGE))
                sums.recv()


def test_a_dequeue_timeout_loses_no_large_message(restored: None) -> None:
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
