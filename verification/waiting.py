"""Waits for conditions that no event announces."""

import asyncio
from collections.abc import Callable

from aiotensor import TensorSender


async def until(condition: Callable[[], bool]) -> None:
    """Run the loop until a condition is true; a wait without end is left to the caller's time limit."""
    while not condition():
        await asyncio.sleep(0)


async def settled(sender: TensorSender) -> None:
    """Wait until all memory and permits of a sender have been released."""
    await until(lambda: sender.statistics().in_flight == 0 and sender.statistics().bytes_in_use == 0)
