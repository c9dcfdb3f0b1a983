"""The bytes of a tensor over a Unix record socket, in callbacks of the event loop: the limit for asyncio.

Both sides read in a callback of the loop and write in the same callback; no future, no task and no other
turn of the loop lies between. Each record becomes a tensor and each tensor a record, as with any contender,
and nothing else is done. What a library for asyncio takes beyond this is its own.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from bench.contenders.base import Layout
from bench.records import Batch
from bench.workloads.base import Stage
from bench.workloads.round_trip import MARKS, warm_up
from bench.workloads.stream import fresh

_BUFFER = 1 << 20


@dataclass(frozen=True)
class SocketPort:
    road: socket.socket
    overlaps: bool = False

    async def send(self, tensor: torch.Tensor) -> None:
        raise TypeError("this contender drives itself")

    async def receive(self) -> torch.Tensor:
        raise TypeError("this contender drives itself")


@dataclass(frozen=True)
class SocketSide:
    road: socket.socket

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SocketPort]:
        self.road.setblocking(False)
        self.road.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        yield SocketPort(self.road)


def connect(layout: Layout) -> tuple[list[SocketSide], SocketSide]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [SocketSide(near)], SocketSide(far)


async def near(stage: Stage) -> AsyncIterator[Batch]:
    """Time the trips, one batch for each size."""
    for size in stage.spec.sizes:
        first = warm_up(stage.spec, size)
        sources = fresh(size, first + stage.spec.effort.trips(size))
        await stage.barrier.meet()
        latencies = await _trips(_road(stage), size, sources)
        await stage.barrier.meet()
        yield Batch(size, latencies_ns=latencies[first:])


async def far(stage: Stage) -> None:
    """Answer the trips."""
    for size in stage.spec.sizes:
        answers = fresh(size, warm_up(stage.spec, size) + stage.spec.effort.trips(size))
        await stage.barrier.meet()
        await _echo(_road(stage), size, answers)
        await stage.barrier.meet()


async def _trips(road: socket.socket, size: int, sources: list[torch.Tensor]) -> list[int]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    latencies: list[int] = []
    began = 0

    def send() -> None:
        nonlocal began
        source = sources.pop()
        source[0] = len(latencies) % MARKS
        began = perf_counter_ns()
        road.send(source.numpy().data)

    def receive() -> None:
        answer = _receive(road, size)
        value = int(answer[0])
        took = perf_counter_ns() - began
        if value != len(latencies) % MARKS:
            loop.remove_reader(road)
            done.set_exception(RuntimeError(f"trip {len(latencies)} brought back another record"))
            return
        latencies.append(took)
        if sources:
            send()
        else:
            loop.remove_reader(road)
            done.set_result(None)

    loop.add_reader(road, receive)
    send()
    await done
    return latencies


async def _echo(road: socket.socket, size: int, answers: list[torch.Tensor]) -> None:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def answer() -> None:
        mine, received = answers.pop(), _receive(road, size)
        mine[0] = int(received[0])
        road.send(mine.numpy().data)
        if not answers:
            loop.remove_reader(road)
            done.set_result(None)

    loop.add_reader(road, answer)
    await done


def _receive(road: socket.socket, size: int) -> torch.Tensor:
    tensor = torch.empty(size, dtype=torch.uint8)
    if road.recv_into(tensor.numpy().data) != size:
        raise ConnectionError("the other side closed the socket")
    return tensor


def _road(stage: Stage) -> socket.socket:
    if not isinstance(stage.port, SocketPort):
        raise TypeError("these coroutines drive a raw socket only")
    return stage.port.road
