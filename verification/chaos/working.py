"""The execution of the orders of a round: they are started, cancelled, recorded, and paused after a loss."""

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

__all__ = ["GivenUpError", "Work"]


class GivenUpError(Exception):
    """Raised in the block of a message, to discard it."""


class Work:
    """The progress of this process with its orders in a round.

    Args:
        losses: counts the lost peers.
        held: counts the pending operations that a loss need not end.
        carry_out: carries out one order.
    """

    def __init__(
        self,
        losses: Callable[[State], int],
        held: Callable[[State], int],
        carry_out: Callable[[State, Order, Sequence[torch.Tensor]], Awaitable[None]],
    ) -> None:
        self._losses = losses
        self._held = held
        self._carry_out = carry_out
        self._forget(0)

    def _forget(self, losses: int) -> None:
        self._pending = 0  # operations that have not ended
        self._losses_before = losses
        self._pauses = False
        self._goes_on = asyncio.Event()

    def begin(self, state: State) -> None:
        """Forget the last round."""
        self._forget(self._losses(state))
        here.journal.begin_anew()

    async def run(self, state: State, plan: SenderPlan, part: int, *, pauses: bool) -> None:
        """Carry out the orders of a part.

        Args:
            state: the state of this process.
            plan: the plan of this sender.
            part: the part of its orders to carry out.
            pauses: whether no new order starts between a loss and the return of `told`.
        """
        self._pauses = pauses
        orders = deque(
            (order, [pattern(order.key + i, n) for i, n in enumerate(order.counts)])
            for order in plan.parts[part]
        )

        async def work() -> None:
            while orders:
                await self._pause(state)
                if orders:
                    await self._carry_out(state, *orders.popleft())
                    await asyncio.sleep(0)

        await asyncio.gather(*(work() for _ in range(plan.width)))

    async def pause(self, state: State) -> None:
        """Pause within an order, which does not count as pending during the pause."""
        self._pending -= 1
        try:
            await self._pause(state)
        finally:
            self._pending += 1

    async def _pause(self, state: State) -> None:
        """After a loss, wait for `told` before an operation that would wait for the next peer."""
        if self._pauses and self._losses(state) > self._losses_before:
            await self._goes_on.wait()

    async def account(self, order: Order, doing: Coroutine[Any, Any, None]) -> None:
        """Carry out an order, cancel it if that is its fate, and record the outcome."""
        here.journal(Began(order.key, len(order.counts)))
        self._pending += 1
        how, text = "whole", ""
        try:
            if order.fate != "cancel":
                await doing
            elif await _cancel(asyncio.create_task(doing), order.after_ms / 1000):
                how = "cancelled"
        except GivenUpError:
            how = "given up"
        except (AioTensorError, OSError) as error:
            how, text = type(error).__name__, str(error)
        finally:
            self._pending -= 1
        here.journal(Ended(order.key, how, text))

    async def told(self, state: State) -> int:
        """Wait until a loss has ended every wait, continue the round, and return the number of losses."""
        while self._losses(state) == self._losses_before:
            await asyncio.sleep(0.001)
        # A send that got its permit in the iteration of the loss waits for the next receiver.
        while self._pending > self._held(state):
            await asyncio.sleep(0.001)
        self._goes_on.set()
        return self._losses(state)


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
