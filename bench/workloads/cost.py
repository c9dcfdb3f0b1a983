"""The cost of a stream of tensors: CPU time of all processes, and peak shared memory.

One tensor after the other is sent, and freed at once where it is received. Tensors are fresh, and made before
the count starts. Shared memory is the increase on the whole machine since the contender was started: only
this number counts every page once, even if it is mapped by no process.
"""

from collections.abc import AsyncIterator
from time import perf_counter

from bench.contenders.base import Port
from bench.records import Batch
from bench.usage import PeakWatch, cpu_seconds, family, shared_bytes
from bench.workloads.base import Stage
from bench.workloads.stream import drained, fresh, pour, send_end, take

__all__ = ["far", "near"]

_WARM_UP = 4
_SAMPLE_S = 0.002


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Send, one batch for each size."""
    for size in stage.spec.sizes:
        count = stage.spec.effort.trips(size)
        await pour(stage.port, drained(fresh(size, _WARM_UP)), 1)
        await send_end(stage.port, size, _WARM_UP)
        tensors = fresh(size, count)
        await stage.barrier.meet()
        processes = family(stage.processes)
        with PeakWatch(shared_bytes, _SAMPLE_S) as watch:
            began, before = perf_counter(), cpu_seconds(processes)
            await pour(stage.port, drained(tensors), 1)
            await send_end(stage.port, size, count)
            await stage.barrier.meet()
            took, spent = perf_counter() - began, cpu_seconds(processes) - before
        gigabytes = (count + 1) * size / 1e9
        yield Batch(
            size,
            numbers={
                "cpu_s_per_gb": max(0.0, spent - watch.cpu_s) / gigabytes,
                "gigabytes_per_s": gigabytes / took,
                "peak_shared_bytes": float(max(0, watch.peak_bytes - stage.shared_before)),
            },
        )


async def far(stage: Stage[Port]) -> None:
    """Take the tensors and free them."""
    for _ in stage.spec.sizes:
        await take(stage.port)
        await stage.barrier.meet()
        await take(stage.port)
        await stage.barrier.meet()
