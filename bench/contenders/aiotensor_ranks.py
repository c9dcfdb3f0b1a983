"""A pipe between two ranks of a torch.distributed group: shared memory on one host, ZeroMQ between two."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from aiotensor.ranks import RankPipe
from bench.contenders.base import Layout

__all__ = ["RankSide", "connect", "connect_with"]


class PipePort:
    overlaps = True

    def __init__(self, pipe: RankPipe) -> None:
        self._pipe = pipe

    async def send(self, tensor: torch.Tensor) -> None:
        await self._pipe.send(tensor)

    async def receive(self) -> torch.Tensor:
        tensor = await self._pipe.receive()
        if tensor is None:
            raise TypeError("the other rank has sent None")
        return tensor


@dataclass(frozen=True)
class RankSide:
    """A rank, its address, the file by which it finds the other one, and whether the pipe is encrypted."""

    rank: int
    address: str
    meeting: Path
    encrypt: bool

    @asynccontextmanager
    async def open(self) -> AsyncIterator[PipePort]:
        store = torch.distributed.FileStore(str(self.meeting), 2)  # type: ignore[attr-defined]
        async with RankPipe(
            store, 1 - self.rank, rank=self.rank, world_size=2, host=self.address, encrypt=self.encrypt
        ) as pipe:
            yield PipePort(pipe)


def connect_with(layout: Layout, *, encrypt: bool) -> tuple[list[RankSide], RankSide]:
    """Connect two ranks."""
    meeting = layout.folder / "meeting"
    peer = RankSide(1, layout.peer_address, meeting, encrypt)
    return [peer], RankSide(0, layout.single_address, meeting, encrypt)


def connect(layout: Layout) -> tuple[list[RankSide], RankSide]:
    return connect_with(layout, encrypt=False)
