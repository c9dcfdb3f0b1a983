"""There and back: a tensor is sent to the other process and read there; the answer has the same size.

The clock runs in the near process, from before the send until one element of the answer was read.

Copied: every tensor that a side sends is fresh and lies in ordinary, warm memory, as after decoding a
video: a contender cannot win by being handed the same, already shared tensor again. Making and freeing
tensors is not timed: each side frees large ones when all trips are made, since the kernel needs as long to
reclaim such memory as to copy it, and that time would count at the other side.

Allocated: both sides get memory from the contender, write one element there, and send it. The allocation is
timed. The rest of the tensor is not written, since a decoder and not the contender would write it.
"""

import statistics
from collections.abc import AsyncIterator
from time import perf_counter_ns

import torch

from bench.contenders.base import Port
from bench.records import Batch, Spec
from bench.workloads.base import Stage
from bench.workloads.stream import fresh

LARGE = 1 << 20  # bytes; freeing tensors from here on takes long

MARKS = 251  # a prime, so that a repeated or skipped tensor cannot have the expected mark


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Time the trips, one batch for each size."""
    port, allocates = stage.port, stage.spec.source == "allocated"
    for size in stage.spec.sizes:
        first = warm_up(stage.spec, size)
        count = first + stage.spec.effort.trips(size)
        sources = [] if allocates else fresh(size, count)
        kept: list[torch.Tensor] = []
        latencies: list[int] = []
        allocations: list[int] = []
        await stage.barrier.meet()
        for number in range(count):
            mark = number % MARKS
            if allocates:
                began = perf_counter_ns()
                source = await port.allocate(size)
                allocations.append(perf_counter_ns() - began)
                source[0] = mark
            else:
                source = sources.pop()
                source[0] = mark
                began = perf_counter_ns()
            await port.send(source)
            answer = await port.receive()
            value = int(answer[0])
            latencies.append(perf_counter_ns() - began)
            check(number, size, value == mark and len(answer) == size)
            if size >= LARGE and not allocates:
                kept.append(source)
            # Freed here, and not when the names are rebound, which is timed.
            del source, answer
        await stage.barrier.meet()
        numbers = {"allocate_median_s": statistics.median(allocations[first:]) / 1e9} if allocates else {}
        yield Batch(size, stage.spec.peers[0], latencies_ns=latencies[first:], numbers=numbers)


async def far(stage: Stage[Port]) -> None:
    """Answer the trips."""
    spec, port = stage.spec, stage.port
    for size in spec.sizes:
        count = warm_up(spec, size) + spec.effort.trips(size)
        answers = fresh(size, count) if spec.source == "copied" else []
        keeps = bool(answers) and size >= LARGE
        kept: list[torch.Tensor] = []
        await stage.barrier.meet()
        for _ in range(count):
            received = await port.receive()
            answer = answers.pop() if answers else await port.allocate(size)
            answer[0] = int(received[0])
            await port.send(answer)
            if keeps:
                kept.append(answer)
            del received, answer
        await stage.barrier.meet()


def warm_up(spec: Spec, size: int) -> int:
    """Return the number of trips before the timed ones."""
    return max(2, spec.effort.trips(size) // 10)


def check(number: int, size: int, right: bool) -> None:
    """Raise an error for a wrong answer."""
    if not right:
        raise RuntimeError(f"trip {number} at {size} bytes brought back another tensor")
