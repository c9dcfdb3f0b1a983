"""Compare vLLM's shared-memory broadcast with that of `aiotensor.integrations.vllm`: `make bench-vllm`.

An engine process writes a call with one tensor to its workers, as its executor does, but publishes smaller
tensors, too. Each worker process reads it, and answers with one byte of the tensor. A forwarded tensor has
come to the engine by aiotensor.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from aiotensor import TensorQueue, blocking
from bench.vllm_rounds import Result, comparison, prepare

_WORKERS = 4


class _Handle(NamedTuple):
    ring: Any
    endpoint: TensorQueue | None


class _Writer:
    """The queue of vLLM, and in the ways of aiotensor a publisher beside it."""

    def __init__(self, way: str, stack: ExitStack) -> None:
        ring = _ring_type()
        self._ring = ring(
            _WORKERS, _WORKERS, max_chunk_bytes=16 << 20, enable_shm_tensor_arena="arena" in way
        )
        endpoint = TensorQueue() if "aiotensor" in way else None
        self.handle = _Handle(self._ring.export_handle(), endpoint)
        self._publisher = None
        if endpoint is not None:
            self._publisher = stack.enter_context(blocking.Publisher(endpoint, arena_bytes=8 << 30))
        self._forwards = "forwarded" in way
        if self._forwards:
            queue = TensorQueue()
            self._receiver = stack.enter_context(blocking.TensorReceiver(queue))
            self._sender = stack.enter_context(blocking.TensorSender(queue))

    def wait_until_ready(self) -> None:
        self._ring.wait_until_ready()
        if self._publisher is not None:
            self._publisher.wait_for_subscribers(_WORKERS)

    def received(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as the engine has it before it calls its workers."""
        return self._receiver.receive(self._sender.send(tensor)) if self._forwards else tensor

    def enqueue(self, call: object) -> None:
        if self._publisher is not None and call is not None:
            from aiotensor.integrations.vllm.executor import dumps

            pickled, tensors = dumps(call)
            if tensors:
                call = self._publisher.publish_nowait(tensors).number, pickled
        self._ring.enqueue(call)

    def shutdown(self) -> None:
        self._ring.shutdown()


def _ring_type() -> Any:
    prepare()
    from vllm.distributed.device_communicators import shm_broadcast

    return shm_broadcast.MessageQueue


def _worker(handle: _Handle, rank: int, answers: Connection) -> None:
    with ExitStack() as stack:
        ring = _ring_type().create_from_handle(handle.ring, rank)
        subscriber = None
        if handle.endpoint is not None:
            subscriber = stack.enter_context(blocking.Subscriber(handle.endpoint, list[torch.Tensor]))
        ring.wait_until_ready()
        while (call := ring.dequeue(indefinite=True)) is not None:
            if subscriber is not None and isinstance(call[0], int):
                from aiotensor.integrations.vllm.executor import loads

                call = loads(call[1], subscriber.receive().message)
            answers.send_bytes(bytes([int(call[1][0][-1])]))
            del call
        ring.shutdown()


def _engine(way: str, sizes: Sequence[int], results: Connection) -> None:
    with ExitStack() as stack:
        writer = _Writer(way, stack)
        context = torch.multiprocessing.get_context("spawn")
        answers, workers = [], []
        for rank in range(_WORKERS):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_worker, args=(writer.handle, rank, theirs), daemon=True)
            worker.start()
            theirs.close()
            answers.append(ours)
            workers.append(worker)
        writer.wait_until_ready()
        found = [_measure_size(writer, answers, way, nbytes) for nbytes in sizes]
        writer.enqueue(None)
        for worker in workers:
            worker.join()
        writer.shutdown()
    results.send(found)


def _measure_size(writer: _Writer, answers: list[Any], way: str, nbytes: int) -> Result:
    result = Result(way, nbytes, [], [])
    for tensor in result.tensors():
        call: tuple[object, ...] = ("execute_model", (writer.received(tensor),), {}, None)
        began = time.perf_counter()
        writer.enqueue(call)
        written = time.perf_counter()
        values = {answer.recv_bytes()[0] for answer in answers}
        result.add(tensor, values, began, written, time.perf_counter())
        del call
    return result


main = comparison(
    "vllm-broadcast.md",
    "# vLLM's broadcast\n\n"
    f"A call with one tensor, from an engine process to {_WORKERS} workers: until all have answered. A "
    "forwarded tensor has come to the engine by aiotensor, and is not copied.",
    ("vLLM", "vLLM, tensor arena", "aiotensor, forwarded", "aiotensor"),
    _engine,
    "until all answered",
    "writing the call",
)


if __name__ == "__main__":
    main()
