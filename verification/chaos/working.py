"""The execution of the orders of a round: they are started, cancelled, and recorded."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import torch

from aiotensor import AioTensorError
from verification.chaos.here import here
from verification.chaos.journal import Began, Ended
from verification.chaos.plan import Order, SenderPlan
from verification.patterns import pattern
from verification.processes.peers import State


async def begin_round(state: State) -> None:
    """Forget the last round."""
    here.journal.begin_anew()


async def carry_out_all(
    state: State,
    carry_out: Callable[[State, Order, Sequence[torch.Tensor]], Awaitable[None]],
    plan: SenderPlan,
    part: int,
) -> None:
    """Carry out the orders of a part of a plan."""
    orders = deque(
        (order, [pattern(order.key + i, n) for i, n in enumerate(order.counts)]) for order in plan.parts[part]
    )

    async def work() -> None:
        while orders:
            await carry_out(state, *orders.popleft())
            await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(plan.width)))


async def account(order: Order, doing: Coroutine[Any, Any, None]) -> None:
    """Carry out an order, cancel it if that is planned, and record the outcome."""
    here.journal(Began(order.key))
    how, text = "whole", ""
    try:
        if not order.is_cancelled:
            await doing
        elif await _cancel(asyncio.create_task(doing), order.after_ms / 1000):
            how = "cancelled"
    except (AioTensorError, OSError) as error:
        how, text = type(error).__name__, str(error)
    here.journal(Ended(order.key, how, text))


async def _cancel(task: "asyncio.Task[None]", after_s: float) -> bool:
    """Cancel a task after a while; return whether that ended it, or raise its own error."""
    try:
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            return True
        task.result()
        return False
    finally:
        del task  # its error refers to this frame, and would keep the tensor until a garbage collection
