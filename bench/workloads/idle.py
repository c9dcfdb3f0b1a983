"""How much CPU connected processes use while nothing is sent: each receiving side waits for a tensor."""

import asyncio
from collections.abc import AsyncIterator
from time import perf_counter

from bench.contenders.base import Port
from bench.records import Batch
from bench.usage import cpu_seconds, family
from bench.workloads.base import Stage
from bench.workloads.stream import drained, fresh, pour, send_end, take

_FEW = 20
_SETTLE_S = 1.0  # so that a contender has finished its work after traffic


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Send a few tensors, then nothing, and count the CPU of all processes and of their children."""
    for size, peers in stage.spec.batches:
        await pour(stage.port, drained(fresh(size, _FEW)), 1)
        await asyncio.sleep(_SETTLE_S)
        processes = family(stage.processes)
        began, before = perf_counter(), cpu_seconds(processes)
        await asyncio.sleep(stage.spec.effort.seconds)
        percent = 100 * (cpu_seconds(processes) - before) / (perf_counter() - began)
        await send_end(stage.port, size, _FEW)
        await stage.barrier.meet()
        yield Batch(size, peers, numbers={"cpu_percent": percent, "seconds": stage.spec.effort.seconds})


async def far(stage: Stage[Port]) -> None:
    """Wait for tensors."""
    for _ in stage.spec.batches:
        await take(stage.port)
        await stage.barrier.meet()
