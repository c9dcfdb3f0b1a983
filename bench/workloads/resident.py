"""Whether the memory of sender and receiver stays flat over many sends.

Only anonymous memory is read: neither files nor shared memory. It is read at the start, after a tenth of the
sends, when most pools are filled, and after each third of the rest. An allocator grows in occasional steps; a
leak grows in every third. Every tensor is a fresh copy, freed when it was sent.
"""

from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import torch

from bench.contenders.base import Port
from bench.records import Batch
from bench.usage import private_bytes
from bench.workloads.base import Stage
from bench.workloads.stream import fresh, pour, send_end, take

__all__ = ["far", "near"]

_WIDTH = 8
_THIRDS = 3
_STEP_BYTES = 512 << 10  # of 100,000 sends, 17 bytes for each of a third


async def near(stage: Stage[Port]) -> AsyncIterator[Batch]:
    """Send, one batch for each size."""
    for size in stage.spec.sizes:
        memory = [_memory(stage)]
        for count in _portions(stage.spec.effort.most):
            await _send(stage, size, count)
            memory.append(_memory(stage))
        start, *later = memory
        warm, end = later[0], later[-1]
        leaks = any(
            all(after[side] - before[side] > _STEP_BYTES for before, after in pairwise(later))
            for side in (0, 1)
        )
        numbers = {
            "sends": float(stage.spec.effort.most),
            "growth_bytes": max(after - before for before, after in zip(warm, end, strict=True)),
            "flat": float(not leaks),
        }
        for name, (sender, receiver) in (("start", start), ("warm", warm), ("end", end)):
            numbers |= {f"sender_{name}_bytes": sender, f"receiver_{name}_bytes": receiver}
        yield Batch(size, numbers=numbers)


async def far(stage: Stage[Port]) -> None:
    """Take the tensors and free them."""
    for _ in stage.spec.sizes:
        for _ in _portions(stage.spec.effort.most):
            await take(stage.port)
            await stage.barrier.meet()


def _portions(sends: int) -> list[int]:
    return [sends // 10, *[(sends - sends // 10) // _THIRDS] * _THIRDS]


async def _send(stage: Stage[Port], size: int, count: int) -> None:
    await pour(stage.port, _copies(size, count), _WIDTH)
    await send_end(stage.port, size, count)
    await stage.barrier.meet()


def _copies(size: int, count: int) -> Iterator[torch.Tensor]:
    (pattern,) = fresh(size, 1)
    return (pattern.clone() for _ in range(count))


def _memory(stage: Stage[Port]) -> tuple[float, float]:
    sender, receiver = stage.processes
    return float(private_bytes(sender)), float(private_bytes(receiver))
