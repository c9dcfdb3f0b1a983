"""The ranks of a gloo group, started by torchrun; each writes its findings to a file.

torchrun --nproc-per-node 4 -m tests.ranks.program FOLDER
"""

import asyncio
import itertools
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from aiotensor.ranks import Group, RankPipe
from verification.patterns import BIG, pattern

_COUNTS = [10, None, 5_000, BIG, None, 2 * BIG]
_WAIT_S = 60.0


class Findings(msgspec.Struct):
    """The observations of one rank.

    Attributes:
        rank: its rank in the group.
        pipes: how many pipes it opened.
        messages: how many messages it received with the right values.
    """

    rank: int
    pipes: int = 0
    messages: int = 0


async def exchange_everything(found: Findings) -> None:
    """Exchange messages with all other ranks, over several pipes, also after the end of the group.

    One pipe to each other rank is opened after the end of its group, whose store it has kept.
    """
    rank, size = found.rank, dist.get_world_size()
    world, others = dist.group.WORLD, [other for other in range(dist.get_world_size()) if other != found.rank]
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    assert world is not None
    groups: list[tuple[Group, list[int], int]] = [(world, others, 2)]
    for name in ("dp", "tp"):
        group = mesh[name].get_group()
        groups.append((group, [one for one in range(group.size()) if one != group.rank()], 1))
    async with AsyncExitStack() as stack:
        pipes = [
            RankPipe(group, peer, max_bytes=64 << 20, max_wait_s=_WAIT_S)
            for group, peers, count in groups
            for peer, _ in itertools.product(peers, range(count))
        ]
        await asyncio.gather(*(stack.enter_async_context(pipe) for pipe in pipes))
        later = [RankPipe(world, peer, max_wait_s=_WAIT_S) for peer in others]
        found.pipes = len(pipes)
        found.messages += sum(await asyncio.gather(*map(_exchange, pipes)))
        dist.barrier()
        exchanges = [asyncio.create_task(_exchange(pipe)) for pipe in pipes]
        await asyncio.sleep(0)  # calls have begun
        dist.destroy_process_group()
        found.messages += sum(await asyncio.gather(*exchanges))
        await asyncio.gather(*(stack.enter_async_context(pipe) for pipe in later))
        found.messages += sum(await asyncio.gather(*map(_exchange, later)))
        pipes += later
        await asyncio.gather(*(pipe.drain() for pipe in pipes))
    assert rank < size


async def _exchange(pipe: RankPipe) -> int:
    """Send messages in both directions, and count the ones with the right values at the other end."""

    async def send() -> None:
        for seed, count in enumerate(_COUNTS):
            await pipe.send(None if count is None else pattern(seed + 100 * pipe.rank, count))

    sending = asyncio.create_task(send())
    right = 0
    for seed, count in enumerate(_COUNTS):
        received = await pipe.receive()
        if received is None or count is None:
            right += received is None and count is None
        else:
            right += torch.equal(received, pattern(seed + 100 * pipe.peer, count))
        del received
    await sending
    return right


def main(folder: str) -> None:
    """Run one rank, and write its findings."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = Findings(dist.get_rank())
    asyncio.run(exchange_everything(found))
    (Path(folder) / f"{found.rank}.json").write_bytes(msgspec.json.encode(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
