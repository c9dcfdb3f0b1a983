"""aiotensor over `unix://`: one socket each way, and arenas of shared memory that are used again."""

from bench.contenders.aiotensor_link import LinkSide, arena_bytes
from bench.contenders.base import Layout


def connect(layout: Layout) -> tuple[list[LinkSide], LinkSide]:
    there, limits = f"unix://{layout.folder}/there.sock", (layout.depth, arena_bytes(layout))
    back = f"unix://{layout.folder}/back.sock" if layout.both_ways else None
    return [LinkSide(there, back, *limits) for _ in range(layout.peers)], LinkSide(back, there, *limits)
