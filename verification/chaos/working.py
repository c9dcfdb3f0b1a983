"""Orders of a round on their way: begun, cancelled, accounted for, and held up after a loss."""

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
    """A message's own block changed its mind."""


class Work:
    """How far the orders of this process are in this round.

    Args:
        losses: counts the other sides that were lost until now.
        held: counts the operations that may go on although the other side was lost.
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
            state: of this process.
            plan: of this sender.
            part: which of its orders.
            pauses: after a loss, begin nothing new until `told` has looked.
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
        """Pause within an order, which waits for nothing meanwhile."""
        self._pending -= 1
        try:
            await self._pause(state)
        finally:
            self._pending += 1

    async def _pause(self, state: State) -> None:
        """After a loss, begin nothing that waits for the next other side before `told` has looked."""
        if self._pauses and self._losses(state) > self._losses_before:
            await self._goes_on.wait()

    async def account(self, order: Order, doing: Coroutine[Any, Any, None]) -> None:
        """Do what an order says, cancel it if that is its fate, and write down how it ended."""
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
        """Wait until a loss has ended every wait, let the round go on, and count the losses."""
        while self._losses(state) == self._losses_before:
            await asyncio.sleep(0.001)
        # Who got a permit in the very turn of the loss goes on to the next receiver.
        while self._pending > self._held(state):
            await asyncio.sleep(0.001)
        self._goes_on.set()
        return self._losses(state)


async def _cancel(task: "asyncio.Task[None]", after_s: float) -> bool:
    """Cancel a task after a while, and say whether that ended it; raise what else did."""
    try:
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            return True
        task.result()
        return False
    finally:
        del task  # with its error it would keep this frame, and the tensor, until the garbage collector comes
