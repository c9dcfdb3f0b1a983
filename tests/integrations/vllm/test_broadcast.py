"""The queue for vLLM's executor: every reader gets every object, and large buffers are not copied for it."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from aiotensor import ClosedError, PeerLostError
from aiotensor.integrations.vllm.broadcast import Handle, MessageQueue
from aiotensor.types import PublisherStatistics
from tests.blocking.waiting import in_thread, until
from verification.patterns import BIG, pattern

# The children are forked from a process that has imported their modules.
_context = multiprocessing.get_context("forkserver")


_queues: list[MessageQueue] = []  # of a reader's process


def _open(handle: Handle, rank: int) -> None:
    torch.set_num_threads(1)
    _queues.append(MessageQueue.create_from_handle(handle, rank))


def _call(function: Callable[..., Any], *args: object) -> Any:
    return function(_queues[0], *args)


class Reader:
    """A process that reads, as its parent sees it."""

    def __init__(self, handle: Handle, rank: int) -> None:
        self.pool = ProcessPoolExecutor(1, _context, _open, (handle, rank))

    def begin(self, function: Callable[..., Any], *args: object) -> "Future[Any]":
        """Call a function of a module there, with the queue as the first argument."""
        return self.pool.submit(_call, function, *args)

    def call(self, function: Callable[..., Any], *args: object) -> Any:
        """Call a function there, and return its result."""
        return self.begin(function, *args).result()


@contextmanager
def readers(queue: MessageQueue, count: int) -> Iterator[list[Reader]]:
    """Start the readers of a queue, wait until all of them are ready, and end them."""
    started = [Reader(queue.export_handle(), rank) for rank in range(count)]
    try:
        waiting = [reader.begin(MessageQueue.wait_until_ready) for reader in started]
        queue.wait_until_ready()
        for one in waiting:
            one.result()
        yield started
        for reader in started:
            with suppress(BrokenProcessPool):  # a test has killed it
                reader.call(MessageQueue.shutdown)
    finally:
        for reader in started:
            reader.pool.shutdown()


READERS = 2


@pytest.fixture
def queue() -> Iterator[MessageQueue]:
    made = MessageQueue(READERS, READERS, max_chunks=4)
    assert path_of(made.export_handle()).is_socket()
    yield made
    made.shutdown()
    assert not path_of(made.export_handle()).exists()


def bytes_in_use(queue: MessageQueue) -> int:
    statistics = queue.statistics()
    assert isinstance(statistics, PublisherStatistics)
    return statistics.bytes_in_use


def path_of(handle: Handle) -> Path:
    return Path(handle.address.removeprefix("unix://"))


class Request(NamedTuple):
    """An object with the kinds of values of vLLM's requests."""

    method: str
    tensors: list[torch.Tensor]
    arrays: dict[str, np.ndarray[Any, Any]]
    others: tuple[object, ...] = ()


def request(seed: int, count: int) -> Request:
    values = pattern(seed, count)
    return Request(
        "execute_model",
        [
            values,
            values.view(-1, 2).t(),
            values.float().to(torch.bfloat16),
            torch.tensor(seed),
            torch.empty(0, 3),
        ],
        {
            "read-only": np.frombuffer(bytes(8 * count), np.int64),
            "mask": values.numpy() > 2,
            "fortran": np.asfortranarray(np.arange(count).reshape(2, -1)),
        },
        (None, "text" * 3, {1, 2}, b"x" * count, bytearray(count), range(3)),
    )


def same(one: Request, other: Request) -> bool:
    return (
        one.method == other.method
        and one.others == other.others
        and all(
            torch.equal(mine, yours) and (mine.dtype, mine.shape) == (yours.dtype, yours.shape)
            for mine, yours in zip(one.tensors, other.tensors, strict=True)
        )
        and all(np.array_equal(array, other.arrays[name]) for name, array in one.arrays.items())
    )


def check(queue: MessageQueue, seed: int, count: int) -> None:
    received = queue.dequeue()
    assert same(received, request(seed, count))
    assert all(tensor.storage_offset() == 0 for tensor in received.tensors)
    received.tensors[0].fill_(1)  # which no other reader sees
    received.arrays["fortran"][:] = 1


def test_each_reader_receives_each_object_in_order(queue: MessageQueue) -> None:
    sizes = [100, BIG, 2, BIG, BIG, 100]
    with readers(queue, READERS) as processes:
        for seed, count in enumerate(sizes):
            checking = [reader.begin(check, seed, count) for reader in processes]
            queue.enqueue(request(seed, count))
            for one in checking:
                one.result()


kept: list[Any] = []


def keep(queue: MessageQueue) -> int:
    kept.append(queue.dequeue())
    return len(kept)


def free(queue: MessageQueue) -> None:
    kept.clear()


def test_buffers_are_in_memory_once_until_the_last_reader_has_freed_them(queue: MessageQueue) -> None:
    with readers(queue, READERS) as processes:
        queue.enqueue((pattern(1, BIG), np.ones(BIG)))
        for reader in processes:
            assert reader.call(keep) == 1
        size = pattern(1, BIG).nbytes + np.ones(BIG).nbytes
        assert size <= bytes_in_use(queue) < 1.5 * size
        for reader in processes:
            assert bytes_in_use(queue)
            reader.call(free)
        until(lambda: not bytes_in_use(queue))


def test_a_killed_reader_is_reported_to_the_writer(queue: MessageQueue) -> None:
    with readers(queue, READERS) as processes:
        for _ in range(4):
            queue.enqueue(pattern(1, BIG))
        writing = in_thread(lambda: queue.enqueue("next"))  # waits for all readers
        for reader in processes[1:]:
            reader.call(MessageQueue.dequeue)
        [process] = (processes[0].pool._processes or {}).values()
        process.kill()
        with pytest.raises(PeerLostError, match="1 of 2 readers"):
            writing.result()


def write_and_wait(handles: Any, ready: Any) -> None:
    queue = MessageQueue(1, 1)
    handles.send(queue.export_handle())
    queue.wait_until_ready()
    queue.enqueue("last")
    ready.recv()


def test_a_killed_writer_is_reported_to_a_reader() -> None:
    (ours, theirs), (held, ready) = _context.Pipe(), _context.Pipe()
    writer = _context.Process(target=write_and_wait, args=(theirs, ready), daemon=True)
    writer.start()
    handle = ours.recv()
    queue = MessageQueue.create_from_handle(handle, 0)
    queue.wait_until_ready()
    reading = in_thread(lambda: [queue.dequeue(), queue.dequeue()])
    writer.kill()
    writer.join()
    with pytest.raises(PeerLostError):
        reading.result()
    with pytest.raises(ClosedError):
        queue.dequeue()
    with pytest.raises(PeerLostError, match="writer of the queue has ended"):
        MessageQueue.create_from_handle(handle, 0)
    assert not path_of(handle).exists()
    for end in (ours, theirs, held, ready):
        end.close()


def be_in_a_group(rank: int, store: str, results: Any) -> None:
    import torch.distributed as dist  # slow, and no reader needs it

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    queue = MessageQueue.create_from_process_group(dist.group.WORLD, 1 << 20, 4, writer_rank=1)
    answer = queue.broadcast_object({"tensor": pattern(7, BIG)} if rank else None)
    results.send(torch.equal(answer["tensor"], pattern(7, BIG)))
    dist.barrier()
    queue.shutdown()
    os._exit(0)  # the destructor of the group holds the GIL while it waits for a thread, in torch 2.6


def test_a_group_of_processes_has_one_writer(folder: Path) -> None:
    ours, theirs = _context.Pipe()
    processes = [
        _context.Process(
            target=be_in_a_group,
            args=(rank, f"{folder}/store", theirs),
            daemon=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    assert [ours.recv(), ours.recv()] == [True, True]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    ours.close()
    theirs.close()
