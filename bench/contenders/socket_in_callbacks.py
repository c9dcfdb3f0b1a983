"""msgspec frames over a Unix record socket, in callbacks of the event loop: the limit for asyncio.

Each record holds a frame with the number, the type, the shape and the bytes of a tensor. Both sides read in a
callback of the loop and write in the same callback, without a future, a task or another iteration of the
loop, and without permits, shared memory, cancellation or several peers. So the difference between a library
for asyncio and this limit is the cost of the library.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter_ns

import msgspec
import torch

from bench.contenders.base import Layout, Sides
from bench.records import Batch
from bench.workloads.base import Stage
from bench.workloads.round_trip import MARKS, check, warm_up
from bench.workloads.stream import fresh

_BUFFER = 1 << 20
_DTYPES = {"uint8": torch.uint8, "float32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Put(msgspec.Struct, array_like=True, tag="put", frozen=True):
    """One tensor of a message."""

    message: int
    dtype: str
    shape: tuple[int, ...]
    payload: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Put]).decode


def _send(sock: socket.socket, number: int, tensor: torch.Tensor) -> None:
    payload = tensor.numpy().tobytes()
    sock.send(_encode([Put(number, _NAMES[tensor.dtype], tuple(tensor.shape), payload)]))


def _receive(sock: socket.socket) -> torch.Tensor:
    [put] = _decode(sock.recv(_BUFFER))
    return torch.frombuffer(bytearray(put.payload), dtype=_DTYPES[put.dtype]).view(put.shape)


async def _until_done(sock: socket.socket, arrived: Callable[[], bool]) -> None:
    """Call a function whenever the socket is readable, until it returns True or raises an error."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def readable() -> None:
        try:
            if arrived():
                done.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised below
            done.set_exception(error)

    loop.add_reader(sock, readable)
    try:
        await done
    finally:
        loop.remove_reader(sock)


async def near(stage: Stage[socket.socket]) -> AsyncIterator[Batch]:
    """Time the trips, one batch for each size."""
    for size in stage.spec.sizes:
        first = warm_up(stage.spec, size)
        sources = fresh(size, first + stage.spec.effort.trips(size))
        await stage.barrier.meet()
        latencies = await _trips(stage.port, size, sources)
        await stage.barrier.meet()
        yield Batch(size, latencies_ns=latencies[first:])


async def far(stage: Stage[socket.socket]) -> None:
    """Answer the trips."""
    for size in stage.spec.sizes:
        answers = fresh(size, warm_up(stage.spec, size) + stage.spec.effort.trips(size))
        await stage.barrier.meet()
        await _echo(stage.port, answers)
        await stage.barrier.meet()


# From the end of a list, as for all contenders; they stay in it, so that freeing is not timed.


async def _trips(sock: socket.socket, size: int, sources: list[torch.Tensor]) -> list[int]:
    latencies: list[int] = []
    left = reversed(sources)
    began = 0

    def send() -> None:
        nonlocal began
        source = next(left)
        source[0] = len(latencies) % MARKS
        began = perf_counter_ns()
        _send(sock, len(latencies), source)

    def arrived() -> bool:
        answer = _receive(sock)
        value = int(answer[0])
        took = perf_counter_ns() - began
        check(len(latencies), size, value == len(latencies) % MARKS and len(answer) == size)
        del answer  # before the next trip is timed
        latencies.append(took)
        if len(latencies) < len(sources):
            send()
        return len(latencies) == len(sources)

    send()
    await _until_done(sock, arrived)
    return latencies


async def _echo(sock: socket.socket, answers: list[torch.Tensor]) -> None:
    left = enumerate(reversed(answers), start=1)

    def arrived() -> bool:
        number, answer = next(left)
        answer[0] = int(_receive(sock)[0])
        _send(sock, number, answer)
        return number == len(answers)

    await _until_done(sock, arrived)


@asynccontextmanager
async def opened(sock: socket.socket) -> AsyncIterator[socket.socket]:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    yield sock


def connect(layout: Layout) -> Sides[socket.socket]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [partial(opened, near)], partial(opened, far)
