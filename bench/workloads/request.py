"""A client awaits the answer to a message with a tensor inside; the server reads the tensor and answers.

The clock runs in the client, from before the request until one element of the answer was read. The server
has read one element of the request by then, and returns that element.

As in the round trip, every tensor that a side sends is fresh and lies in ordinary, warm memory; making and
freeing them is not timed. The row states the size of the answer: an echo contains a tensor of the request's
size, and an answer an embedding of 4 KiB.
"""

from collections.abc import AsyncIterator
from time import perf_counter_ns

import torch

from bench.contenders.base import AnsweringPort, AskingPort
from bench.messages import Embedding, Message, Video, tensor_of
from bench.records import Batch, Spec
from bench.workloads.base import Stage
from bench.workloads.round_trip import LARGE, MARKS, check, warm_up
from bench.workloads.stream import fresh

__all__ = ["far", "near"]

_FPS = 25.0
_EMBEDDING_BYTES = 4 << 10


async def near(stage: Stage[AskingPort]) -> AsyncIterator[Batch]:
    """Time the requests, one batch for each size."""
    spec, port = stage.spec, stage.port
    for size in spec.sizes:
        first, expected = warm_up(spec, size), _answer_bytes(spec, size)
        sources = fresh(size, first + spec.effort.trips(size))
        kept: list[Message] = []
        latencies: list[int] = []
        await stage.barrier.meet()
        for number in range(len(sources)):
            mark = number % MARKS
            message = Video(_FPS, sources.pop())
            message.frames[0] = mark
            began = perf_counter_ns()
            answer = await port.request(message)
            found = tensor_of(answer)
            value = int(found[0])
            latencies.append(perf_counter_ns() - began)
            check(number, size, value == mark and found.nbytes == expected)
            if size >= LARGE:
                kept.append(message)
            # Freed here, and not when the names are rebound, which is timed.
            del message, answer, found
        await stage.barrier.meet()
        yield Batch(size, latencies_ns=latencies[first:], bytes_per_trip=size + expected)


async def far(stage: Stage[AnsweringPort]) -> None:
    """Answer the requests."""
    spec, port = stage.spec, stage.port
    for size in spec.sizes:
        answers = _answers(spec, size, warm_up(spec, size) + spec.effort.trips(size))
        keeps = _answer_bytes(spec, size) >= LARGE
        kept: list[Message] = []
        await stage.barrier.meet()
        for _ in range(len(answers)):
            request = await anext(port)
            answer = answers.pop()
            tensor_of(answer)[0] = int(request.message.frames[0])
            await request.reply(answer)
            if keeps:
                kept.append(answer)
            del request, answer
        await stage.barrier.meet()


def _answer_bytes(spec: Spec, size: int) -> int:
    return size if spec.reply == "echo" else _EMBEDDING_BYTES


def _answers(spec: Spec, size: int, count: int) -> list[Message]:
    tensors = fresh(_answer_bytes(spec, size), count)
    if spec.reply == "echo":
        return [Video(_FPS, tensor) for tensor in tensors]
    return [Embedding(tensor.view(torch.float32)) for tensor in tensors]
