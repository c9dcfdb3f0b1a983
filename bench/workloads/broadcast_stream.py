"""How fast one process publishes a stream of tensors to several readers.

The clock runs in the publisher, from before the first publication until the last reader has taken all of
them; it has read one element of each. As many publications as the depth says may be in flight at once; a
contender with blocking calls waits where its queue of a reader is full. Unlike the time of one publication,
the rate includes all work that a contender does for it, even after its tensor was freed.

Tensors are fresh, and made before the clock starts. Some are sent before, so that memory is warm.
"""

from collections.abc import AsyncIterator
from time import perf_counter

from bench.contenders.base import Port
from bench.records import Batch
from bench.workloads.base import Stage
from bench.workloads.stream import drained, fresh, pour, send_end, take

__all__ = ["far", "near"]


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Publish two streams, of which the second is timed, one batch for each size."""
    spec = stage.spec
    for size, peers in spec.batches:
        count = spec.effort.trips(size)
        await _publish(stage, size, spec.depth)
        took = await _publish(stage, size, count)
        numbers = {"tensors_per_s": count / took, "gigabytes_per_s": count * size * peers / took / 1e9}
        yield Batch(size, peers, numbers=numbers)


async def far(stage: Stage[Port]) -> None:
    """Take both streams and free their tensors."""
    for _ in stage.spec.batches:
        for _ in ("warm-up", "timed"):
            await stage.barrier.meet()
            await take(stage.port)
            await stage.barrier.meet()


async def _publish(stage: Stage[Port], size: int, count: int) -> float:
    tensors = fresh(size, count)
    await stage.barrier.meet()
    began = perf_counter()
    await pour(stage.port, drained(tensors), stage.spec.depth)
    await send_end(stage.port, size, count)
    await stage.barrier.meet()
    return perf_counter() - began
