"""torch.distributed point to point on gloo, over TCP.

Its receiver must know how many bytes arrive, so a header is sent first, as in every program whose tensors
differ in size. The sender does not wait between the two. `recv` is `irecv` and its `wait`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

from bench.contenders.base import Layout

_RECEIVER = 0


class GroupPort:
    overlaps = False

    def __init__(self, peer: int | None) -> None:
        self._peer = peer  # None for any

    async def send(self, tensor: torch.Tensor) -> None:
        if self._peer is None:
            raise TypeError("this side only receives")
        header = torch.tensor([len(tensor)])
        works = [torch.distributed.isend(part, self._peer) for part in (header, tensor)]
        for work in works:
            if work is not None:  # as it is in every rank of the group
                work.wait()

    async def receive(self) -> torch.Tensor:
        header = torch.empty(1, dtype=torch.int64)
        sender = torch.distributed.recv(header, self._peer)
        tensor = torch.empty(int(header[0]), dtype=torch.uint8)
        torch.distributed.recv(tensor, sender)
        return tensor


@dataclass(frozen=True)
class GroupSide:
    meeting: Path
    rank: int
    size: int
    peer: int | None
    device: str

    @asynccontextmanager
    async def open(self) -> AsyncIterator[GroupPort]:
        os.environ["GLOO_SOCKET_IFNAME"] = self.device
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{self.meeting}", rank=self.rank, world_size=self.size
        )
        try:
            yield GroupPort(self.peer)
        finally:
            torch.distributed.destroy_process_group()


def connect(layout: Layout) -> tuple[list[GroupSide], GroupSide]:
    meeting, size = layout.folder / "meeting", layout.peers + 1
    senders = [GroupSide(meeting, rank, size, _RECEIVER, layout.device) for rank in range(1, size)]
    return senders, GroupSide(meeting, _RECEIVER, size, 1 if layout.both_ways else None, layout.device)
