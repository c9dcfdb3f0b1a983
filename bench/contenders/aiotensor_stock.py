"""aiotensor over one `torch.multiprocessing.Queue` each way."""

import torch.multiprocessing

from bench.contenders.aiotensor_link import LinkSide, arena_bytes
from bench.contenders.base import Layout


def connect(layout: Layout) -> tuple[list[LinkSide], LinkSide]:
    context, limits = torch.multiprocessing.get_context("spawn"), (layout.depth, arena_bytes(layout))
    there = context.Queue()
    back = context.Queue() if layout.both_ways else None
    return [LinkSide(there, back, *limits) for _ in range(layout.peers)], LinkSide(back, there, *limits)
