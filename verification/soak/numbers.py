"""The numbers of a soak: measurements of a process by the kernel, and its own statistics.

Fragmentation is the share of an arena's free bytes outside its longest free run: 0 if they are contiguous,
and near 1 if they are scattered. It varies with the blocks in use, which is harmless. A steady increase would
be harmful: small blocks would settle between the large ones, and large tensors would wait longer each hour
although enough bytes are free. Therefore its trend is judged, like that of memory, and it must be exactly 0
at the end, when all memory has been released. The number "misfit" is 1 while the largest tensor would have to
wait only for a longer run.
"""

import gc
import statistics
import sys

from aiotensor import TensorSender
from verification.internals import blocks_of
from verification.processes import watch

__all__ = ["of_arena", "of_kernel", "of_python", "of_waits"]


def of_kernel(pid: int) -> dict[str, float]:
    """Measure a process from outside."""
    return {
        "own memory": watch.status(pid, "RssAnon") << 10,
        "shared memory": watch.status(pid, "RssShmem") << 10,
        "descriptors": watch.descriptors(pid),
        "threads": watch.status(pid, "Threads"),
        "mappings": watch.mappings(pid),
        "processor time": watch.seconds(pid),
    }


def of_python() -> dict[str, float]:
    """Count the memory blocks of living objects, without the free blocks of the allocator.

    Garbage is collected first: otherwise cyclic garbage, such as a closed sender, looks like a leak until the
    next full collection, which may not run for 200 s of this load.
    """
    gc.collect()
    return {"object blocks": sys.getallocatedblocks()}


def of_arena(sender: TensorSender, largest: int) -> dict[str, float]:
    """Return numbers of the free memory in a sender's arena."""
    blocks = blocks_of(sender)
    free, run = blocks.size - blocks.in_use, blocks.largest_free
    return {
        "free bytes": free,
        "longest free run": run,
        "free runs": len(blocks.free_runs()),
        "fragmentation": 1 - run / free if free else 0.0,
        "misfit": float(run < largest <= free),
    }


def of_waits(waits: list[float]) -> dict[str, float]:
    """Summarise the durations of sends, in seconds."""
    if not waits:
        return {}
    return {"median wait": statistics.median(waits), "most wait": max(waits)}
