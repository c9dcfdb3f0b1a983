"""aiotensor between API servers and an engine: the servers decode in ordinary memory, and `send` copies."""

from bench.contenders.aiotensor_videos import EngineSide, ServerSide, connect_with
from bench.contenders.base import Layout


def connect(layout: Layout) -> tuple[list[ServerSide], EngineSide]:
    return connect_with(layout, in_place=False)
