"""iceoryx2 with several subscribers: one sample in shared memory for all, and one event that wakes them."""

from bench.contenders.base import Layout
from bench.contenders.iceoryx import ServiceSide


def connect(layout: Layout) -> tuple[list[ServiceSide], ServiceSide]:
    name = f"{layout.folder.name}/publications"
    limits = (layout.depth, layout.largest, 1, layout.peers)
    return [ServiceSide(None, name, *limits) for _ in range(layout.peers)], ServiceSide(name, None, *limits)
