"""aiotensor over `unix://`, in a ring of processes: each sends to the next one."""

from bench.contenders.aiotensor_link import LinkSide, arena_bytes
from bench.contenders.base import Layout


def connect(layout: Layout) -> tuple[list[LinkSide], LinkSide]:
    names = [f"unix://{layout.folder}/{number}.sock" for number in range(layout.peers + 1)]
    limits = layout.depth, arena_bytes(layout._replace(peers=1))
    near, *relays = (
        LinkSide(outgoing, incoming, *limits)
        for outgoing, incoming in zip(names, [names[-1], *names[:-1]], strict=True)
    )
    return relays, near
