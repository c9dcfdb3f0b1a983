"""One process publishes a tensor, and several others read it.

The clock runs from before the publication until the last reader has touched the tensor: it has read one byte
of each page of 4 KiB. The readers take the time when they have done so, all by the same clock of the system,
and report it afterwards. So neither the reports nor the freeing of the tensor are timed. A contender that
copies has to deliver every byte before its readers can touch the last page, and one with shared memory has to
map every page. A reader that sums all bytes would add the same time to all contenders: it depends on the
bandwidth of the memory, which the readers share, and not on the transfer.

The next publication begins when all readers have freed the tensor and reported. After a large one, all rest
for as long as it took, at most 20 ms, so that a contender has done its work after the tensor was freed. This
work is not part of the time of a publication.

Tensors are fresh, as in the round trip, and the first publications are not timed, so that the memory of all
processes is warm.
"""

import asyncio
from collections.abc import AsyncIterator
from time import perf_counter_ns
from typing import NamedTuple

import torch

from bench.contenders.base import Port
from bench.records import Batch
from bench.workloads.base import Stage
from bench.workloads.round_trip import LARGE, MARKS, check, warm_up
from bench.workloads.stream import fresh

_PAGE = 4 << 10
_MAX_REST_S = 0.02


class _Report(NamedTuple):
    """The time at which a reader had touched a tensor, its first byte, and the sum of the touched bytes."""

    ended_ns: int
    first_byte: int
    total: int


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Publish, one batch for each size."""
    for size, peers in stage.spec.batches:
        first = warm_up(stage.spec, size)
        sources = fresh(size, first + stage.spec.effort.trips(size))
        kept: list[torch.Tensor] = []
        latencies: list[int] = []
        await stage.barrier.meet()
        for number in range(len(sources)):
            mark = number % MARKS
            source = sources.pop()
            source[0] = mark
            began = perf_counter_ns()
            await stage.port.send(source)
            if size >= LARGE:
                kept.append(source)
            del source
            reports = await stage.barrier.collect(_Report)
            took = max(report.ended_ns for report in reports) - began
            latencies.append(took)
            touched = mark + (size - 1) // _PAGE  # the other touched bytes are ones
            if size >= LARGE:
                await asyncio.sleep(min(took / 1e9, _MAX_REST_S))
            for report in reports:
                check(number, size, report.first_byte == mark and report.total == touched)
        await stage.barrier.meet()
        yield Batch(size, peers, latencies_ns=latencies[first:])


async def far(stage: Stage[Port]) -> None:
    """Touch each tensor, free it, and report the time."""
    spec = stage.spec
    for size, _ in spec.batches:
        await stage.barrier.meet()
        for _ in range(warm_up(spec, size) + spec.effort.trips(size)):
            received = await stage.port.receive()
            # Not by torch, whose threads wait for each other by spinning.
            pages = received.numpy()[::_PAGE]
            total = int(pages.sum())
            report = _Report(perf_counter_ns(), int(pages[0]), total)
            del received, pages
            await stage.barrier.report(report)
        await stage.barrier.meet()
