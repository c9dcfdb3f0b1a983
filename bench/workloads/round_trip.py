"""There and back: a tensor is sent to the other process and read there; the answer has the same size.

The clock runs in the near process, from before the send until one element of the answer was read.

Copied: every tensor that a side sends is fresh and lies in ordinary, warm memory, as after decoding a
video: a contender cannot win by being handed the same, already shared tensor again. Making and freeing
tensors is not timed: each side frees large ones when all trips are made, since the kernel needs as long to
reclaim such memory as to copy it, and that time would count at the other side. With
``answer="own"`` the far side answers with such a fresh tensor, so that the same work is done both ways. With
``answer="same"`` it sends back the very tensor that it received.

Allocated: both sides get memory from the contender, write one element there, and send it. The allocation is
timed. The rest of the tensor is not written, since a decoder and not the contender would write it.
"""

import statistics
from collections.abc import AsyncIterator
from time import perf_counter_ns

import torch

from bench.contenders.base import AllocatingPort, Port
from bench.records import Batch, Spec
from bench.workloads.base import Stage
from bench.workloads.stream import fresh

__all__ = ["LARGE", "MARKS", "allocating", "check", "far", "near", "warm_up"]

LARGE = 1 << 20  # bytes; freeing tensors from here on takes long

MARKS = 251  # a prime, so that a repeated or skipped tensor cannot have the expected mark


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Time the trips, one batch for each size."""
    for size in stage.spec.sizes:
        if stage.spec.source == "allocated":
            yield await _allocated_trips(stage, size)
        else:
            yield await _copied_trips(stage, size)


async def far(stage: Stage[Port]) -> None:
    """Answer the trips."""
    spec, port = stage.spec, stage.port
    for size in spec.sizes:
        count = warm_up(spec, size) + spec.effort.trips(size)
        kept: list[torch.Tensor] = []
        answers = fresh(size, count) if spec.source == "copied" and spec.answer == "own" else []
        keeps = bool(answers) and size >= LARGE
        await stage.barrier.meet()
        for _ in range(count):
            received = await port.receive()
            mark = int(received[0])
            answer = received
            if spec.answer == "own":
                answer = answers.pop() if answers else await allocating(stage).allocate(size)
                answer[0] = mark
            await port.send(answer)
            if keeps:
                kept.append(answer)
            del received, answer
        await stage.barrier.meet()


async def _copied_trips(stage: Stage[Port], size: int) -> Batch:
    port, first, trips = stage.port, warm_up(stage.spec, size), stage.spec.effort.trips(size)
    sources = fresh(size, first + trips)
    kept: list[torch.Tensor] = []
    latencies: list[int] = []
    await stage.barrier.meet()
    for number in range(first + trips):
        source = sources.pop()
        mark = number % MARKS
        source[0] = mark
        began = perf_counter_ns()
        await port.send(source)
        answer = await port.receive()
        value = int(answer[0])
        latencies.append(perf_counter_ns() - began)
        check(number, size, value == mark and len(answer) == size)
        if size >= LARGE:
            kept.append(source)
        # Freed here, and not when the names are rebound, which is timed.
        del source, answer
    await stage.barrier.meet()
    return Batch(size, latencies_ns=latencies[first:])


async def _allocated_trips(stage: Stage[Port], size: int) -> Batch:
    port, first, trips = allocating(stage), warm_up(stage.spec, size), stage.spec.effort.trips(size)
    latencies: list[int] = []
    allocations: list[int] = []
    await stage.barrier.meet()
    for number in range(first + trips):
        mark = number % MARKS
        began = perf_counter_ns()
        source = await port.allocate(size)
        allocated = perf_counter_ns()
        source[0] = mark
        await port.send(source)
        answer = await port.receive()
        value = int(answer[0])
        latencies.append(perf_counter_ns() - began)
        allocations.append(allocated - began)
        check(number, size, value == mark and len(answer) == size)
        del source, answer
    await stage.barrier.meet()
    return Batch(
        size,
        stage.spec.peers[0],
        latencies_ns=latencies[first:],
        numbers={"allocate_median_s": statistics.median(allocations[first:]) / 1e9},
    )


def warm_up(spec: Spec, size: int) -> int:
    """Return the number of trips before the timed ones."""
    return max(2, spec.effort.trips(size) // 10)


def check(number: int, size: int, right: bool) -> None:
    """Raise an error for a wrong answer."""
    if not right:
        raise RuntimeError(f"trip {number} at {size} bytes brought back another tensor")


def allocating(stage: Stage[Port]) -> AllocatingPort:
    """Return the port of a contender that has memory for its callers."""
    if not isinstance(stage.port, AllocatingPort):
        raise TypeError("this contender gives out no memory to send from")
    return stage.port
