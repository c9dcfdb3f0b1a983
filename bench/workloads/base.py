"""What a workload is: a module with the coroutines `near` and `far`, and one row in the table.

``near(stage)`` runs in the process that reports; it is an asynchronous generator of batches. ``far(stage)``
runs in each of the other processes. A row says on which side the tensors are sent.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from bench.records import Cargo, Effort, Reply, Source, Spec

__all__ = ["Barrier", "Stage", "Workload"]

P = TypeVar("P")


class Workload(NamedTuple):
    """A row of the table.

    Attributes:
        name: how the command line and the results name it.
        module: with `near` and `far`.
        title: what it measures, as the heading of its table.
        score: the number by which contenders are compared.
        more_is_better: what the comparison of scores means.
        full: how much of it a full run does.
        quick: how much of it a quick run does.
        sizes: of the tensors; None for those of the command line.
        senders: processes that send at once.
        depth: tensors that may be on their way at once, for each sender.
        source: where the tensors come from.
        reply: what a request is answered with.
        both_ways: whether the far side sends too.
        receiver_is_near: whether the process that reports is the one that receives.
        side_by_side: whether all contenders may be measured at the same time, since they do nothing.
        deadline_s: for one batch; beyond it a contender is taken for hung.
        carries: what; only contenders that carry the same take part.
        baseline: the contender that the others are compared with; None for that of the run.
    """

    name: str
    module: str
    title: str
    score: str
    more_is_better: bool
    full: Effort
    quick: Effort
    sizes: tuple[int, ...] | None = None
    senders: tuple[int, ...] = (1,)
    depth: int = 8
    source: Source = "copied"
    reply: Reply = "echo"
    both_ways: bool = True
    receiver_is_near: bool = False
    side_by_side: bool = False
    deadline_s: float = 60.0
    carries: Cargo = "tensors"
    baseline: str | None = None


class Barrier:
    """Where the processes of a group wait for each other between batches, never within one.

    The near process has a road to each of the others; each of those has one road, to the near process.
    """

    def __init__(self, roads: Sequence[socket.socket], *, leads: bool) -> None:
        self._roads = roads
        self._leads = leads
        for road in roads:
            road.setblocking(False)

    async def meet(self) -> None:
        """Wait until all the other processes are here too."""
        for step in (self._hear, self._tell) if self._leads else (self._tell, self._hear):
            for road in self._roads:
                await step(road)

    async def _tell(self, road: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(road, b".")

    async def _hear(self, road: socket.socket) -> None:
        if not await asyncio.get_running_loop().sock_recv(road, 1):
            raise ConnectionError("another process of the group is gone")


@dataclass(frozen=True)
class Stage(Generic[P]):
    """What `near` and `far` are given.

    Attributes:
        spec: what to measure.
        port: this process's end of the connection; of which kind, the row says.
        barrier: to meet the other processes.
        number: of this process among its kind, from 0.
        processes: the near process and after it the others; known to the near process only.
        shared_before: bytes of shared memory on the machine before anything was opened.
    """

    spec: Spec
    port: P
    barrier: Barrier
    number: int = 0
    processes: tuple[int, ...] = ()
    shared_before: int = 0
