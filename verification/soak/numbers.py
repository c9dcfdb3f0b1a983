"""The numbers that a soak looks at: what the kernel counts of a process, and what it says of itself.

Fragmentation is the share of an arena's free bytes that are outside of its longest free run: 0 where they lie
in one piece, near 1 where they are scattered. It goes up and down with what happens to be in use, which harms
nobody. What would harm is a drift: small blocks that settle between the large ones, so that a large tensor
waits longer each hour while enough bytes are free. So it is judged by its trend, like memory; and at the end,
when everything came back, it has to be exactly 0. Beside it stands how often the largest tensor would have
had to wait for nothing but a run that is long enough.
"""

import gc
import statistics
import sys

from aiotensor import TensorSender
from verification.processes import watch

__all__ = ["of_arena", "of_kernel", "of_python", "of_waits"]


def of_kernel(pid: int) -> dict[str, float]:
    """Count what a process has, from outside."""
    return {
        "own memory": watch.status(pid, "RssAnon") << 10,
        "shared memory": watch.status(pid, "RssShmem") << 10,
        "descriptors": watch.descriptors(pid),
        "threads": watch.status(pid, "Threads"),
        "mappings": watch.mappings(pid),
        "processor time": watch.seconds(pid),
    }


def of_python() -> dict[str, float]:
    """Count the blocks that living objects have: what the system's allocator keeps is not among them.

    Nor are those that only the garbage collector finds, such as a closed sender's: they go with a full
    collection, of which none may come in 200 s of this load, and until then they look like a leak.
    """
    gc.collect()
    return {"object blocks": sys.getallocatedblocks()}


def of_arena(sender: TensorSender, largest: int) -> dict[str, float]:
    """Look at the free memory of a sender's arena."""
    blocks = sender._outgoing.memory._arena._segment.blocks
    free, run = blocks.size - blocks.in_use, blocks.largest_free
    return {
        "free bytes": free,
        "longest free run": run,
        "free runs": len(blocks.free_runs()),
        "fragmentation": 1 - run / free if free else 0.0,
        "misfit": float(run < largest <= free),
    }


def of_waits(waits: list[float]) -> dict[str, float]:
    """Sum up how long sends took, in seconds."""
    if not waits:
        return {}
    return {"median wait": statistics.median(waits), "most wait": max(waits)}
