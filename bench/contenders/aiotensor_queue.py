"""aiotensor over one `TensorQueue` each way."""

import aiotensor
from bench.contenders.aiotensor_link import LinkSide, arena_bytes
from bench.contenders.base import Layout


def connect(layout: Layout) -> tuple[list[LinkSide], LinkSide]:
    there, limits = aiotensor.TensorQueue(), (layout.depth, arena_bytes(layout))
    back = aiotensor.TensorQueue() if layout.both_ways else None
    return [LinkSide(there, back, *limits) for _ in range(layout.peers)], LinkSide(back, there, *limits)
