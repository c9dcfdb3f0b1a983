"""Round trips in callbacks of the event loop, for the limits on asyncio.

Both sides read in a callback of the loop and write in the same callback, without a future, a task or another
iteration of the loop. They convert bytes to tensors and back, as all contenders do, and nothing more. So the
difference between a library for asyncio and this limit is the cost of the library.
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

__all__ = ["CallbackPort", "far", "near"]


class CallbackPort(Protocol):
    """An open end of a connection that never blocks."""

    def listen(self, arrived: Callable[[], None]) -> None:
        """Call a function for each tensor that has arrived; it receives the tensor, and may send or stop."""

    def stop(self) -> None: ...

    def send(self, tensor: torch.Tensor) -> None: ...

    def receive(self, size: int) -> torch.Tensor: ...


async def near(stage: Stage[CallbackPort]) -> AsyncIterator[Batch]:
    """Time the trips, one batch for each size."""
    for size in stage.spec.sizes:
        first = warm_up(stage.spec, size)
        sources = fresh(size, first + stage.spec.effort.trips(size))
        await stage.barrier.meet()
        latencies = await _trips(stage.port, size, sources)
        await stage.barrier.meet()
        yield Batch(size, latencies_ns=latencies[first:])


async def far(stage: Stage[CallbackPort]) -> None:
    """Answer the trips."""
    for size in stage.spec.sizes:
        answers = fresh(size, warm_up(stage.spec, size) + stage.spec.effort.trips(size))
        await stage.barrier.meet()
        await _echo(stage.port, size, answers)
        await stage.barrier.meet()


# From the end of a list, as for all contenders; they stay in it, so that freeing is not timed.


async def _trips(port: CallbackPort, size: int, sources: list[torch.Tensor]) -> list[int]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    latencies: list[int] = []
    left = reversed(sources)
    began = 0

    def send() -> None:
        nonlocal began
        source = next(left)
        source[0] = len(latencies) % MARKS
        began = perf_counter_ns()
        port.send(source)

    def arrived() -> None:
        answer = port.receive(size)
        value = int(answer[0])
        took = perf_counter_ns() - began
        is_right = value == len(latencies) % MARKS and len(answer) == size
        del answer  # before the next trip is timed
        if not is_right:
            port.stop()
            done.set_exception(RuntimeError(f"trip {len(latencies)} brought back another tensor"))
            return
        latencies.append(took)
        if len(latencies) < len(sources):
            send()
        else:
            port.stop()
            done.set_result(None)

    port.listen(arrived)
    send()
    await done
    return latencies


async def _echo(port: CallbackPort, size: int, answers: list[torch.Tensor]) -> None:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left = reversed(answers)

    def arrived() -> None:
        answer, received = next(left), port.receive(size)
        answer[0] = int(received[0])
        port.send(answer)
        if answer is answers[0]:
            port.stop()
            done.set_result(None)

    port.listen(arrived)
    await done
