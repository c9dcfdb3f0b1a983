"""A client awaits the answer to a message with a tensor inside; the server reads the tensor and answers.

The clock runs in the client, from before the request until one element of the answer was read. The server
has read one element of the request by then, and returns that element.

As in the round trip, every tensor that a side sends is fresh and lies in ordinary, warm memory; making and
freeing them is not timed. The row states the size of the answer.
"""

from collections.abc import AsyncIterator
from time import perf_counter_ns

from bench.contenders.base import AnsweringPort, AskingPort
from bench.messages import Message
from bench.records import Batch
from bench.workloads.base import Stage
from bench.workloads.round_trip import LARGE, MARKS, check, warm_up
from bench.workloads.stream import fresh

_FPS = 25.0


async def near(stage: Stage[AskingPort]) -> AsyncIterator[Batch]:
    """Time the requests, one batch for each size."""
    spec, port = stage.spec, stage.port
    for size in spec.sizes:
        first, expected = warm_up(spec, size), spec.answer_bytes or size
        sources = fresh(size, first + spec.effort.trips(size))
        kept: list[Message] = []
        latencies: list[int] = []
        await stage.barrier.meet()
        for number in range(len(sources)):
            mark = number % MARKS
            message = Message(_FPS, sources.pop())
            message.tensor[0] = mark
            began = perf_counter_ns()
            answer = await port.request(message)
            value = int(answer.tensor[0])
            latencies.append(perf_counter_ns() - began)
            check(number, size, value == mark and answer.tensor.nbytes == expected)
            if size >= LARGE:
                kept.append(message)
            # Freed here, and not when the names are rebound, which is timed.
            del message, answer
        await stage.barrier.meet()
        yield Batch(size, latencies_ns=latencies[first:])


async def far(stage: Stage[AnsweringPort]) -> None:
    """Answer the requests."""
    spec, port = stage.spec, stage.port
    for size in spec.sizes:
        nbytes = spec.answer_bytes or size
        answers = fresh(nbytes, warm_up(spec, size) + spec.effort.trips(size))
        kept: list[Message] = []
        await stage.barrier.meet()
        while answers:
            request = await anext(port)
            answer = Message(_FPS, answers.pop())
            answer.tensor[0] = int(request.message.tensor[0])
            await request.answer(answer)
            if nbytes >= LARGE:
                kept.append(answer)
            del request, answer
        await stage.barrier.meet()
