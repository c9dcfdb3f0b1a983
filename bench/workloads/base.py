"""A workload: a module with the coroutines `near` and `far`, and one row in the table.

``near(stage)`` runs in the process that reports; it is an asynchronous generator of batches. ``far(stage)``
runs in each of the other processes. A row says on which side the tensors are sent.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

from bench.records import Effort, Source, Spec

P = TypeVar("P")
T = TypeVar("T")

_MAX_RECORD_BYTES = 64 << 10


class Workload(NamedTuple):
    """A row of the table.

    Attributes:
        name: how the command line and the results name it.
        file: the module with `near` and `far`.
        title: the heading of its table.
        contenders: the names of the contenders that take part, those of aiotensor first.
        full: the effort of a full run.
        quick: the effort of a quick run.
        baseline: the contender that the others are compared with.
        score: the number by which contenders are compared.
        sizes: the sizes of the tensors; None for those of the command line.
        peers: the processes of the side that has several, one batch for each number.
        is_apart: whether each number of peers is measured in new processes, because all connected peers
            take part.
        depth: the tensors that may be in flight at once, for each peer; of videos, for all peers together.
        source: where the tensors come from.
        answer_bytes: the size of the tensor in an answer; None for that of the request.
        both_ways: whether the far side sends too.
        broadcasts: whether only the single side sends.
        single_is_near: whether the reporting process has the single side: the receiver, or the publisher.
        deadline_s: the time limit for one batch, after which a contender counts as hung.
        in_quick: whether a quick run measures it too.
        between_hosts: whether the near side and the far side are on two hosts, which `verification.networks`
            emulates.
    """

    name: str
    file: str
    title: str
    contenders: Sequence[str]
    full: Effort
    quick: Effort
    baseline: str = "torch-queue"
    score: str = "median_s"
    sizes: tuple[int, ...] | None = None
    peers: tuple[int, ...] = (1,)
    is_apart: bool = False
    depth: int = 8
    source: Source = "copied"
    answer_bytes: int | None = None
    both_ways: bool = True
    broadcasts: bool = False
    single_is_near: bool = False
    deadline_s: float = 60.0
    in_quick: bool = False
    between_hosts: bool = False

    @property
    def module(self) -> str:
        return f"bench.workloads.{self.file}"

    @property
    def more_is_better(self) -> bool:
        """Whether a higher score is better: it is a rate."""
        return self.score.endswith("_per_s")


class Barrier:
    """A barrier for the processes of a group, with reports to the near process; not used while a clock runs.

    The near process has a record socket to each of the others; each of these has one, to the near process.
    """

    def __init__(self, sockets: Sequence[socket.socket], *, leads: bool) -> None:
        self._sockets = sockets
        self._leads = leads
        for sock in sockets:
            sock.setblocking(False)

    async def meet(self) -> None:
        """Wait until all other processes wait, too."""
        for step in (self._hear, self._tell) if self._leads else (self._tell, self._hear):
            for sock in self._sockets:
                await step(sock)

    async def report(self, value: object) -> None:
        """Send a value to the near process, which collects one from each of the others."""
        for sock in self._sockets:
            await self._tell(sock, msgspec.json.encode(value))

    async def collect(self, kind: type[T]) -> list[T]:
        """Wait for a value from each of the others."""
        return [msgspec.json.decode(await self._hear(sock), type=kind) for sock in self._sockets]

    async def _tell(self, sock: socket.socket, record: bytes = b".") -> None:
        await asyncio.get_running_loop().sock_sendall(sock, record)

    async def _hear(self, sock: socket.socket) -> bytes:
        record = await asyncio.get_running_loop().sock_recv(sock, _MAX_RECORD_BYTES)
        if not record:
            raise ConnectionError("another process of the group is gone")
        return record


@dataclass(frozen=True)
class Stage(Generic[P]):
    """The argument of `near` and `far`.

    Attributes:
        spec: the task.
        port: this process's end of the connection.
        barrier: the barrier at which all processes meet.
        number: the number of this process among its kind, from 0.
        processes: the near process, followed by the others; known to the near process only.
        shared_before: the shared memory on the machine before anything was opened, in bytes.
    """

    spec: Spec
    port: P
    barrier: Barrier
    number: int = 0
    processes: tuple[int, ...] = ()
    shared_before: int = 0
