"""How many tensors a second one receiver takes, from one sender or from many.

The clock runs in the receiver, from before the first send until the last tensor was taken and read. Each
sender keeps as many sends in flight as the depth says; a contender with blocking calls puts into its queue,
which holds that many. Senders that are not among those of a batch stay connected and do nothing.

With many senders, torch copies with one thread in each: its threads wait for each other by spinning, and with
16 processes on a few cores, little but that would be measured. Users would configure torch in the same way.

Or each sender computes its tensors between sends, with torch's threads: the source is then "computed".

Each sender derives the number of tensors of a batch from the rate of its warm-up, so that fast and slow
contenders are measured for about as long. Tensors are fresh, and made before the clock starts.
"""

from collections.abc import AsyncIterator
from time import perf_counter

import torch

from bench.contenders.base import Port
from bench.records import Batch
from bench.workloads.base import Stage
from bench.workloads.stream import computed, drained, fresh, pour, send_end, take


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Take the tensors of all senders, one batch for each size and number of senders."""
    for size, senders in stage.spec.batches:
        await stage.barrier.meet()
        await take(stage.port, senders)
        await stage.barrier.meet()
        await stage.barrier.meet()  # the senders have made their tensors in between
        began = perf_counter()
        count = await take(stage.port, senders)
        took = perf_counter() - began
        await stage.barrier.meet()
        numbers = {"tensors_per_s": count / took, "gigabytes_per_s": count * size / took / 1e9}
        yield Batch(size, senders, numbers=numbers)


async def far(stage: Stage[Port]) -> None:
    """Send, if this process is among the senders of the batch."""
    effort = stage.spec.effort
    is_computed = stage.spec.source == "computed"
    if max(stage.spec.peers) > 1 and not is_computed:
        torch.set_num_threads(1)
    for size, senders in stage.spec.batches:
        sends = stage.number < senders
        await stage.barrier.meet()
        began = perf_counter()
        if sends:
            await _send(stage, size, effort.fewest)
        await stage.barrier.meet()
        by_time = round(effort.fewest * effort.seconds / (perf_counter() - began))
        by_bytes = effort.bytes // size // senders
        count = max(effort.fewest, min(effort.most // senders, by_time, by_bytes))
        tensors = fresh(size, count) if sends and not is_computed else []
        await stage.barrier.meet()
        if sends:
            await pour(
                stage.port, computed(size, count) if is_computed else drained(tensors), stage.spec.depth
            )
            await send_end(stage.port, size, count)
        await stage.barrier.meet()


async def _send(stage: Stage[Port], size: int, count: int) -> None:
    await pour(stage.port, drained(fresh(size, count)), stage.spec.depth)
    await send_end(stage.port, size, count)
