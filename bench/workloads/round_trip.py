"""There and back: a tensor goes to the other process, is read there, and one of its size is answered.

The clock runs in the near process, from before the send until one element of the answer was read.
Every tensor that a side makes is fresh and lies in ordinary, warm memory, as after decoding a video:
a contender cannot win by being handed the same, already shared tensor again. Making and freeing
tensors is not timed. With ``answer="own"`` the far side answers with such a fresh tensor, so that the
same work is done both ways. With ``answer="same"`` it sends back the very tensor that it received.
"""

from collections.abc import AsyncIterator
from time import perf_counter_ns

import torch

from bench.contenders.base import Port
from bench.records import Batch, Spec
from bench.workloads.base import Barrier

_MARKS = 251  # a prime, so that a repeated or skipped tensor cannot carry the mark that is expected


async def near(port: Port, barrier: Barrier, spec: Spec) -> AsyncIterator[Batch]:
    """Time the trips, one batch for each size."""
    for size in spec.sizes:
        warm_up, trips = _warm_up(spec, size), spec.effort.trips(size)
        sources = _fresh(size, warm_up + trips)
        latencies: list[int] = []
        await barrier.meet()
        for number in range(warm_up + trips):
            source = sources.pop()
            mark = number % _MARKS
            source[0] = mark
            began = perf_counter_ns()
            await port.send(source)
            answer = await port.receive()
            value = int(answer[0])
            took = perf_counter_ns() - began
            if value != mark or len(answer) != size:
                raise RuntimeError(f"trip {number} at {size} bytes brought back another tensor")
            # Freed here, outside the clock, and not when the names are bound anew inside it.
            del source, answer
            if number >= warm_up:
                latencies.append(took)
        await barrier.meet()
        yield Batch(size, latencies)


async def far(port: Port, barrier: Barrier, spec: Spec) -> None:
    """Answer the trips."""
    for size in spec.sizes:
        count = _warm_up(spec, size) + spec.effort.trips(size)
        answers = _fresh(size, count) if spec.answer == "own" else []
        await barrier.meet()
        for _ in range(count):
            received = await port.receive()
            mark = int(received[0])
            answer = answers.pop() if answers else received
            if answer is not received:
                answer[0] = mark
            await port.send(answer)
            del received, answer
        await barrier.meet()


def _warm_up(spec: Spec, size: int) -> int:
    return max(2, spec.effort.trips(size) // 10)


def _fresh(size: int, count: int) -> list[torch.Tensor]:
    # All ones: pages of zeros may be shared by the kernel and would not be warm.
    return [torch.ones(size, dtype=torch.uint8) for _ in range(count)]
