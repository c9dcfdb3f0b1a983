"""How late a 1 ms ticker is on the loops of a publisher and of its subscribers, idle and while publishing.

The publisher is measured as the sender in `loop_lag.py` is, and each subscriber in the same way at the same
time. The number of the subscribers is that of the latest of them.
"""

import asyncio
from collections.abc import AsyncIterator
from time import perf_counter

from bench.contenders.base import Port
from bench.records import Batch
from bench.workloads.base import Stage
from bench.workloads.loop_lag import lateness, tick
from bench.workloads.stream import fresh, send_end, take

__all__ = ["far", "near"]


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Tick, idle and busy, one batch for each size."""
    seconds = stage.spec.effort.seconds
    for size, peers in stage.spec.batches:
        (tensor,) = fresh(size, 1)
        await stage.port.send(tensor)  # the preparations for the first tensor are not measured
        await send_end(stage.port, size, 1)
        await stage.barrier.meet()
        idle = await tick(seconds)
        ticker = asyncio.create_task(tick(seconds))
        began, count = perf_counter(), 0
        while not ticker.done():
            await stage.port.send(tensor)
            count += 1
        took = perf_counter() - began
        await send_end(stage.port, size, count)
        numbers = lateness(idle, await ticker)
        subscribers = await stage.barrier.collect(dict[str, float])
        await stage.barrier.meet()
        numbers |= {f"subscriber_{name}": max(each[name] for each in subscribers) for name in numbers}
        yield Batch(size, peers, numbers=numbers | {"gigabytes_per_s": count * size * peers / took / 1e9})


async def far(stage: Stage[Port]) -> None:
    """Tick, and take the tensors and free them."""
    seconds = stage.spec.effort.seconds
    for _ in stage.spec.batches:
        await take(stage.port)
        await stage.barrier.meet()
        idle = await tick(seconds)
        ticker = asyncio.create_task(tick(seconds))
        await take(stage.port)
        await stage.barrier.report(lateness(idle, await ticker))
        await stage.barrier.meet()
