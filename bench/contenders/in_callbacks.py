"""There and back in callbacks of the event loop: what the limits for asyncio share.

Both sides read in a callback of the loop and write in the same callback; no future, no task and no other
turn of the loop lies between. What arrives becomes a tensor and each tensor is sent, as with any contender,
and nothing else is done. What a library for asyncio takes beyond this is its own.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from time import perf_counter_ns
from typing import Protocol

import torch

from bench.records import Batch
from bench.workloads.base import Stage
from bench.workloads.round_trip import MARKS, warm_up
from bench.workloads.stream import fresh

__all__ = ["Road", "far", "near"]


class Road(Protocol):
    """An open end of a connection that never blocks."""

    def listen(self, arrived: Callable[[], None]) -> None:
        """Call this once for each tensor that has arrived; it receives that, and may send or stop."""

    def stop(self) -> None: ...

    def send(self, tensor: torch.Tensor) -> None: ...

    def receive(self, size: int) -> torch.Tensor: ...


async def near(stage: Stage[Road]) -> AsyncIterator[Batch]:
    """Time the trips, one batch for each size."""
    for size in stage.spec.sizes:
        first = warm_up(stage.spec, size)
        sources = fresh(size, first + stage.spec.effort.trips(size))
        await stage.barrier.meet()
        latencies = await _trips(stage.port, size, sources)
        await stage.barrier.meet()
        yield Batch(size, latencies_ns=latencies[first:])


async def far(stage: Stage[Road]) -> None:
    """Answer the trips."""
    for size in stage.spec.sizes:
        answers = fresh(size, warm_up(stage.spec, size) + stage.spec.effort.trips(size))
        await stage.barrier.meet()
        await _echo(stage.port, size, answers)
        await stage.barrier.meet()


# From the end of a list, as any contender is given them; they stay there, so that freeing is not timed.


async def _trips(road: Road, size: int, sources: list[torch.Tensor]) -> list[int]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    latencies: list[int] = []
    left = reversed(sources)
    began = 0

    def send() -> None:
        nonlocal began
        source = next(left)
        source[0] = len(latencies) % MARKS
        began = perf_counter_ns()
        road.send(source)

    def arrived() -> None:
        answer = road.receive(size)
        value = int(answer[0])
        took = perf_counter_ns() - began
        is_right = value == len(latencies) % MARKS and len(answer) == size
        del answer  # before the next trip is timed
        if not is_right:
            road.stop()
            done.set_exception(RuntimeError(f"trip {len(latencies)} brought back another tensor"))
            return
        latencies.append(took)
        if len(latencies) < len(sources):
            send()
        else:
            road.stop()
            done.set_result(None)

    road.listen(arrived)
    send()
    await done
    return latencies


async def _echo(road: Road, size: int, answers: list[torch.Tensor]) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = reversed(answers)

    def arrived() -> None:
        answer, received = next(left), road.receive(size)
        answer[0] = int(received[0])
        road.send(answer)
        if answer is answers[0]:
            road.stop()
            done.set_result(None)

    road.listen(arrived)
    await done
