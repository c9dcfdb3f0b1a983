"""A pipe between two ranks of a torch.distributed group: shared memory on one host, ZeroMQ between two."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed

from aiotensor.ranks import RankPipe
from bench.contenders.base import Layout, Port, Sides


@asynccontextmanager
async def opened(rank: int, address: str, meeting: Path) -> AsyncIterator[Port]:
    store = torch.distributed.FileStore(str(meeting), 2)  # type: ignore[attr-defined]
    async with RankPipe(store, 1 - rank, rank=rank, world_size=2, host=address) as pipe:

        async def receive() -> torch.Tensor:
            tensor = await pipe.receive()
            if tensor is None:
                raise TypeError("the other rank has sent None")
            return tensor

        yield Port(pipe.send, receive, overlaps=True)


def connect(layout: Layout) -> Sides[Port]:
    meeting = layout.folder / "meeting"
    return [partial(opened, 1, layout.peer_address, meeting)], partial(
        opened, 0, layout.single_address, meeting
    )
