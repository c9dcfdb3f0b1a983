"""How late 1 ms tickers on the event loops of all sides are, first idle, then while tensors go back to back.

The lateness of a tick is the time since the previous tick, minus one millisecond. It includes the resolution
of the loop's timers. So the idle loop is measured, too, and the result is the difference between the two.
The same tensor is sent repeatedly: `send` copies it. Of several readers, the latest counts.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from time import perf_counter

from bench.contenders.base import Port
from bench.measure import percentile
from bench.records import Batch
from bench.workloads.base import Stage
from bench.workloads.stream import fresh, send_end, take

_TICK_S = 0.001
PERCENTILES = {"p50": 50.0, "p99": 99.0, "p999": 99.9, "max": 100.0}


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Tick, idle and busy, one batch for each size."""
    for size, peers in stage.spec.batches:
        (tensor,) = fresh(size, 1)
        await stage.port.send(tensor)  # the preparations for the first tensor are not measured
        await send_end(stage.port, size, 1)
        await stage.barrier.meet()
        idle = await tick(stage.spec.effort.seconds)
        ticker = asyncio.create_task(tick(stage.spec.effort.seconds))
        began, count = perf_counter(), 0
        while not ticker.done():
            await stage.port.send(tensor)
            count += 1
        took = perf_counter() - began
        await send_end(stage.port, size, count)
        numbers = lateness(idle, await ticker)
        receivers = await stage.barrier.collect(dict[str, float])
        await stage.barrier.meet()
        numbers |= {f"receiver_{name}": max(each[name] for each in receivers) for name in numbers}
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


async def tick(seconds: float, is_over: Callable[[], bool] = lambda: False) -> list[float]:
    """Tick for a number of seconds, or until it is over, and return the lateness of each tick."""
    late = []
    began = now = perf_counter()
    while now - began < seconds and not is_over():
        due = now + _TICK_S
        await asyncio.sleep(_TICK_S)
        now = perf_counter()
        late.append(now - due)
    return late


def lateness(idle: list[float], busy: list[float]) -> dict[str, float]:
    """Return the percentiles of both, and their differences."""
    numbers: dict[str, float] = {}
    for name, percent in PERCENTILES.items():
        still, working = percentile(idle, percent), percentile(busy, percent)
        numbers |= {f"idle_{name}_s": still, f"busy_{name}_s": working, f"beyond_{name}_s": working - still}
    return numbers
