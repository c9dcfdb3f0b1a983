"""torch.distributed point to point on gloo, over TCP.

Its receiver must know how many bytes arrive, so a header is sent first, as in every program whose tensors
differ in size. The sender does not wait between the two. `recv` is `irecv` and its `wait`.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed

from bench.contenders.base import Layout, Port, Sides

_RECEIVER = 0


@asynccontextmanager
async def opened(meeting: Path, device: str, size: int, peer: int, rank: int) -> AsyncIterator[Port]:
    async def send(tensor: torch.Tensor) -> None:
        header = torch.tensor([len(tensor)])
        works = [torch.distributed.isend(part, peer) for part in (header, tensor)]
        for work in works:
            if work is not None:  # as it is in every rank of the group
                work.wait()

    async def receive() -> torch.Tensor:
        header = torch.empty(1, dtype=torch.int64)
        sender = torch.distributed.recv(header)
        tensor = torch.empty(int(header[0]), dtype=torch.uint8)
        torch.distributed.recv(tensor, sender)
        return tensor

    os.environ["GLOO_SOCKET_IFNAME"] = device
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    try:
        yield Port(send, receive)
    finally:
        torch.distributed.destroy_process_group()


def connect(layout: Layout) -> Sides[Port]:
    size = layout.peers + 1
    common = partial(opened, layout.folder / "meeting", layout.device, size)
    return [partial(common, _RECEIVER, rank) for rank in range(1, size)], partial(common, 1, _RECEIVER)
