"""aiotensor over `tcp://` on the loopback, without keys: as between machines, the bytes move in steps."""

from bench.contenders.aiotensor_link import LinkSide, arena_bytes
from bench.contenders.base import Layout
from verification.places import free_port


def connect(layout: Layout) -> tuple[list[LinkSide], LinkSide]:
    there, limits = f"tcp://127.0.0.1:{free_port()}", (layout.depth, arena_bytes(layout))
    back = f"tcp://127.0.0.1:{free_port()}" if layout.both_ways else None
    return [LinkSide(there, back, *limits) for _ in range(layout.peers)], LinkSide(back, there, *limits)
