"""The ranks of a gloo group, started by torchrun; each writes its findings to a file.

torchrun --nproc-per-node 4 -m tests.ranks.program FOLDER SCENARIO ...

The scenarios run one after the other in the same group.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from aiotensor import PeerLostError, UnsupportedTensorError, WouldBlockError
from aiotensor.ranks import Group, RankPipe
from verification.patterns import BIG, pattern
from verification.processes import watch
from verification.promptly import allowed_s
from verification.waiting import until

_COUNTS = [10, None, 5_000, BIG, None, 2 * BIG]
_WAIT_S = 60.0
_SHORT_WAIT_S = 2.0
_STOPPED_S = 2.5  # more than the 2 seconds after which a silent host is lost
TIMEOUT_S = 1.0  # of a host that does not answer


class Findings(msgspec.Struct):
    """The observations of one rank.

    Attributes:
        rank: its rank in the group.
        pipes: how many pipes it opened.
        messages: how many messages it received with the right values.
        lost_after_s: the seconds after which the loss of the other rank was reported; None without a loss.
        not_opened: the ranks whose end was never opened.
        failed: how many sends have failed, by the name of the error.
        notes: what else it has seen.
    """

    rank: int
    pipes: int = 0
    messages: int = 0
    lost_after_s: float | None = None
    not_opened: list[int] = []
    failed: dict[str, int] = {}
    notes: list[str] = []


async def everything(found: Findings) -> None:
    """Exchange messages with all other ranks, over several pipes, also after the end of the group."""
    rank, size = found.rank, dist.get_world_size()
    world, others = dist.group.WORLD, [other for other in range(dist.get_world_size()) if other != found.rank]
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    assert world is not None
    groups: list[tuple[Group, list[int], int]] = [(world, others, 2)]
    for name in ("dp", "tp"):
        group = mesh[name].get_group()
        groups.append((mesh[name], [one for one in range(group.size()) if one != group.rank()], 1))
    async with AsyncExitStack() as stack:
        pipes = [
            RankPipe(group, peer, max_bytes=64 << 20, max_wait_s=_WAIT_S)
            for group, peers, count in groups
            for peer, _ in itertools.product(peers, range(count))
        ]
        await asyncio.gather(*(stack.enter_async_context(pipe) for pipe in pipes))
        found.pipes = len(pipes)
        for is_last in (False, True):
            found.messages += sum(await asyncio.gather(*map(_exchange, pipes)))
            if not is_last:
                dist.barrier()
                dist.destroy_process_group()
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


async def killed(found: Findings) -> None:
    """Lose the last rank while messages travel."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends all ranks as soon as one was killed
    world, victim = dist.group.WORLD, dist.get_world_size() - 1
    assert world is not None
    if found.rank == victim:
        async with AsyncExitStack() as stack:
            pipes = [RankPipe(world, peer, max_wait_s=_WAIT_S) for peer in range(victim)]
            await asyncio.gather(*(stack.enter_async_context(pipe) for pipe in pipes))
            await asyncio.gather(*map(_exchange, pipes))
            os.kill(os.getpid(), signal.SIGKILL)
    async with RankPipe(world, victim, max_wait_s=_WAIT_S) as pipe:
        found.messages = await _exchange(pipe)
        began = time.monotonic()
        try:
            while True:
                await asyncio.gather(pipe.send(pattern(0, BIG)), pipe.receive())
        except PeerLostError:
            found.lost_after_s = time.monotonic() - began


async def missing(found: Findings) -> None:
    """Wait for the last rank, which opens no pipe."""
    world, absent = dist.group.WORLD, dist.get_world_size() - 1
    assert world is not None
    if found.rank != absent:
        try:
            async with RankPipe(world, absent, max_wait_s=0.5):
                raise AssertionError("no other end was opened")
        except WouldBlockError:
            found.not_opened.append(absent)
    dist.barrier()


async def stopped(found: Findings) -> None:
    """Stop the other rank of two for longer than another host may be silent, and continue it."""
    async with _pipe() as pipe:
        if found.rank == 1:
            await pipe.send(torch.tensor(os.getpid()))
            await pipe.receive()  # sent while this rank is stopped, so it has sent nothing before
            found.messages = await _exchange(pipe)
            return
        async with _stopped_peer(pipe):
            await pipe.send(None)
            exchanging = asyncio.create_task(_exchange(pipe))
            await until(lambda: pipe.statistics().messages_sent == 1 + len(_COUNTS))
            draining = asyncio.create_task(pipe.drain())
            await asyncio.sleep(_STOPPED_S)
            if pipe.statistics().connected and not exchanging.done() and not draining.done():
                found.notes.append("waits")
        found.messages = await exchanging
        await draining


async def silent(found: Findings) -> None:
    """Stop the other rank of two, which is on another host, until it is lost."""
    async with _pipe(peer_timeout_s=TIMEOUT_S) as pipe:
        if found.rank == 1:
            await pipe.send(torch.tensor(os.getpid()))
            found.messages = await _exchange(pipe)
            try:
                while await pipe.receive() is None:  # what arrived while this process was stopped
                    pass
            except PeerLostError:
                found.notes.append("lost")
            return
        async with _stopped_peer(pipe, first=lambda: _exchange_counted(pipe, found)):
            began = time.monotonic()
            pipe.send_nowait(None)
            for call in (pipe.receive(), pipe.drain(), pipe.send(None)):
                try:
                    await call
                except PeerLostError:
                    found.lost_after_s = found.lost_after_s or time.monotonic() - began
                    found.notes.append("lost")


async def _exchange_counted(pipe: RankPipe, found: Findings) -> None:
    found.messages = await _exchange(pipe)


@asynccontextmanager
async def _stopped_peer(
    pipe: RankPipe, first: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> AsyncIterator[None]:
    """Stop the process of the other rank, whose first message is its id, after a first step."""
    message = await pipe.receive()
    assert message is not None
    pid = int(message)
    if first is not None:
        await first()
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: watch.is_stopped(pid))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def failing(found: Findings) -> None:
    """Fail a thousand sends while the other rank does not receive, and use the pipe afterwards."""
    dist.barrier()  # `max_wait_s` limits opening, too
    full = 4 * BIG
    limit = _SHORT_WAIT_S if found.rank == 0 else _WAIT_S
    async with _pipe() as orders, _pipe(max_bytes=8 * full, max_wait_s=limit) as pipe:
        if found.rank == 1:
            await orders.receive()
            message = await pipe.receive()
            assert message is not None
            assert torch.equal(message, pattern(0, full))
            del message
        else:
            await pipe.send(pattern(0, full))
            await _fail(pipe, full)
            found.failed = pipe.statistics().errors
            if pipe.statistics().bytes_in_flight == 8 * full:
                found.notes.append("only the first message counts")
            await orders.send(None)
            await until(lambda: pipe.statistics().bytes_in_flight == 0)
        found.messages = await _exchange(pipe)
        await pipe.drain()
        await until(lambda: pipe.statistics().bytes_in_flight == 0)
        if pipe.statistics().in_flight == 0:
            found.notes.append("all bytes were returned")
        await asyncio.gather(orders.send(None), orders.receive())  # before either closes


async def _fail(pipe: RankPipe, full: int) -> None:
    """Let sends fail: a quarter of them in each way."""
    sparse = torch.ones(3).to_sparse()
    for number in range(250):
        with contextlib.suppress(UnsupportedTensorError):
            await pipe.send(sparse)
        with contextlib.suppress(WouldBlockError):
            pipe.send_nowait(pattern(number, 10))
        cancelled = asyncio.create_task(pipe.send(pattern(number, full if number % 2 else 10)))
        await until(lambda: pipe.statistics().waiting_sends == 1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
    waiting = [pipe.send(None if number % 2 else pattern(number, full)) for number in range(250)]
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, WouldBlockError)


async def destroyed(found: Findings) -> None:
    """Destroy the group while messages travel, and while calls wait; then open another pipe."""
    world = dist.group.WORLD
    assert world is not None
    unopened = RankPipe(world, 1 - found.rank, max_wait_s=_WAIT_S)
    async with _pipe() as pipe:
        waiting = asyncio.create_task(pipe.receive())
        first = asyncio.create_task(pipe.send(pattern(found.rank, 20 * BIG)))
        await asyncio.sleep(0)  # both calls have begun
        dist.destroy_process_group()
        message = await waiting
        assert message is not None
        found.messages = int(torch.equal(message, pattern(pipe.peer, 20 * BIG)))
        del message
        await first
        found.messages += await _exchange(pipe)
        await pipe.drain()
        async with unopened:  # its group is gone, but it has kept the store
            found.messages += await _exchange(unopened)
            await unopened.drain()
    try:
        RankPipe(dist.group.WORLD, 1 - found.rank)  # type: ignore[arg-type]
    except TypeError as error:
        found.notes.append(str(error))


def _pipe(**options: Any) -> RankPipe:
    """Return a new pipe to the other rank of two."""
    world = dist.group.WORLD
    assert world is not None
    return RankPipe(world, 1 - dist.get_rank(), **{"max_wait_s": _WAIT_S, "max_bytes": 64 << 20, **options})


_SCENARIOS: dict[str, Callable[[Findings], Coroutine[Any, Any, None]]] = {
    "everything": everything,
    "killed": killed,
    "missing": missing,
    "stopped": stopped,
    "silent": silent,
    "failing": failing,
    "destroyed": destroyed,
}


def main(folder: str, *scenarios: str) -> None:
    """Run one rank, and write its findings in each scenario."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for scenario in scenarios:
        found = Findings(rank)
        asyncio.run(_SCENARIOS[scenario](found))
        if found.lost_after_s is not None:
            found.lost_after_s /= allowed_s(1.0)
        # Renamed, since torchrun may end this process at any time after another one was killed.
        path = Path(folder) / f"{scenario}-{rank}.json"
        path.with_suffix(".new").write_bytes(msgspec.json.encode(found))
        path.with_suffix(".new").rename(path)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
