"""The same pipe between two ranks with `encrypt=True`, which matters between two hosts only."""

from bench.contenders.aiotensor_ranks import RankSide, connect_with
from bench.contenders.base import Layout


def connect(layout: Layout) -> tuple[list[RankSide], RankSide]:
    return connect_with(layout, encrypt=True)
